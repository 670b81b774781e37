"""Would a classifier's score make ``auto`` faster than counting how often the draft's probabilities come true?

    python -m draftree.bench.c2t_auto --classifier FILE [--suites spec-bench,gsm8k,humaneval] [--limit 13]
                                      [--max-tokens 64] [--cache DIR]

``auto`` decodes along texts whose draft laws were recorded (``recorded.py``), as it is, with
isotonic regression by depth in place of its own counts, and with ``classifier=FILE``, which it counts and corrects too.
Steps take what this machine's profile says, so that the load of the machine is in no figure. FILE is one that 'draftree
train classifier --given-parent --features step,entropy,depth,rank' wrote. Prints tokens a second over plain decoding
and over one another (geometric means of ratios by prompt, 95% bootstrap intervals), and how far each was off.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..errors import InputError
from ..policies.auto.calibration import PRIOR, Calibration, bin_of
from ..policies.auto.policy import AutoTree
from ..policies.classifier import read_classifier
from ..policies.learned import ScoredAuto
from .grid import add_options, along, recorded
from .summary import ratio


class Isotonic(Calibration):
    """Isotonic regression by depth on the same counts (*algorithms*, section 8): pool adjacent violators, no kinds."""

    def acceptance(self, probabilities: Iterable[float], depth: int, kinds: Iterable[int]) -> list[float]:
        """See ``Calibration``."""
        levels = self._regression(depth)
        return [levels[bin_of(p)] for p in probabilities]

    def _regression(self, depth: int) -> list[float]:
        """[B] acceptance at a depth, which rises from bin to bin."""
        middles, trials, hits = self.counts(depth)
        levels, weights, widths = list[float](), list[float](), list[int]()
        for level, weight in zip((hits + PRIOR * middles) / (trials + PRIOR), trials + PRIOR, strict=True):
            levels, weights, widths = [*levels, float(level)], [*weights, float(weight)], [*widths, 1]
            while len(levels) > 1 and levels[-2] > levels[-1]:
                (one, other), (heavy, light) = levels[-2:], weights[-2:]
                levels[-2:] = [(one * heavy + other * light) / (heavy + light)]
                weights[-2:], widths[-2:] = [heavy + light], [sum(widths[-2:])]
        return [level for level, width in zip(levels, widths, strict=True) for _ in range(width)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.c2t_auto", description=__doc__)
    parser.add_argument("--classifier", required=True, help="of nodes given their parents")
    add_options(parser)
    args = parser.parse_args()
    try:
        classifier = read_classifier(args.classifier).classifier
        if not classifier.given_parent:
            parser.error(
                f"--classifier {args.classifier}: train it with --given-parent --features step,entropy,depth,rank"
            )
        _, _, costs, texts = recorded(args)
    except InputError as error:
        parser.error(str(error))
    machine, speeds = costs._asdict(), {}
    for name, policy in (
        ("isotonic", AutoTree(**machine, calibration=Isotonic(2))),
        ("counts", AutoTree(**machine)),
        ("classifier", ScoredAuto(**machine, classifier=classifier)),
    ):
        found = speeds[name] = along(texts, costs, policy)
        over = ratio([s.plain for s in found], [s.seconds for s in found])
        mal = sum(s.tokens for s in found) / sum(s.steps for s in found)
        print(
            f"{name:12} MAL {mal:.3f}, {over.text('.3f')} x plain decoding, accepted / expected at the end "
            f"{policy.trust:.3f}"
        )
    scored = [s.seconds for s in speeds["classifier"]]
    for name in ("isotonic", "counts"):
        print(f"classifier over {name}: {ratio([s.seconds for s in speeds[name]], scored).text('.3f')}")


if __name__ == "__main__":
    main()
