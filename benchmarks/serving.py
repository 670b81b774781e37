"""What do requests that share an engine cost one another?

    python -m benchmarks.serving gaps [--prompt 1500] [--streams 4] [--method none|auto]
    python -m benchmarks.serving chat
    python -m benchmarks.serving throughput [--requests 8] [--tokens 64] [--repeats 3] [--drafter auto] [--methods auto]
                                        [--suite mt-bench]
    python -m benchmarks.serving overhead [--requests 8]
    python -m benchmarks.serving storm [--requests 2000]
    python -m benchmarks.serving mixed [--tokens 8]
    python -m benchmarks.serving thread [--tokens 64]

``gaps``: requests stream while a long prompt arrives: the longest time between two tokens of any of them, with it and
without, in AR steps of as many requests, and how soon the newcomer has its first token. ``chat``: seconds to the first
token of each turn of a conversation, with rows kept and without. ``throughput``: of the time when all requests decode,
tokens a second, over AR decoding of the same, the two in turn; the time between tokens (mean of a request, median of
all) and the longest wait for the next ones; the drafted nodes of a step. ``overhead``: milliseconds of a scheduled step
outside the step itself. ``storm``: many short requests of which a tenth are cancelled and a twentieth fail: rows that
are left, resident memory as it goes on, and whether each text that was finished is what the request gives alone.
``mixed``: 13 prompts by 10 methods and 4 drafters, greedy or sampled, eight at a time in random order: how many give AR
decoding's ids. ``thread``: what a pass takes in the thread that loaded the model, in another, and in the first one
again.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from random import Random

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray

from draftree.bench.suites import choose, load_suite
from draftree.config import SamplingParams
from draftree.engine.engine import Engine, Handle
from draftree.engine.replay import first_difference
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Observer, SpeculationParams
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.request import Outcome, Request
from draftree.text.encoding import encode, user

from .commands import command_parser, one_line_errors

OPTIONS = ("backend", "device", "dtype", "runner")
"""Of loading the target."""
_WHOLE = 1_000_000
"""Prompt tokens of a step: all prompts are read at once, so that requests decode together from the start."""


def questions(count: int, suite: str = "spec-bench") -> list[str]:
    """First turns of a suite, spread over its tasks."""
    return [item.turns[0] for item in choose(load_suite(suite), limit=count)]


def made(
    args: argparse.Namespace, method: str, scheduling: SchedulerParams, observers: Sequence[Observer] = ()
) -> Engine:
    """An engine with a method; "none" is AR decoding."""
    speculation = (
        SpeculationParams(drafter="none")
        if method == "none"
        else SpeculationParams(drafter=args.drafter, method=method)
    )
    return Engine(args.model, speculation, observers=observers, scheduling=scheduling)


def wait(engine: Engine, handles: list[Handle]) -> None:
    engine.wait(lambda: all(handle.done for handle in handles))


def gaps(args: argparse.Namespace) -> None:
    """Print the longest gaps."""
    text = encode(args.model.tokenizer, " ".join(questions(40)))[: args.prompt]
    longest: dict[bool, list[float]] = {False: [], True: []}
    steps, first = list[float](), list[float]()
    for repeat in range(args.repeats + 1):
        for comes, found in longest.items():
            times, arrived = _stream(args, text if comes else [])
            if repeat:  # the first time warms up
                found.append(max(times))
                if comes:
                    first.append(arrived)
                else:
                    steps += times
    step, (without, beside) = statistics.median(steps), map(statistics.median, longest.values())
    print(f"{args.streams} streams, method {args.method}: a step takes {1e3 * step:.1f} ms")
    print(
        f"longest gap between tokens: {1e3 * without:.1f} ms, with a prompt of {len(text)} tokens {1e3 * beside:.1f} ms"
    )
    print(f"delay {(beside - without) / step:.2f} steps; first token after {statistics.median(first):.2f} s")


def _stream(args: argparse.Namespace, text: list[int]) -> tuple[list[float], float]:
    """Seconds of the steps of some streams from the arrival of a prompt on, and until its first token."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    engine = made(args, args.method, SchedulerParams(rows=args.streams + 1))
    streams = [engine.submit(user(q), params) for q in questions(args.streams)]
    engine.wait(lambda: all(len(s.request.chunks) >= 8 for s in streams))
    late = engine.submit(text, SamplingParams(max_tokens=1)) if text else None
    began, times, arrived = time.perf_counter(), list[float](), 0.0
    while not any(s.done for s in streams):
        before = time.perf_counter()
        engine.advance()
        times.append(time.perf_counter() - before)
        if late is not None and late.request.decodes and not arrived:
            arrived = time.perf_counter() - began
    for handle in [*streams, *([late] if late else [])]:
        handle.cancel()
    return times, arrived


