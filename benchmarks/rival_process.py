"""Decodes prompts by one of the systems that are compared (``benchmarks.rival_jobs``), in a process of its own.

    PYTHON benchmarks/rival_process.py < JOB     # a Job as JSON; appends a line for each prompt to job.out

OpenVINO and vLLM live in environments of their own, without this project: only the standard library is imported at the
top. Decoding is greedy. The time of the prompt ends when its first tokens are there; those are not counted as decoded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

PROPOSED, DRAFTED, NGRAM = 10, 5, 3
"""Tokens that prompt lookup and draft models propose, and tokens that prompt lookup compares, where a system has no
value of its own; those of OpenVINO's and transformers' examples."""
_WARM_TOKENS = 16
_SLACK = 64
"""Tokens of the context behind an answer, for drafts."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process decodes.

    Attributes:
        rival: SYSTEM, or SYSTEM-WAY of drafting.
        target, draft: files or folders of models; draft is "" where none drafts.
        threads: that compute.
        ends: tokens that end an answer.
        prompts: id -> token ids.
        warm: a prompt that is decoded first and not counted.
        row: what each line begins with.
        out: file that lines are appended to.
        drafted: most tokens that are drafted for a pass; 0: the system's own choice.
        requests: that are decoded together.
        tier: instruction set, by the native engine's name; "": the system's own choice.
    """

    rival: str
    target: str
    draft: str
    threads: int
    max_tokens: int
    ends: list[int]
    prompts: dict[str, list[int]]
    warm: list[int]
    row: dict[str, Any]
    out: str
    drafted: int = 0
    requests: int = 1
    tier: str = ""

    @property
    def way(self) -> str:
        return self.rival.partition("-")[2]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt, its answer and drafts behind it."""
        return max(map(len, self.prompts.values())) + self.max_tokens + _SLACK


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's.

    Attributes:
        ids: all tokens, the one that ends it included, unless a system leaves it out.
        seconds: from the prompt's token ids to the answer; where several are decoded together, to all of them.
        decode_tokens, decode_seconds: behind the first tokens.
    """

    ids: list[int]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    text: str


class Clock:
    """Notes when the first tokens come, and how many."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._at, self._first = 0.0, 0

    def came(self, count: int) -> None:
        """So many tokens are there that were not before."""
        if not self._first:
            self._at, self._first = time.perf_counter(), count

    def answer(self, ids: list[int], text: str) -> Answer:
        now = time.perf_counter()
        return Answer(ids, now - self.began, len(ids) - self._first, now - self._at, text)


Prompts = Sequence[list[int]]
Decode = Callable[[Prompts, int], list[Answer]]
"""Answers prompts together, each by at most so many tokens."""


def draftree(job: Job) -> tuple[str, Decode]:
    """This project's own decoding: by the native engine, or by its backend of llama.cpp."""
    engines: Any = importlib.import_module("draftree.engine.engine")
    scheduling: Any = importlib.import_module("draftree.engine.scheduler").SchedulerParams(rows=job.requests)
    target = _target(job)
    engine = engines.Engine(target, _speculation(job), scheduling=scheduling)
    config: Any = importlib.import_module("draftree.config")

    def decode(prompts: Prompts, most: int) -> list[Answer]:
        began = time.perf_counter()
        made = engine.generate(prompts, config.SamplingParams(max_tokens=most, seed=0))
        seconds = time.perf_counter() - began
        return [_own_answer(answer, seconds) for answer in made]

    can = target.capabilities
    return f"{version('draftree')}, {can.engine}{'' if can.tier in can.engine else f', {can.tier}'}", decode


def _target(job: Job) -> Any:
    if job.tier:
        native: Any = importlib.import_module("draftree.models.native.native_model")
        return native.NativeModel(job.target, threads=job.threads, tier=job.tier)
    loading: Any = importlib.import_module("draftree.models.loading")
    backend = "llama.cpp" if job.rival.startswith("draftree+") else None
    return loading.load(job.target, backend=backend, threads=job.threads)


def _speculation(job: Job) -> Any:
    """Method auto drafts as much as pays; a tree of a given size is filled."""
    if job.way == "ar":
        return None
    drafter = "lookup" if job.way == "prompt-lookup" else job.draft or "auto"
    how: dict[str, Any] = {"method": "auto"}
    if job.drafted:
        how = {"method": "opt-tree", "settings": {"delta": 0.001}, "nodes": job.drafted}
    speculation: Any = importlib.import_module("draftree.engine.speculation")
    return speculation.SpeculationParams(drafter=drafter, **how)


