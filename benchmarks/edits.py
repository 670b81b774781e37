"""Edits, whose answers copy most of what is given.

    python -m benchmarks.edits OUT.jsonl [--limit 20]

Functions of HumanEval in which one name changes, and paragraphs of XQuAD in which one word does; ``--limit`` of each.
The texts come from the prompt sets (``docs/bench.md``) and are not kept in the project. OUT.jsonl is for ``draftree
bench --suite OUT.jsonl``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from draftree.bench.suites import data_folder, load_suite

from .commands import command_parser, one_line_errors

_LONGEST = 900
"""Characters of a text, so that its copy fits a short answer."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A prompt."""

    id: str
    category: str
    prompt: str


def code(limit: int) -> list[Edit]:
    """Functions with their solutions; the first parameter gets another name."""
    with gzip.open(data_folder() / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    found = []
    for row in rows:
        text = (
            re.sub(r'"""(.|\n)*?"""|\'\'\'(.|\n)*?\'\'\'', '"""As named."""', row["prompt"]) + row["canonical_solution"]
        )
        parameter = re.search(rf"def {row['entry_point']}\((\w+)", text)
        if parameter and len(text) <= _LONGEST:
            task = (
                f"Rename the variable {parameter[1]} to given_{parameter[1]} in this code. Answer with the whole code."
            )
            prompt = f"{task}\n\n```python\n{text.strip()}\n```"
            found.append(Edit(row["task_id"], "code", prompt))
    return found[:limit]


def prose(limit: int) -> list[Edit]:
    """Paragraphs, each once; their commonest long word gets capitals."""
    paragraphs = dict.fromkeys(item.turns[0].split("\n\n")[0] for item in load_suite("squad"))
    found = []
    for number, text in enumerate(p for p in paragraphs if 300 < len(p) <= _LONGEST):
        word = Counter(re.findall(r"\b[a-z]{5,}\b", text)).most_common(1)[0][0]
        task = f'Copy the paragraph below word for word, but write "{word.upper()}" instead of "{word}".'
        found.append(Edit(f"prose-{number}", "prose", f"{task}\n\n{text}"))
    return found[:limit]


@one_line_errors()
def main() -> None:
    """Write the suite."""
    parser = command_parser("benchmarks.edits", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each kind")
    args = parser.parse_args()
    edits = [*code(args.limit), *prose(args.limit)]
    args.out.write_text("".join(json.dumps(asdict(edit)) + "\n" for edit in edits))
    print(f"{len(edits)} prompts in {args.out}")


if __name__ == "__main__":
    main()