def chat(args: argparse.Namespace) -> None:
    """Print seconds to the first token."""
    turns = questions(4)
    for kept in (0, 1, 0, 1):
        engine = made(args, "none", SchedulerParams(rows=1, prefixes=kept))
        messages, seconds = [], []
        for turn in turns:
            messages += user(turn)
            began = time.perf_counter()
            handle = engine.submit(messages, SamplingParams(max_tokens=48))
            engine.wait(lambda: bool(handle.request.chunks))  # noqa: B023 - called here
            seconds.append(time.perf_counter() - began)
            messages += [{"role": "assistant", "content": handle.result().text}]
        print(f"{kept} rows kept: first token after", ", ".join(f"{s:.3f}" for s in seconds), "s")


class Arrivals(Observer):
    """When requests' tokens come, and how many nodes steps draft.

    Attributes:
        times: of each request, seconds of the steps in which it took tokens, and how many tokens it then had.
        nodes: of each step.
    """

    def __init__(self) -> None:
        self.times: dict[Request, list[tuple[float, int]]] = {}
        self.nodes: list[int] = []

    def opened(self, request: Request) -> None:
        self.times[request] = [(time.perf_counter(), len(request.ids))]

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        now = time.perf_counter()
        self.nodes.append(sum(len(outcome.tree) for outcome in outcomes))
        for request in (outcome.request for outcome in outcomes):
            self.times[request].append((now, len(request.ids)))

    def take(self) -> tuple[float, float, float, float]:
        """Of the time when all decode: tokens a second, median seconds between a request's tokens and the longest wait
        for the next ones; and mean nodes of a step. Then it begins anew."""
        began, ended = max(found[0][0] for found in self.times.values()), min(map(_last, self.times.values()))
        ends = [[[n for at, n in found if at <= end][-1] for end in (began, ended)] for found in self.times.values()]
        tokens = [last - first for first, last in ends]
        together = ([at for at, _ in found if began <= at <= ended] for found in self.times.values())
        longest = max(after - before for found in together for before, after in pairwise(found))
        nodes = statistics.fmean(self.nodes)
        self.times, self.nodes = {}, []
        between = statistics.median((ended - began) / own for own in tokens)
        return sum(tokens) / (ended - began), between, longest, nodes


def _last(found: Sequence[tuple[float, int]]) -> float:
    return found[-1][0]