def _own_answer(made: Any, seconds: float) -> Answer:
    return Answer(made.token_ids, seconds, len(made.token_ids) - 1, seconds - made.stats.seconds.prefill, made.text)


def transformers(job: Job) -> tuple[str, Decode]:
    """transformers on PyTorch, in float32."""
    if job.tier:  # read when PyTorch is loaded
        os.environ.update(ATEN_CPU_CAPABILITY=job.tier, MKL_ENABLE_INSTRUCTIONS=job.tier.upper())
        os.environ.update(ONEDNN_MAX_CPU_ISA=job.tier.upper())
    torch: Any = importlib.import_module("torch")
    peers: Any = importlib.import_module("draftree.bench.transformers_peer")
    config: Any = importlib.import_module("draftree.config")
    options: dict[str, Any] = {}
    if job.way == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": job.drafted or PROPOSED}
    if job.draft:
        options = {"assistant_model": peers.load_peer(job.draft, dtype=None, device=None)[0]}
    if job.draft and job.drafted:
        drafting = options["assistant_model"].generation_config
        drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = job.drafted, "constant"
        drafting.assistant_confidence_threshold = 0
    model, tokenizer = peers.load_peer(job.target, dtype=None, device=None)
    peer = peers.TransformersPeer(model, tokenizer, threads=job.threads, **options)

    def decode(prompts: Prompts, most: int) -> list[Answer]:
        turns = peer.decode_together(prompts, config.SamplingParams(max_tokens=most, seed=0))
        return [_turns_answer(turn) for turn in turns]

    return f"{version('transformers')}, PyTorch {torch.__version__}, float32", decode


def _turns_answer(turn: Any) -> Answer:
    total, prefill = turn.seconds.total, turn.seconds.prefill
    after = 0.0 if prefill is None else total - prefill  # unknown where the first token is the last
    return Answer(turn.ids, total, len(turn.ids) - turn.first, after, turn.text)


