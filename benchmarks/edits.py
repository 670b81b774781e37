"""Prompts whose answers copy most of what is given: python -m benchmarks.edits OUT.jsonl [--limit 20]

A suite for ``draftree bench --suite OUT.jsonl``: functions of HumanEval in which one name changes, and paragraphs of
XQuAD in which one word does. The texts come from the prompt sets (``docs/bench.md``) and are not kept in the project.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path

from draftree.bench.suites import data_folder, load_suite

_LONGEST = 900
"""Characters of a text, so that its copy fits a short answer."""


def code(limit: int) -> list[dict[str, str]]:
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
            found.append(
                {"id": row["task_id"], "category": "code", "prompt": f"{task}\n\n```python\n{text.strip()}\n```"}
            )
    return found[:limit]


def prose(limit: int) -> list[dict[str, str]]:
    """Paragraphs, each once; their commonest long word gets capitals."""
    paragraphs = dict.fromkeys(item.turns[0].split("\n\n")[0] for item in load_suite("squad"))
    found = []
    for number, text in enumerate(p for p in paragraphs if 300 < len(p) <= _LONGEST):
        word = Counter(re.findall(r"\b[a-z]{5,}\b", text)).most_common(1)[0][0]
        task = f'Copy the paragraph below word for word, but write "{word.upper()}" instead of "{word}".'
        found.append({"id": f"prose-{number}", "category": "prose", "prompt": f"{task}\n\n{text}"})
    return found[:limit]


def main() -> None:
    """Write the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, default=20, help="prompts of each kind")
    args = parser.parse_args()
    rows = [*code(args.limit), *prose(args.limit)]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {args.out}")


if __name__ == "__main__":
    main()
