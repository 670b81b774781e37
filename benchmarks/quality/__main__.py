"""Score the answers of a finished run of ``draftree bench``: RUN/quality.jsonl, and a table of means.

Code that models write (humaneval, mbpp) runs in a sandbox of bubblewrap.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftree.artifacts import user_path
from draftree.bench.summary import markdown

from ..commands import command_parser, one_line_errors
from .answers import score_run, score_table


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Score and print."""
    parser = command_parser("benchmarks.quality", __doc__)
    parser.add_argument("run", metavar="RUN", help="folder that 'draftree bench --out' wrote")
    parser.add_argument("--data", metavar="DIR", help="folder of prompt sets (Spider's databases); else DRAFTREE_DATA")
    parser.add_argument("--entropy", action="store_true", help="measure the target's entropy along AR answers too")
    parser.add_argument("--unsafe", action="store_true", help="run code with limits alone, as you, unguarded")
    args = parser.parse_args(argv)
    found = score_run(user_path(args.run), args.data, unsafe=args.unsafe, entropy=args.entropy)
    print(markdown(*score_table(found)))


if __name__ == "__main__":
    main()
