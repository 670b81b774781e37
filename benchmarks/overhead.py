"""What does a step cost beside its passes? python -m benchmarks.overhead [--target smollm2] [--steps 100]

Prints, per drafter and method, the milliseconds of a step outside the passes of target and drafter, and how many
functions a step calls, how often, and in how many files of the package; then what one draw of the target at temperature
1 with top-p takes, and one proposal for other engines. Of several steps the least is printed beside the median: what
others do on the machine only adds to it. A pass leaves nothing of Python in the processor's caches: the first call of a
function after it is what costs.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType

import draftree
from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine, Handle
from draftree.engine.speculation import SpeculationParams
from draftree.integrations.other_engines import Proposer
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.sampling.warping import Warping, stream_key
from draftree.text.encoding import user

from .commands import command_parser, one_line_errors

TEXT = "Repeat this list of words: red, green, blue, red, green, blue, red, green, blue, red, green, blue, red."
CASES = {
    "AR decoding": SpeculationParams(drafter="none"),
    "lookup, chain of 8": SpeculationParams(drafter="lookup", method="chain", nodes=8),
    "lookup, tree of 8": SpeculationParams(drafter="lookup", method="opt-tree", nodes=8),
    "head, opt-tree, 4": SpeculationParams(drafter="head", method="opt-tree", nodes=4),
    "auto": SpeculationParams(),
}
PACKAGE = Path(draftree.__file__).parent


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = command_parser("benchmarks.overhead", __doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=100, help="that are measured")
    args = parser.parse_args(argv)
    target = load(args.target)
    print("ms of a step outside passes      least  median  nodes  functions  calls  files")
    for name, speculation in CASES.items():
        engine = Engine(target, speculation)
        handle = _decoding(engine)
        drafter = engine.speculation.drafter
        models = [target, *(drafter.source.models if isinstance(drafter, TreeDrafter) else ())]
        outside = sorted(_outside(engine, models) for _ in range(args.steps))
        stats, functions = handle.request.stats, called(engine.advance)
        handle.cancel()
        files = {path for code in functions if (path := Path(code.co_filename)).is_relative_to(PACKAGE)}
        print(
            f"{name:30} {1e3 * outside[0]:7.3f} {1e3 * statistics.median(outside):7.3f} "
            f"{sum(stats.drafted) / stats.steps:6.1f} {len(functions):10} {functions.total():6} {len(files):6}"
        )
    least, median = _draw(target, args.steps)
    print(f"draw of a node at T = 1, top-p 0.9, {target.capabilities.vocab_size} tokens: {least:.3f} {median:.3f} ms")
    for shape, nodes, width in (("tree of 15", 15, None), ("chain of 8", 8, 1)):
        print(f"proposal for other engines, {shape}: {_proposal(nodes, width):.3f} ms")


def _decoding(engine: Engine) -> Handle:
    handle = engine.submit(user(TEXT), SamplingParams(ignore_eos=True))
    while handle.request.stats.steps < 20:
        if handle.done:
            handle.result()  # raises what ended it
        engine.advance()
    return handle


def _outside(engine: Engine, models: Sequence[LanguageModel]) -> float:
    """Seconds of a step outside the passes of these models."""
    began, before = time.perf_counter(), sum(model.pass_seconds for model in models)
    engine.advance()
    return time.perf_counter() - began - (sum(model.pass_seconds for model in models) - before)


def called(call: Callable[[], object]) -> Counter[CodeType]:
    """The functions that are called, and how often."""
    found = Counter[CodeType]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code] += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _draw(target: LanguageModel, count: int) -> tuple[float, float]:
    """Least and median milliseconds."""
    row = prefill(target, [1, 2, 3])
    seconds = []
    for position in range(count):
        scores = target.extend([row], [Nodes.chain([4 + position])])
        began = time.perf_counter()
        scores.draw([0], [stream_key(1, position)], [Warping(1.0, 0, 0.9, 0.0)])
        seconds.append(1e3 * (time.perf_counter() - began))
        target.commit(row, [0])
    target.close(row)
    return min(seconds), statistics.median(seconds)


def _proposal(nodes: int, width: int | None) -> float:
    """Median milliseconds of ``Proposer``, in a text of phrases that grows to 1400 tokens."""
    draws, text = random.Random(1), list[int]()  # noqa: S311
    phrases = [[draws.randrange(5000) for _ in range(draws.randrange(2, 6))] for _ in range(40)]
    while len(text) < 1400:
        text += draws.choice(phrases)
    proposer, took = Proposer(), list[float]()
    for end in range(1000, 1400):
        began = time.perf_counter()
        proposer.propose(text[:end], nodes, width=width)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


if __name__ == "__main__":
    main()
