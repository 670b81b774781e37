"""What does a terminal show of a first answer and of the trees behind it?

    python -m benchmarks.terminal docs/terminal.svg

Runs ``COMMANDS`` and draws what they print. Their answers, trees and passes are the same on every machine, since the
method measures no costs; seconds are those of this machine.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .commands import command_parser, one_line_errors

COMMANDS = (
    'draftree generate "Name the capital of France." --method eagle2 --nodes 6 --show-trees',
    'draftree generate "Write a Python function is_even(n)." --method eagle2 --nodes 6',
)
COLUMNS = 100
_FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Without the fonts that rich's own format fetches from elsewhere."""


def printed(command: str) -> str:
    """What a command writes to a terminal, standard error included, with its escape sequences for colours."""
    _, *words = shlex.split(command)
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    env.pop("NO_COLOR", None)
    line = [sys.executable, "-m", "draftree", *words]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=True)  # noqa: S603 - the commands above
    return done.stdout


def picture(commands: Sequence[str]) -> str:
    """The terminal (SVG) after these commands."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(printed(command)))
    return console.export_svg(title="draftree", code_format=_FORMAT, unique_id="terminal")


@one_line_errors()
def main() -> None:
    """Save it."""
    parser = command_parser("benchmarks.terminal", __doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    text = picture(COMMANDS)
    args.out.write_text(text)
    print(f"{args.out}: {len(text)} bytes")


if __name__ == "__main__":
    main()
