"""Edits, whose answers copy most of what is given.

    python -m benchmarks.edits suite OUT.jsonl [--limit 20]
    python -m benchmarks.edits predicted [--target MODEL] [--limit 5] [--tokens 256] [--drafter lookup] [--method auto]

Functions of HumanEval in which one name changes, and paragraphs of XQuAD in which one word does; ``--limit`` of each.
The texts come from the prompt sets (``docs/bench.md``) and are not kept in the project. ``suite`` writes the prompts
for ``draftree bench --suite OUT.jsonl``. ``predicted`` decodes them greedily by AR decoding, by drafts from the prompt
alone, from a predicted output too (the text before the edit), and from a prediction that is the answer itself, which no
user has: what perfect foresight would give. Each takes each turn; ids must be equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from draftree.bench.suites import data_folder, load_suite
from draftree.bench.summary import markdown
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL
from draftree.text.encoding import user

from .commands import command_parser, one_line_errors

_LONGEST = 900
"""Characters of a text, so that its copy fits a short answer."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A prompt.

    Attributes:
        before: the text that it edits.
    """

    id: str
    category: str
    prompt: str
    before: str


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
            found.append(Edit(row["task_id"], "code", prompt, text.strip()))
    return found[:limit]


def prose(limit: int) -> list[Edit]:
    """Paragraphs, each once; their commonest long word gets capitals."""
    paragraphs = dict.fromkeys(item.turns[0].split("\n\n")[0] for item in load_suite("squad"))
    found = []
    for number, text in enumerate(p for p in paragraphs if 300 < len(p) <= _LONGEST):
        word = Counter(re.findall(r"\b[a-z]{5,}\b", text)).most_common(1)[0][0]
        task = f'Copy the paragraph below word for word, but write "{word.upper()}" instead of "{word}".'
        found.append(Edit(f"prose-{number}", "prose", f"{task}\n\n{text}", text))
    return found[:limit]


def suite(args: argparse.Namespace) -> None:
    """Write the suite."""
    edits = [*code(args.limit), *prose(args.limit)]
    rows = ({"id": e.id, "category": e.category, "prompt": e.prompt} for e in edits)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(edits)} prompts in {args.out}")


def predicted(args: argparse.Namespace) -> None:
    """Decode and print."""
    options = {name: value for name in ("backend", "dtype") if (value := getattr(args, name)) is not None}
    target = load(args.target, **options)
    plain = Engine(target)
    drafting = Engine(target, SpeculationParams(drafter=args.drafter, method=args.method))
    params, own = SamplingParams(max_tokens=args.tokens), f"{args.drafter}, {args.method}"
    seconds: dict[tuple[str, str], float] = {}
    steps, tokens = Counter[tuple[str, str]](), Counter[str]()
    for number, edit in enumerate([*code(args.limit), *prose(args.limit)]):
        answer = plain.generate([user(edit.prompt)], params)[0].token_ids
        kinds: dict[str, tuple[Engine, str | list[int]]] = {
            "AR decoding": (plain, ""),
            own: (drafting, ""),
            f"{own}, with the text before": (drafting, edit.before),
            f"{own}, with the answer": (drafting, answer),
        }
        names, turn = [*kinds], number % len(kinds)
        for name in names[turn:] + names[:turn]:
            engine, prediction = kinds[name]
            handle = engine.submit(user(edit.prompt), params, prediction=prediction)
            engine.wait(lambda handle=handle: handle.done)  # type: ignore[misc]
            request = handle.request
            if request.output_ids != answer:
                sys.exit(f"error: {edit.id}: ids with {name} are not those of AR decoding")
            spent, key = request.stats.seconds, (edit.category, name)
            seconds[key] = seconds.get(key, 0.0) + spent.total - spent.prefill
            steps[key] += request.stats.steps
        tokens[edit.category] += len(answer) - 1
    rows = []
    for category, name in sorted(seconds, key=lambda key: (key[0], names.index(key[1]))):
        key, count = (category, name), tokens[category]
        ratio = seconds[category, "AR decoding"] / seconds[key]
        rows.append([category, name, f"{count / seconds[key]:.1f}", f"{ratio:.2f}", f"{count / steps[key]:.2f}"])
    print(markdown(["edits", "decoded by", "tokens/s after the prefill", "over AR", "MAL"], rows))


@one_line_errors()
def main() -> None:
    """Do what is asked."""
    parser = command_parser("benchmarks.edits", __doc__)
    what = parser.add_subparsers(required=True)
    writes = what.add_parser("suite")
    writes.add_argument("out", type=Path)
    writes.add_argument("--limit", type=int, default=20, help="prompts of each kind")
    writes.set_defaults(run=suite)
    decodes = what.add_parser("predicted")
    decodes.add_argument("--target", default=DEFAULT_MODEL)
    decodes.add_argument("--backend")
    decodes.add_argument("--dtype")
    decodes.add_argument("--drafter", default="lookup")
    decodes.add_argument("--method", default="auto")
    decodes.add_argument("--limit", type=int, default=5, help="prompts of each kind")
    decodes.add_argument("--tokens", type=int, default=256)
    decodes.set_defaults(run=predicted)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