def throughput(args: argparse.Namespace) -> None:
    """Print tokens a second over those of AR decoding."""
    prompts = [user(q) for q in questions(args.requests, args.suite)]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    methods = ("none", *args.methods.split(","))
    scheduling = SchedulerParams(rows=args.requests, chunk=_WHOLE)
    seen = {m: Arrivals() for m in methods}
    engines = {m: made(args, m, scheduling, [seen[m]]) for m in methods}
    found: dict[str, list[tuple[float, float, float, float]]] = {m: [] for m in methods}
    mal: dict[str, list[float]] = {m: [] for m in methods}
    texts: dict[str, list[list[int]]] = {}
    for repeat in range(args.repeats + 1):
        for name in (*methods[repeat % len(methods) :], *methods[: repeat % len(methods)]):
            answers = engines[name].generate(prompts, params)
            texts[name], measured = [a.token_ids for a in answers], seen[name].take()
            if repeat:
                found[name].append(measured)
                mal[name].append(statistics.fmean(a.stats.mal for a in answers))
    for name in methods:
        ratios = [mine[0] / ar[0] for mine, ar in zip(found[name], found["none"], strict=True)]
        equal = sum(mine == ar for mine, ar in zip(texts[name], texts["none"], strict=True))
        rate, between, longest, nodes = map(statistics.median, zip(*found[name], strict=True))
        print(
            f"{args.requests} requests, {name:12} {rate:7.1f} tokens/s, of AR "
            f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}], MAL "
            f"{statistics.fmean(mal[name]):.2f}, {1e3 * between:.1f} ms between tokens, longest {1e3 * longest:.1f}, "
            f"{nodes:.1f} nodes a step, {equal} of {len(answers)} texts equal"
        )


def overhead(args: argparse.Namespace) -> None:
    """Print milliseconds outside the steps."""
    engine = made(args, "none", SchedulerParams(rows=args.requests))
    inside: list[float] = []
    step = engine.stepper.step

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        result = step(*arguments)  # type: ignore[arg-type]
        inside.append(time.perf_counter() - began)
        return result

    engine.stepper.step = timed  # type: ignore[method-assign, assignment]
    handles = [
        engine.submit(user(q), SamplingParams(max_tokens=args.tokens, ignore_eos=True))
        for q in questions(args.requests)
    ]
    outside = []
    while not all(handle.done for handle in handles):
        began = time.perf_counter()
        engine.advance()
        outside.append(time.perf_counter() - began - inside[-1])
    print(f"{args.requests} requests: {1e3 * statistics.median(outside):.3f} ms a step outside it, of ", end="")
    print(f"{1e3 * statistics.median(inside):.1f} ms; largest {1e3 * max(outside[2:-2]):.3f} ms")


