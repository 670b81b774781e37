"""What does a step cost beside its passes? python -m benchmarks.overhead [--target smollm2] [--steps 100]

Prints, per drafter and method, the milliseconds of a step outside the target's passes and the files of the package
that one step calls; then what one draw of the target at temperature 1 with top-p takes. Of several steps the least is
printed beside the median: what others do on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import draftree
from draftree.config import SamplingParams
from draftree.engine.engine import Engine, Handle
from draftree.engine.speculation import SpeculationParams
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.sampling.warping import Warping, stream_key
from draftree.text.encoding import user

TEXT = "Repeat this list of words: red, green, blue, red, green, blue, red, green, blue, red, green, blue, red."
CASES = {
    "AR decoding": SpeculationParams(drafter="none"),
    "lookup, chain of 8": SpeculationParams(drafter="lookup", method="chain", nodes=8),
    "lookup, tree of 8": SpeculationParams(drafter="lookup", method="opt-tree", nodes=8),
    "lookup+recycle, opt-tree, 16": SpeculationParams(drafter="lookup+recycle", method="opt-tree", nodes=16),
    "auto": SpeculationParams(),
}
PACKAGE = Path(draftree.__file__).parent


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=100, help="that are measured")
    parser.add_argument("--files", action="store_true", help="name the files of a step")
    args = parser.parse_args(argv)
    target = load(args.target)
    print("ms of a step outside passes      least  median  nodes a step  files of a step")
    for name, speculation in CASES.items():
        engine = Engine(target, speculation)
        handle = _decoding(engine)
        outside = sorted(_outside(engine, target) for _ in range(args.steps))
        stats, files = handle.request.stats, files_of(engine.advance)
        handle.cancel()
        print(
            f"{name:30} {1e3 * outside[0]:7.3f} {1e3 * statistics.median(outside):7.3f} "
            f"{sum(stats.drafted) / stats.steps:13.1f} {len(files):16}"
        )
        if args.files:
            print("  " + "  ".join(sorted(files)))
    least, median = _draw(target, args.steps)
    print(f"draw of a node at T = 1, top-p 0.9, {target.capabilities.vocab_size} tokens: {least:.3f} {median:.3f} ms")


def _decoding(engine: Engine) -> Handle:
    handle = engine.submit(user(TEXT), SamplingParams(ignore_eos=True))
    while handle.request.stats.steps < 20:
        engine.advance()
    return handle


def _outside(engine: Engine, target: LanguageModel) -> float:
    """Seconds of a step outside the target's passes."""
    began, before = time.perf_counter(), target.pass_seconds
    engine.advance()
    return time.perf_counter() - began - (target.pass_seconds - before)


def files_of(call: Callable[[], object]) -> set[str]:
    """Files of the package in which functions are called."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

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


if __name__ == "__main__":
    main()
