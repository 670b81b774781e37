"""Would a classifier's score make ``auto`` faster than counting how often the draft's probabilities come true?

    python -m draftree.bench.c2t_auto --classifier FILE [--suites spec-bench,gsm8k,humaneval] [--limit 13]
                                      [--max-tokens 64] [--cache DIR]

``auto`` decodes along texts whose draft laws were recorded (``recorded.py``), once as it is and once with
``classifier=FILE``: by the draft's own probabilities and by the classifier's scores, which it counts and corrects both.
Steps take what this machine's profile says, so that the load of the machine is in no figure. FILE is one that 'draftree
train classifier --given-parent --features step,entropy,depth,rank' wrote. Prints tokens a second over plain decoding
and over one another (geometric means of ratios by prompt, 95% bootstrap intervals), and how far each was off.
"""

from __future__ import annotations

import argparse

from ..draft.auto import AutoTree
from ..draft.classifier_file import read_classifier
from ..draft.learned import ScoredAuto
from ..errors import InputError
from .grid import add_options, along, recorded
from .stats import ratio


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
    for name, policy in (("counts", AutoTree(**machine)), ("classifier", ScoredAuto(**machine, classifier=classifier))):
        found = speeds[name] = along(texts, costs, policy)
        over = ratio([s.plain for s in found], [s.seconds for s in found])
        mal = sum(s.tokens for s in found) / sum(s.steps for s in found)
        print(
            f"{name:12} MAL {mal:.3f}, {over.text('.3f')} x plain decoding, accepted / expected at the end "
            f"{policy.trust:.3f}"
        )
    counts, scored = ([s.seconds for s in speeds[name]] for name in ("counts", "classifier"))
    print(f"classifier over counts: {ratio(counts, scored).text('.3f')}")


if __name__ == "__main__":
    main()