def llama(job: Job) -> tuple[str, Decode]:
    """The server of the ``xllamacpp`` package, which is llama.cpp's; times are those of its own clock."""
    library: Any = importlib.import_module("xllamacpp")
    params, kinds = library.CommonParams(), library.common_speculative_type
    params.model.path, params.n_ctx, params.n_parallel = job.target, job.context * job.requests, job.requests
    params.verbosity = 0
    draft = params.speculative.draft
    for pool in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        pool.n_threads = job.threads
    if job.way:
        way = "draft-simple" if job.draft else job.way
        name = f"COMMON_SPECULATIVE_TYPE_{way.replace('-', '_').upper()}"
        if not hasattr(kinds, name):
            raise ValueError(f"this llama.cpp has no {way}")
        params.speculative.types = [getattr(kinds, name)]
        draft.mparams.path = job.draft
    if job.drafted:
        draft.n_max, draft.p_min = job.drafted, 0.0
        lookup = params.speculative.ngram_map_k  # ngram-simple drafts nothing where it may draft 2 tokens
        lookup.size_n, lookup.size_m = NGRAM, job.drafted
    server = library.Server(params)
    options = {"temperature": 0, "cache_prompt": False, "verbose": True, "return_tokens": True}

    def answer(ids: list[int], most: int) -> Answer:
        began = time.perf_counter()
        body = server.handle_completions({**options, "prompt": ids, "max_tokens": most})
        seconds, found = time.perf_counter() - began, json.loads(body) if isinstance(body, (str, bytes)) else body
        if "timings" not in found:
            raise ValueError(str(found))
        count, after = found["timings"]["predicted_n"], found["timings"]["predicted_ms"] / 1e3
        made = found["__verbose"]["tokens"]
        return Answer(made, seconds, count - 1, after, found["choices"][0]["text"])  # its clock starts at a token

    def decode(prompts: Prompts, most: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [*pool.map(answer, prompts, [most] * len(prompts))]

    return f"xllamacpp {version('xllamacpp')}", decode


def openvino(job: Job) -> tuple[str, Decode]:
    """OpenVINO GenAI; the target is a GGUF file, the draft model a folder that ``optimum-cli`` wrote."""
    runtime: Any = importlib.import_module("openvino")
    genai: Any = importlib.import_module("openvino_genai")
    numpy: Any = importlib.import_module("numpy")
    threads = {"INFERENCE_NUM_THREADS": job.threads}
    ways: dict[str, Any] = {"prompt_lookup": True} if job.way == "prompt-lookup" else {}
    if job.draft:
        ways = {"draft_model": genai.draft_model(job.draft, "CPU", **threads)}
    pipeline = genai.LLMPipeline(job.target, "CPU", **threads, **ways)
    tokenizer, config = pipeline.get_tokenizer(), pipeline.get_generation_config()
    config.do_sample, config.stop_token_ids = False, set(job.ends)
    if job.way:
        config.num_assistant_tokens = job.drafted or (DRAFTED if job.draft else PROPOSED)
    if "prompt_lookup" in ways:
        config.max_ngram_size = NGRAM

    def decode(prompts: Prompts, most: int) -> list[Answer]:
        config.max_new_tokens = most
        clock, longest = Clock(), max(map(len, prompts))

        def write(_: object, tokens: int | list[int]) -> Any:
            clock.came(1 if isinstance(tokens, int) else len(tokens))
            return genai.StreamingStatus.RUNNING

        streaming: dict[str, Any] = {}
        if len(prompts) == 1:  # it streams no batches
            streaming["streamer"] = type("Streamer", (genai.StreamerBase,), {"write": write, "end": lambda _: None})()
        rows = [([0] * (longest - len(ids)) + ids, [0] * (longest - len(ids)) + [1] * len(ids)) for ids in prompts]
        given = [runtime.Tensor(numpy.array(values, numpy.int64)) for values in zip(*rows, strict=True)]
        made = [list(ids) for ids in pipeline.generate(genai.TokenizedInputs(*given), config, **streaming).tokens]
        return [clock.answer(ids, str(tokenizer.decode(ids))) for ids in made]

    return f"openvino-genai {version('openvino-genai')}", decode


def vllm(job: Job) -> tuple[str, Decode]:
    """vLLM on a CPU; models are folders of safetensors, computed in bfloat16."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: job.threads]))
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_NO_USAGE_STATS="1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="2")
    library: Any = importlib.import_module("vllm")
    lookup = {"num_speculative_tokens": job.drafted or PROPOSED, "prompt_lookup_max": NGRAM}
    ways: dict[str, Any] = {
        "": None,
        "prompt-lookup": {"method": "ngram", **lookup},
        "draft-model": {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.drafted or DRAFTED},
    }
    size = {"max_model_len": job.context, "max_num_seqs": job.requests, "enable_prefix_caching": False}
    engine = library.LLM(job.target, dtype="bfloat16", speculative_config=ways[job.way], **size).llm_engine
    made = 0

    def decode(prompts: Prompts, most: int) -> list[Answer]:
        nonlocal made
        params = library.SamplingParams(temperature=0, max_tokens=most, stop_token_ids=job.ends)
        clock, outputs = Clock(), dict[str, Any]()
        for number, ids in enumerate(prompts, made):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for found in engine.step():
                outputs[found.request_id] = found.outputs[0]
                clock.came(len(found.outputs[0].token_ids))
        numbers, made = range(made, made + len(prompts)), made + len(prompts)
        answers = [outputs[str(number)] for number in numbers]
        return [clock.answer(list(answer.token_ids), answer.text) for answer in answers]

    return f"{library.__version__}, bfloat16", decode


SYSTEMS: Mapping[str, Callable[[Job], tuple[str, Decode]]] = {
    "draftree": draftree,
    "draftree+llama.cpp": draftree,
    "llama.cpp": llama,
    "transformers": transformers,
    "openvino": openvino,
    "vllm": vllm,
}
"""Name -> loads it: its version, and what decodes."""
FAILED = "error: "
"""Begins the line that says why a process gave up."""


def main() -> None:
    """Decode and append."""
    job = Job(**json.load(sys.stdin))
    try:
        known, decode = SYSTEMS[job.rival.partition("-")[0]](job)
        decode([job.warm], _WARM_TOKENS)
        left = list(job.prompts.items())
        with open(job.out, "a", encoding="utf-8") as file:
            while together := left[: job.requests]:
                left = left[job.requests :]
                answers = decode([ids for _, ids in together], job.max_tokens)
                for (prompt, _), answer in zip(together, answers, strict=True):
                    print(json.dumps({**job.row, "version": known, "prompt": prompt, **asdict(answer)}), file=file)
                file.flush()
    except Exception as error:  # noqa: BLE001 - libraries raise what they like, and it goes into the table
        sys.exit(f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