def _breaks(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    raise ValueError("broken on purpose")


def storm(args: argparse.Namespace) -> None:
    """Print what is left, and how memory went."""
    rng, process = Random(1), psutil.Process()  # noqa: S311 - fates, not secrets
    engine = made(args, "auto", SchedulerParams(rows=8, queue=args.requests, prefixes=2))
    kinds = [
        (user(q[:80]), SamplingParams(max_tokens=4 + i % 9, temperature=(0.0, 0.8)[i % 2], seed=i))
        for i, q in enumerate(questions(24))
    ]
    alone: list[list[int]] = [Engine(args.model).generate([prompt], params)[0].token_ids for prompt, params in kinds]
    fates = ["cancelled"] * (args.requests // 10) + ["error"] * (args.requests // 20)
    fates += [""] * (args.requests - len(fates))
    rng.shuffle(fates)
    handles, differ, memory = list[tuple[Handle, int, str]](), 0, list[float]()
    for i, fate in enumerate(fates):
        prompt, params = kinds[i % len(kinds)]
        given = SamplingParams(max_tokens=params.max_tokens, processors=(_breaks,)) if fate == "error" else params
        handles.append((engine.submit(prompt, given), i % len(kinds), fate))
        for handle, _, other in handles[-16:]:
            if other == "cancelled" and rng.random() < 0.2:
                handle.cancel()
        engine.advance()
        if i % (args.requests // 8) == 0:
            engine.wait(lambda: len(engine.scheduler.waiting) < 16)
            memory.append(process.memory_info().rss / 2**20)
    for handle, _, fate in handles:
        if fate == "cancelled":
            handle.cancel()
    wait(engine, [handle for handle, *_ in handles])
    memory.append(process.memory_info().rss / 2**20)
    counts: dict[str, int] = {}
    for handle, kind, fate in handles:
        reason = handle.request.finish_reason or ""
        counts[reason] = counts.get(reason, 0) + 1
        if fate == "" or (fate == "cancelled" and reason != "cancelled"):
            differ += handle.request.output_ids != alone[kind]
    engine.stepper.prefixes.clear()
    print(f"{args.requests} requests ended: {counts}; {differ} finished texts differ from the request alone")
    print(f"rows left: {args.model.rows}; MiB resident: " + ", ".join(f"{m:.0f}" for m in memory))


MIXED_METHODS = (
    "auto", "chain", "static", "binary", "dynamic-width-budget", "opt-tree", "eagle2", "hsddw", "naive-width", "c2t"
)  # fmt: skip
MIXED_DRAFTERS = ("lookup", "head", "lookup+head")


def mixed(args: argparse.Namespace) -> None:
    """Print how many ids are equal."""
    engine, ar = made(args, "none", SchedulerParams(rows=8, queue=10**6)), Engine(args.model)
    kinds = [
        (user(question), SamplingParams(max_tokens=args.tokens + i % 5, temperature=float(i % 2), seed=i))
        for i, question in enumerate(questions(13))
    ]
    alone = [ar.generate([prompt], params)[0].token_ids for prompt, params in kinds]
    cases = list(product(range(len(kinds)), MIXED_METHODS, MIXED_DRAFTERS))
    Random(3).shuffle(cases)  # noqa: S311 - an order, not a secret
    handles = []
    for kind, method, drafter in cases:
        prompt, params = kinds[kind]
        handles.append(engine.submit(prompt, params, SpeculationParams(drafter=drafter, method=method)))
    wait(engine, handles)
    differ = [
        (case, handle.request.finish_reason)
        for case, handle in zip(cases, handles, strict=True)
        if handle.request.output_ids != alone[case[0]]
    ]
    accepted = sum(sum(handle.request.stats.accepted) for handle in handles)
    print(f"{len(cases) - len(differ)} of {len(cases)} equal; {accepted} drafted tokens accepted")
    for (kind, method, drafter), reason in differ:
        one, other = alone[kind], handles[cases.index((kind, method, drafter))].request.output_ids
        found = first_difference(args.model, encode(args.model.tokenizer, kinds[kind][0]), one, other, kinds[kind][1])
        print(f"  prompt {kind}, {method}, {drafter}: {reason}; {found}")


def thread(args: argparse.Namespace) -> None:
    """Print what a pass takes in the thread that loaded the model, in another, and in the first one again."""
    engine, found = made(args, "none", SchedulerParams(rows=1)), list[float]()

    def decode() -> None:
        stats = engine.generate([user("Count.")], SamplingParams(max_tokens=args.tokens, ignore_eos=True))[0].stats
        found.append(1e3 * stats.seconds.verify / stats.steps)

    decode()  # warms up
    for place in ("that loaded it", "another", "the first one again"):
        if place == "another":
            other = threading.Thread(target=decode)
            other.start()
            other.join()
        else:
            decode()
        print(f"thread: {place}: {found[-1]:.2f} ms a pass")


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.serving", __doc__)
    what: dict[str, Callable[[argparse.Namespace], None]] = {
        f.__name__: f for f in (gaps, chat, throughput, overhead, storm, mixed, thread)
    }
    parser.add_argument("what", choices=what)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--method", default="none")
    parser.add_argument("--methods", default="auto")
    parser.add_argument(
        "--suite", default="mt-bench", help="of throughput; short prompts: it is decoding that is timed"
    )
    parser.add_argument("--requests", type=int)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    for name in OPTIONS:
        parser.add_argument(f"--{name}")
    args = parser.parse_args(argv)
    args.requests = args.requests or (2000 if args.what == "storm" else 8)
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    args.model = load(args.target, **options)
    torch.manual_seed(0)
    what[args.what](args)


if __name__ == "__main__":
    main()
