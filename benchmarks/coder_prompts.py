"""Prompts that the head of Qwen2.5-Coder-1.5B was trained on: code, sums and prose, of training parts alone.

    python -m benchmarks.coder_prompts OUT    # writes code.jsonl, maths.jsonl and prose.jsonl

Each task of MBPP's training part is asked for in six ways, with tests, with a docstring and as the beginning of a
function among them; GSM8K's training questions as they are, and as programs; Dolly's instructions.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftree.bench.suites import data_folder

from .commands import command_parser, one_line_errors

MBPP_TRAINS = range(601, 975)
"""Numbers of MBPP's training tasks."""
SUMS, PROGRAMS, PROSE = 900, 300, 500
LONGEST_CONTEXT = 1200
"""Characters of a text that an instruction of Dolly's is about."""


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def tasks(task: Mapping[str, Any]) -> Iterator[str]:
    """Prompts of one task of MBPP."""
    text, tests = task["text"], task["test_list"]
    source = task["code"].replace("\r\n", "\n").replace("\t", "    ")
    fenced = f"\n\n```python\n{source}\n```"
    asked = f"You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:"
    yield "\n\n".join([asked, "\n".join(tests)])
    yield text
    yield f"Explain step by step what this code does, then write it again with type hints and docstrings:{fenced}"
    yield f"Write unit tests with pytest for this function:{fenced}"
    try:
        function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (StopIteration, SyntaxError):
        return
    about = text.replace("Write a function to ", "").replace("Write a python function to ", "").strip()
    calls = [test.removeprefix("assert ").split("==") for test in tests[:2]]
    examples = "\n".join(f"    >>> {call.strip()}\n    {''.join(value[:1]).strip()}" for call, *value in calls)
    head = f"def {function.name}({ast.unparse(function.args)}):"
    begun = f'{head}\n    """{about[0].upper()}{about[1:]}\n{examples}\n    """\n'
    yield f"Complete the following Python function:\n\n{begun}"
    yield begun


def write(path: Path, prompts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


@one_line_errors()
def main() -> None:
    parser = command_parser("benchmarks.coder_prompts", __doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    data = data_folder()
    rng = random.Random(0)  # noqa: S311 - which prompts are taken
    code = [p for task in read(data / "mbpp/mbpp.jsonl") if task["task_id"] in MBPP_TRAINS for p in tasks(task)]
    sums = [task["question"] for task in read(data / "gsm8k/train.jsonl")]
    rng.shuffle(sums)
    asked = "Write a Python program that solves this problem, and run through it by hand:\n\n"
    programs = [asked + question for question in sums[SUMS : SUMS + PROGRAMS]]
    dolly = read(data / "dolly15k/databricks-dolly-15k.jsonl")
    rng.shuffle(dolly)
    short = [task for task in dolly if len(task["context"]) < LONGEST_CONTEXT][:PROSE]
    out.mkdir(parents=True, exist_ok=True)
    write(out / "code.jsonl", [*code, *programs])
    write(out / "maths.jsonl", sums[:SUMS])
    write(out / "prose.jsonl", ["\n\n".join(filter(None, [t["instruction"], t["context"]])) for t in short])


if __name__ == "__main__":
    main()
