"""How fast do requests that share an engine decode, and what does a pass take in another thread?

    python -m benchmarks.serving throughput [--requests 8] [--tokens 64] [--repeats 3] [--drafter auto] [--methods auto]
                                        [--suite mt-bench]
    python -m benchmarks.serving thread [--tokens 64]

``throughput``: of the time when all requests decode, tokens a second, over AR decoding of the same, the two in turn;
the time between tokens (mean of a request, median of all) and the longest wait for the next ones; the drafted nodes of
a step. ``thread``: what a pass takes in the thread that loaded the model, in another, and in the first one again.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from draftree.bench.suites import choose, load_suite
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Observer, SpeculationParams
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.request import Outcome, Request
from draftree.text.encoding import user

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
    what: dict[str, Callable[[argparse.Namespace], None]] = {f.__name__: f for f in (throughput, thread)}
    parser.add_argument("what", choices=what)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--methods", default="auto")
    parser.add_argument(
        "--suite", default="mt-bench", help="of throughput; short prompts: it is decoding that is timed"
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    for name in OPTIONS:
        parser.add_argument(f"--{name}")
    args = parser.parse_args(argv)
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    args.model = load(args.target, **options)
    torch.manual_seed(0)
    what[args.what](args)


if __name__ == "__main__":
    main()
