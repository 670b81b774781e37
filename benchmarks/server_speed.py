"""How fast does a server stream?

    python -m benchmarks.server_speed overhead [--requests 20] [--tokens 64] [--concurrency 1]
    python -m benchmarks.server_speed llama [--kind short|long|turns] [--speculation draft-simple --draft FILE.gguf]
                                            [--requests 20] [--tokens 64] [--concurrency 1]
    python -m benchmarks.server_speed batch [--requests 200] [--tokens 64] [--concurrency 1]

The first two start ``draftree serve`` (``--target``, ``--drafter``) and send greedy chats by a raw client in a process
of its own, as closed loops: each of ``--concurrency`` connections sends its next request when the last has ended. Ways
take turns, and prompts are read anew. ``overhead``: the same requests by the server and by the Python API in this
process: tokens a second of the one over those of the other, in all rounds, and the CPU time of the server's event loop.
``llama``: by this server with drafts and without, and by llama.cpp's own (``xllamacpp``) of the same file on as many
threads, without drafts and with ``--speculation``: tokens a second, prompts included, drafts over none with an interval
of the rounds, the time to the first text, resident memory, and the time from a process to a server. ``--kind``: prompts
of MT-Bench; about 2,000 tokens; or second turns of MT-Bench's chats, by servers that keep what they have read.
``batch``: a file of prompts of Spec-Bench by ``draftree batch``, and by closed loops of llama.cpp's server: seconds
from the start of the process to its last answer, and memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from draftree.bench.suites import choose, load_suite
from draftree.bench.summary import ratio
from draftree.config import SamplingParams
from draftree.engine.engine import Engine, Handle
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import SpeculationParams
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL, gguf_path
from draftree.text.encoding import user

from .commands import command_parser, one_line_errors
from .raw_client import Answer, RawClient, raw_client
from .server_load import served

Body = dict[str, Any]
T = TypeVar("T")

_CHATS = "/v1/chat/completions"
_LONG = 8000
"""Characters of a prompt of about 2,000 tokens."""
_EACH = 2
"""Requests of a connection in a round."""
NO_DRAFTS: Body = {"draftree": {"drafter": "none"}}


def chat(texts: Sequence[str], tokens: int) -> Body:
    """A greedy stream that answers the last of texts, which users and assistants say in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body: Body = {"model": "model", "max_tokens": tokens, "temperature": 0, "messages": messages, "stream": True}
    return body | {"stream_options": {"include_usage": True}}


