"""Where do the milliseconds of a step go? python -m benchmarks.step_account --target FILE [--drafter smollm2]

Decodes a few questions with a fixed number of nodes and prints the mean milliseconds of a step by what took them; the
parts are exclusive and add up to what a clock around the steps says, but for a few microseconds. What reads the prompt
is left out. Beside it the milliseconds of a token by AR decoding: a pass over all nodes and the root against one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import itemgetter

from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelScorer
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.engine.step import Stepper
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.models.native.binding import LoadedModel
from draftree.models.native.native_model import NativeModel, NativeScores
from draftree.models.translated import TranslatedModel, TranslatedScores
from draftree.text.encoding import user

from .commands import command_parser, one_line_errors

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that merges two sorted lists.",
    "Explain how a refrigerator works.",
)


class Account:
    """Seconds by part: a part that is called by another one is not among the seconds of that.

    Attributes:
        seconds, calls: by the parts' names.
        counts: what is called now.
    """

    def __init__(self) -> None:
        self.seconds, self.calls = defaultdict[str, float](float), Counter[str]()
        self.counts = False
        self._parts = list[str]()
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._parts.append(name)
        try:
            yield
        finally:
            self._switch()
            self._parts.pop()
            self.calls[name] += 1

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._parts:
            self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def watch(self, of: type, methods: Sequence[str], name: Callable[[object], str]) -> None:
        """Count methods of a class as a part, which ``name`` names by the object."""
        for method in methods:
            setattr(of, method, self._counted(getattr(of, method), name))

    def _counted(self, call: Callable[..., object], name: Callable[[object], str]) -> Callable[..., object]:
        @wraps(call)
        def counted(*args: object, **options: object) -> object:
            if not self.counts:
                return call(*args, **options)
            with self.part(name(args[0])):
                return call(*args, **options)

        return counted


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.step_account", __doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL, help="a GGUF file on the native engine")
    parser.add_argument("--drafter", default=DEFAULT_MODEL)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args(argv)
    target = load(args.target)
    if not isinstance(target, NativeModel):
        parser.error(f"{args.target} does not run on the native engine: give a GGUF file that does")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1)
    account, alone = Account(), Account()
    _watch(account, target)
    engine = Engine(target, SpeculationParams(drafter=args.drafter, method="opt-tree", nodes=args.nodes))
    clock, steps = _decode(engine, params, account)
    print(f"{steps} steps of {1e3 * clock / steps:.2f} ms: ms a step, times a step, ms each")
    for name, seconds in sorted(account.seconds.items(), key=itemgetter(1), reverse=True):
        calls = account.calls[name]
        print(f"  {name:36} {1e3 * seconds / steps:7.3f} {calls / steps:6.2f} {1e3 * seconds / calls:8.3f}")
    print(f"  {'together':36} {1e3 * sum(account.seconds.values()) / steps:7.3f}")
    clock, steps = _decode(Engine(target, SpeculationParams(drafter="none")), params, alone)
    print(f"AR decoding: {1e3 * clock / steps:.2f} ms a token")


def _watch(account: Account, target: NativeModel) -> None:
    def model(made: object) -> str:
        return "target" if made is target else "drafter"

    account.watch(
        LoadedModel, ["extend"], lambda made: f"{model(target if made is target.loaded else made)}: pass in C"
    )
    account.watch(NativeModel, ["extend"], lambda made: f"{model(made)}: pass in Python")
    account.watch(NativeModel, ["commit", "prune"], lambda made: f"{model(made)}: commit")
    account.watch(NativeScores, ["top"], lambda made: "drafter: most probable tokens")
    account.watch(NativeScores, ["argmax", "draw"], lambda made: "target: draws")
    account.watch(TranslatedModel, ["extend", "commit", "prune"], lambda made: "translation: what is read")
    account.watch(TranslatedScores, ["top"], lambda made: "translation: what is predicted, noise")
    account.watch(ModelScorer, ["score"], lambda made: "growth: candidates")
    account.watch(TreeDrafter, ["propose"], lambda made: "growth: loop and method")
    account.watch(Stepper, ["step"], lambda made: "step: rest")


def _decode(engine: Engine, params: SamplingParams, account: Account) -> tuple[float, int]:
    """Seconds and number of the steps behind the first one of each question, which reads it; only these are counted."""
    clock, steps = 0.0, 0
    for question in QUESTIONS:
        handle = engine.submit(user(question), params)
        while not handle.request.stats.steps:
            engine.advance()
        account.counts, began = True, time.perf_counter()
        while not handle.done:
            engine.advance()
        account.counts, clock = False, clock + time.perf_counter() - began
        steps += handle.request.stats.steps - 1
    return clock, steps


if __name__ == "__main__":
    main()
