"""Decodes prompts by one of the systems that ``benchmarks.rivals`` compares, in a process of its own.

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
from collections.abc import Callable, Mapping
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
        tokens: all, the one that ends it included.
        seconds: from the prompt's token ids to the answer.
        decode_tokens, decode_seconds: behind the first tokens.
    """

    tokens: int
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

    def answer(self, tokens: int, text: str) -> Answer:
        now = time.perf_counter()
        return Answer(tokens, now - self.began, tokens - self._first, now - self._at, text)


Decode = Callable[[list[int], int], Answer]
"""Answers a prompt by at most so many tokens."""


def bench(job: Job) -> tuple[str, Decode]:
    """This project's own decoding, and transformers'."""
    contestants: Any = importlib.import_module("draftree.bench.contestants")
    known: Any = importlib.import_module("draftree.bench.entries")
    config: Any = importlib.import_module("draftree.config")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(job.threads)
    peers = {"": "hf-generate", "prompt-lookup": "hf-prompt-lookup", "draft-model": "hf-assisted"}
    ours = job.rival.startswith("draftree")
    methods = ["ar" if job.way == "ar" else "auto"] if ours else [f"peer:{peers[job.way]}"]
    entry = known.entries(methods, [job.draft or "auto"], [0.0])[-1]  # AR decoding is the first
    contestant = contestants.Models(job.target, threads=job.threads).contestant(entry)

    def decode(ids: list[int], most: int) -> Answer:
        turn = contestant.decode(ids, config.SamplingParams(max_tokens=most, seed=0))
        total, prefill = turn.seconds.total, turn.seconds.prefill
        after = 0.0 if prefill is None else total - prefill  # unknown where the first token is the last
        return Answer(len(turn.ids), total, len(turn.ids) - turn.first, after, turn.text)

    return version("draftree") if ours else f"{version('transformers')}, PyTorch {torch.__version__}, float32", decode


def llama(job: Job) -> tuple[str, Decode]:
    """The server of the ``xllamacpp`` package, which is llama.cpp's; times are those of its own clock."""
    library: Any = importlib.import_module("xllamacpp")
    params, kinds = library.CommonParams(), library.common_speculative_type
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = job.target, job.context, 1, 0
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
    server = library.Server(params)

    def decode(ids: list[int], most: int) -> Answer:
        began = time.perf_counter()
        body = server.handle_completions({"prompt": ids, "temperature": 0, "max_tokens": most, "cache_prompt": False})
        seconds, found = time.perf_counter() - began, json.loads(body) if isinstance(body, (str, bytes)) else body
        if "timings" not in found:
            raise ValueError(str(found))
        count, after = found["timings"]["predicted_n"], found["timings"]["predicted_ms"] / 1e3
        return Answer(count, seconds, count - 1, after, found["choices"][0]["text"])  # its clock starts at a token

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
        config.num_assistant_tokens = DRAFTED if job.draft else PROPOSED
    if "prompt_lookup" in ways:
        config.max_ngram_size = NGRAM

    def decode(ids: list[int], most: int) -> Answer:
        config.max_new_tokens = most
        clock = Clock()

        def write(_: object, tokens: int | list[int]) -> Any:
            clock.came(1 if isinstance(tokens, int) else len(tokens))
            return genai.StreamingStatus.RUNNING

        streamer = type("Streamer", (genai.StreamerBase,), {"write": write, "end": lambda _: None})()
        given = [runtime.Tensor(numpy.array([values], numpy.int64)) for values in (ids, [1] * len(ids))]
        made = list(pipeline.generate(genai.TokenizedInputs(*given), config, streamer).tokens[0])
        return clock.answer(len(made), str(tokenizer.decode(made)))

    return f"openvino-genai {version('openvino-genai')}", decode


def vllm(job: Job) -> tuple[str, Decode]:
    """vLLM on a CPU; models are folders of safetensors, computed in bfloat16."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: job.threads]))
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND=cores, VLLM_NO_USAGE_STATS="1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="2")
    library: Any = importlib.import_module("vllm")
    ways: dict[str, Any] = {
        "": None,
        "prompt-lookup": {"method": "ngram", "num_speculative_tokens": PROPOSED, "prompt_lookup_max": NGRAM},
        "draft-model": {"method": "draft_model", "model": job.draft, "num_speculative_tokens": DRAFTED},
    }
    size = {"max_model_len": job.context, "max_num_seqs": 1, "enable_prefix_caching": False}
    engine = library.LLM(job.target, dtype="bfloat16", speculative_config=ways[job.way], **size).llm_engine
    made = 0

    def decode(ids: list[int], most: int) -> Answer:
        nonlocal made
        params = library.SamplingParams(temperature=0, max_tokens=most, stop_token_ids=job.ends)
        made, clock, output = made + 1, Clock(), None
        engine.add_request(str(made), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for found in engine.step():
                output = found.outputs[0]
                clock.came(len(output.token_ids))
        if output is None:
            raise ValueError("no answer")
        return clock.answer(len(output.token_ids), output.text)

    return f"{library.__version__}, bfloat16", decode


SYSTEMS: Mapping[str, Callable[[Job], tuple[str, Decode]]] = {
    "draftree": bench,
    "llama.cpp": llama,
    "transformers": bench,
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
        decode(job.warm, _WARM_TOKENS)
        with open(job.out, "a", encoding="utf-8") as file:
            for prompt, ids in job.prompts.items():
                row = {**job.row, "version": known, "prompt": prompt, **asdict(decode(ids, job.max_tokens))}
                print(json.dumps(row), file=file, flush=True)
    except Exception as error:  # noqa: BLE001 - libraries raise what they like, and it goes into the table
        sys.exit(f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
