"""Do two runs of the same configuration agree? python -m benchmarks.papers.agreement RUN AGAIN"""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench.entries import AR
from draftree.bench.summary import ALL, Interval, LoadedRun, load_runs, markdown, ratio_text
from draftree.errors import ConfigError

from ..commands import command_parser, one_line_errors

_MAY_DIFFER = ("command", "date", "models", "commit", "code", "versions")
"""Keys of a configuration: the same is asked for whatever they are."""


def check_same(a: LoadedRun, b: LoadedRun) -> None:
    """Make sure that two runs differ in nothing that was asked for.

    Raises:
        ConfigError: they do.
    """
    asked = [key for key in {**a.config, **b.config} if key not in _MAY_DIFFER]
    if other := next((key for key in asked if a.config.get(key) != b.config.get(key)), None):
        raise ConfigError(f"{a.path} and {b.path} have another {other}: compare two runs of one command")


def agree(one: Interval, other: Interval) -> bool:
    """Each mean lies within the other's interval."""
    return other.low <= one.mean <= other.high and one.low <= other.mean <= one.high


def compared(a: LoadedRun, b: LoadedRun) -> str:
    """Ratios over AR decoding beside each other, in Markdown."""
    rows, apart, count = list[list[str]](), list[str](), 0
    for method, found in a.table.items():
        if method.split()[0] == AR:
            continue  # what all others are over
        row = [method]
        for name in ("speedup", "speedup_decode"):
            one, other = getattr(found[ALL], name), getattr(b.table[method][ALL], name)
            row += [ratio_text(one), ratio_text(other)]
            if one and other:
                count += 1
                if not agree(one, other):
                    apart.append(f"{method} ({name.replace('_', ' ')})")
        rows.append(row)
    text = (
        f"{count - len(apart)} of {count} ratios agree: each mean lies within the other run's interval."
        + (f" Not: {', '.join(apart)}." if apart else "")
        + f" The second run decoded {_steadiness(a, b)} times as fast as the first, from method to method."
    )
    header = ["method", "over AR", "again", "prefill left out", "again"]
    return f"{text}\n\n{markdown(header, rows)}"


def _steadiness(a: LoadedRun, b: LoadedRun) -> str:
    speeds = [b.table[m][ALL].tokens_per_second / a.table[m][ALL].tokens_per_second for m in a.table]
    return f"{min(speeds):.2f} to {max(speeds):.2f}"


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = command_parser("benchmarks.papers.agreement", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs=2, help="two folders that 'draftree bench --out' wrote")
    args = parser.parse_args(argv)
    (a,), (b,) = load_runs(args.runs[0]), load_runs(args.runs[1])
    check_same(a, b)
    print(compared(a, b))


if __name__ == "__main__":
    main()