def in_groups(prompts: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """So many prompts together; those that fill no group are left out."""
    if len(prompts) < size:
        sys.exit(f"there are {len(prompts)} prompts, and a round has {size}: use more --requests or less --concurrency")
    return [*zip(*[iter(prompts)] * size, strict=False)]


def overhead(args: argparse.Namespace) -> bool:
    """Print what the server takes of the rate of the Python API; whether the texts are the same."""
    questions = [item.turns[0] for item in choose(load_suite("spec-bench"), limit=args.requests)]
    groups, params = in_groups(questions, args.concurrency), SamplingParams(max_tokens=args.tokens)
    kinds: dict[str, tuple[SpeculationParams | None, Body]] = {
        args.drafter: (None, {}),
        "none": (SpeculationParams(drafter="none"), NO_DRAFTS),
    }
    ratios, seconds = defaultdict[str, list[float]](list), Counter[tuple[str, bool]]()
    tokens, loop_seconds, differ = Counter[str](), Counter[str](), 0
    with (
        served(args.target, args.drafter, args.concurrency, "--prefixes", "0") as (url, process),
        raw_client() as client,
    ):
        scheduling = SchedulerParams(rows=args.concurrency, prefixes=0)
        engine = Engine(load(args.target), SpeculationParams(drafter=args.drafter), scheduling=scheduling)
        for number, group in enumerate([groups[0], *groups]):  # once to warm up
            for kind, (speculation, asked) in kinds.items():
                bodies = [[chat([question], args.tokens) | asked] for question in group]
                taken, handles = dict[bool, float](), list[Handle]()
                for by_server in (False, True) if number % 2 else (True, False):
                    (process.resume if by_server else process.suspend)()  # an idle server may measure what passes cost
                    began, busy = time.perf_counter(), _loop_seconds(process)
                    if by_server:
                        answers = client.send(url, bodies, _CHATS)
                        loop_seconds[kind] += (_loop_seconds(process) - busy) * bool(number)  # type: ignore[assignment]
                    else:
                        handles = [engine.submit(user(question), params, speculation) for question in group]
                        engine.wait(lambda handles=handles: all(one.done for one in handles))  # type: ignore[misc]
                    taken[by_server] = time.perf_counter() - began
                process.resume()
                texts = [handle.request.text for handle in handles]
                differ += sum(answer.text != text for (answer,), text in zip(answers, texts, strict=True))
                if number:
                    ratios[kind].append(taken[False] / taken[True])
                    tokens[kind] += sum(len(one.request.output_ids) for one in handles)
                    for by_server, duration in taken.items():
                        seconds[kind, by_server] += duration  # type: ignore[assignment]
    for kind, count in tokens.items():
        api, server = (count / seconds[kind, way] for way in (False, True))
        print(
            f"drafter {kind}: {api:.1f} tokens/s by the API, {server:.1f} by the server, {server / api:.3f}, ", end=""
        )
        print(f"median of the rounds {statistics.median(ratios[kind]):.3f}; ", end="")
        print(f"the event loop took {1e6 * loop_seconds[kind] / count:.0f} us of CPU a token")
        print("  rounds:", " ".join(f"{one:.2f}" for one in ratios[kind]))
    whole = sum(duration for (_, way), duration in seconds.items() if way)
    print(f"{args.concurrency} streams at once; the client took {client.busy / whole:.2f} of a processor; ", end="")
    print(f"{differ} texts differ")
    return not differ


def _loop_seconds(process: psutil.Process) -> float:
    """CPU seconds of the thread that runs a server's event loop: its first one."""
    return float(sum(t.user_time + t.system_time for t in process.threads() if t.id == process.pid))


@dataclass(frozen=True, slots=True)
class Way:
    """A server, and what requests to it say of drafts."""

    url: str
    process: psutil.Process
    asked: Body


@contextmanager
def _by_llama(args: argparse.Namespace, speculation: str) -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of llama.cpp's server of the same file, with as many rows and threads."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve_by_llama, args=(args, speculation, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        ours.close()
        process.join()


def _serve_by_llama(args: argparse.Namespace, speculation: str, pipe: Connection) -> None:
    """Serve until the other end is closed."""
    library: Any = importlib.import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.port = str(gguf_path(args.target) or args.target), 0
    params.cache_prompt = args.kind == "turns"
    params.cache_ram_mib = 1024 if params.cache_prompt else 0
    params.n_parallel, params.n_ctx, params.verbosity = args.concurrency, 4096 * args.concurrency, 1  # errors
    draft = params.speculative.draft
    for pool in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        pool.n_threads = args.threads
    if speculation:
        name = f"COMMON_SPECULATIVE_TYPE_{speculation.replace('-', '_').upper()}"
        params.speculative.types = [getattr(library.common_speculative_type, name)]
        draft.mparams.path = args.draft
    server = library.Server(params)  # it ends with its last name
    pipe.send(server.listening_address)
    with suppress(EOFError):
        pipe.recv()


def _chats(args: argparse.Namespace) -> Sequence[tuple[str, ...]]:
    """The turns of users, as many chats as requests."""
    if args.kind == "long":
        passages = [item.turns[0] for item in load_suite("spec-bench") if item.category in ("summarization", "rag")]
        texts = [("\n\n".join(passages[at : at + 8])[:_LONG],) for at in range(0, len(passages), 4)]
        return texts[: args.requests]
    turns = [item.turns[: 2 if args.kind == "turns" else 1] for item in choose(load_suite("mt-bench"))]
    return turns[: args.requests]


def llama(args: argparse.Namespace) -> bool:
    """Print rates and times of all ways; the same texts come from this server with drafts and without."""
    kept = () if args.kind == "turns" else ("--prefixes", "0")
    starts, ways = dict[str, float](), dict[str, Way]()
    with ExitStack() as stack:
        client = stack.enter_context(raw_client())
        for name, speculation in {"llama.cpp": "", f"llama.cpp, {args.speculation}": args.speculation}.items():
            if name == "llama.cpp" or speculation:
                began = time.perf_counter()
                ways[name] = Way(*stack.enter_context(_by_llama(args, speculation)), {})
                starts[name] = time.perf_counter() - began
        began = time.perf_counter()
        threads = "--threads", str(args.threads)
        ours = stack.enter_context(served(args.target, args.drafter, args.concurrency, *threads, *kept))
        starts["draftree"] = time.perf_counter() - began
        if args.kind != "turns":  # the second to ask would find what the first had it read
            ways["AR"] = Way(*ours, NO_DRAFTS)
        ways[args.drafter] = Way(*ours, {})
        seconds, answers = _rounds(args, client, ways)
        resident = {name: way.process.memory_info().rss / 2**20 for name, way in ways.items()}
    rates = {n: sum(a.usage["completion_tokens"] for a in answers[n]) / sum(seconds[n]) for n in ways}
    prompt = statistics.median(a.usage["prompt_tokens"] for a in answers[args.drafter])
    print(f"{args.kind} prompts of {prompt:.0f} tokens, {len(answers[args.drafter])} requests, ", end="")
    print(f"{args.concurrency} at once, {args.threads} threads")
    for name in ways:
        first = sorted(a.first_text - a.began for a in answers[name])
        print(f"{name:<24} {rates[name]:6.1f} tokens/s, {rates[name] / rates['llama.cpp']:.2f} of llama.cpp; ", end="")
        print(f"first text after {1e3 * statistics.median(first):.0f} ms, at most {1e3 * first[-1]:.0f}; ", end="")
        print(f"{resident[name]:.0f} MiB")
    print("ready after", ", ".join(f"{taken:.1f} s ({name})" for name, taken in starts.items()))
    if "AR" not in ways:
        return True
    gain = ratio(seconds["AR"], seconds[args.drafter])
    print(f"{args.drafter} over AR, rounds: {gain.text()}:", end=" ")
    print(" ".join(f"{a / b:.2f}" for a, b in zip(seconds["AR"], seconds[args.drafter], strict=True)))
    differ = sum(a.text != b.text for a, b in zip(answers["AR"], answers[args.drafter], strict=True))
    print(f"{differ} texts differ")
    return not differ


def _rounds(
    args: argparse.Namespace, client: RawClient, ways: dict[str, Way]
) -> tuple[dict[str, list[float]], dict[str, list[Answer]]]:
    """The seconds of each round by each way, and its answers; the first round warms up."""
    seconds, answers = defaultdict[str, list[float]](list), defaultdict[str, list[Answer]](list)
    groups = in_groups(_chats(args), args.concurrency * _EACH)
    for number, group in enumerate([groups[0], *groups]):
        for name in (*list(ways)[number % len(ways) :], *list(ways)[: number % len(ways)]):
            way, texts = ways[name], [[turns[0]] for turns in group]
            for other in {other.process for other in ways.values()} - {way.process}:
                other.suspend()  # an idle server may measure what passes cost
            if len(group[0]) > 1:
                first = _sent(args, client, way, texts)[1]
                texts = [[turns[0], a.text, turns[1]] for turns, a in zip(group, first, strict=True)]
            taken, new = _sent(args, client, way, texts)
            for other in {other.process for other in ways.values()}:
                other.resume()
            if number:
                seconds[name].append(taken)
                answers[name] += new
    return seconds, answers


def _sent(
    args: argparse.Namespace, client: RawClient, way: Way, texts: Sequence[Sequence[str]]
) -> tuple[float, list[Answer]]:
    """The seconds that a way takes for chats, and its answers in their order."""
    queues = [
        [chat(text, args.tokens) | way.asked for text in texts[at :: args.concurrency]]
        for at in range(args.concurrency)
    ]
    began = time.perf_counter()
    answers = client.send(way.url, queues, _CHATS)
    taken = time.perf_counter() - began
    return taken, [answers[at % args.concurrency][at // args.concurrency] for at in range(len(texts))]


def batch(args: argparse.Namespace) -> bool:
    """Print how long a file of prompts takes; whether each line has an answer, equal with drafts and without."""
    questions = [item.turns[0] for item in choose(load_suite("spec-bench"), limit=args.requests)]
    answers = list[dict[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
        lines = [{"prompt": question, "max_tokens": args.tokens, "temperature": 0} for question in questions]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for drafter in (args.drafter, "none"):
            command = [sys.executable, "-m", "draftree", "batch", str(prompts), str(out), "--target", args.target]
            command += ["--drafter", drafter, "--rows", str(args.concurrency), "--threads", str(args.threads)]
            began = time.perf_counter()
            with psutil.Popen(command, stderr=subprocess.DEVNULL) as process:
                most = 0
                while process.poll() is None:
                    with suppress(psutil.Error):
                        most = max(most, process.memory_info().rss)
                    time.sleep(0.05)
            print(f"draftree batch, {drafter}: {time.perf_counter() - began:.1f} s, {most / 2**20:.0f} MiB")
            rows = map(json.loads, out.read_text().splitlines())
            answers.append(
                {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
            )
            out.unlink()
    with raw_client() as client:
        began = time.perf_counter()
        with _by_llama(args, "") as (url, process):
            bodies = [chat([question], args.tokens) for question in questions]
            client.send(url, [bodies[at :: args.concurrency] for at in range(args.concurrency)], _CHATS)
            most = process.memory_info().rss
    print(f"llama.cpp's server: {time.perf_counter() - began:.1f} s, {most / 2**20:.0f} MiB")
    differ = sum(answers[0].get(name) != text for name, text in answers[1].items())
    print(f"{len(answers[1])} of {len(questions)} prompts answered, {differ} texts differ")
    return len(answers[1]) == len(questions) and not differ


@one_line_errors()
def main() -> None:
    """Measure, and print."""
    parser = command_parser("benchmarks.server_speed", __doc__)
    what = {f.__name__: f for f in (overhead, llama, batch)}
    parser.add_argument("what", choices=what)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument(
        "--requests", type=int, help="by default 20, or 8 a connection where that is more; of batch 200"
    )
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kind", choices=("short", "long", "turns"), default="short")
    parser.add_argument("--speculation", default="", help="of llama.cpp, such as ngram-mod, or draft-simple")
    parser.add_argument("--draft", default="", help="the model that drafts for llama.cpp")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    args = parser.parse_args()
    args.requests = args.requests or (200 if args.what == "batch" else max(20, 8 * args.concurrency))
    sys.exit(not what[args.what](args))


if __name__ == "__main__":
    main()
