"""A measure for the answers to each suite, from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from draftree.bench.suites import Item

from .sandbox import require_sandbox, run_python
from .sql import same_rows

Score = Callable[[Item, Sequence[str]], dict[str, float]]
"""(item, answers to its turns) -> measure -> score."""

_FENCE = re.compile(r"```(?:[a-zA-Z]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def scorer(suite: str, databases: Path, *, unsafe: bool = False) -> Score | None:
    """How a suite's answers are scored; None where nothing can score them (Spec-Bench, MT-Bench).

    Args:
        suite: its name; that of a file means the user's own prompts.
        databases: folder of Spider's SQLite files.
        unsafe: run code that models write without the sandbox.

    Raises:
        ConfigError: the answers are code, and there is no sandbox.
    """
    if suite in ("spec-bench", "mt-bench"):
        return None
    if suite == "spider":
        return partial(_spider, databases)
    if suite in ("humaneval", "mbpp"):
        if not unsafe:
            require_sandbox()
        return partial(_code, unsafe)
    return _gsm8k if suite == "gsm8k" else _phrase


def _gsm8k(item: Item, answers: Sequence[str]) -> dict[str, float]:
    """Exact match of the number behind the last ``####``, or of the last number."""
    marked = answers[-1].rpartition("####")
    numbers = _NUMBER.findall(marked[2] if marked[1] else answers[-1])
    found = numbers[0 if marked[1] else -1].replace(",", "") if numbers else ""
    return {"exact": float(bool(found) and float(found) == float(item.reference))}


def _code(unsafe: bool, item: Item, answers: Sequence[str]) -> dict[str, float]:
    """Pass@1: the code of the answer passes the item's test."""
    verdict = run_python(program(item, answers[-1]), item.reference["test"], unsafe=unsafe)
    return {"pass@1": float(verdict.passed)}


def program(item: Item, answer: str) -> str:
    """The answer's code, which the test comes after.

    A code block counts if there is one, else all of the answer. Code that does not define the function continues
    the prompt. Imports and helpers of the prompt come first in any case.
    """
    fenced = _FENCE.search(answer)
    code, prefix = fenced[1] if fenced else answer, str(item.reference["prefix"])
    names = re.findall(r"^def (\w+)", prefix, re.MULTILINE)
    if names and f"def {names[-1]}" not in code:
        code = prefix + code
    elif names:
        code = prefix[: prefix.rfind(f"def {names[-1]}")] + "\n" + code
    return code


def _phrase(item: Item, answers: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 of words as SQuAD v1.1 has them, best over the references."""
    references = [item.reference] if isinstance(item.reference, str) else item.reference
    if not references:
        return {}
    found = _words(answers[-1])
    return {
        "exact": float(any(found == _words(str(r)) for r in references)),
        "f1": max(_f1(found, _words(str(r))) for r in references),
    }


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def _f1(found: list[str], wanted: list[str]) -> float:
    shared = (Counter(found) & Counter(wanted)).total()
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def _spider(databases: Path, item: Item, answers: Sequence[str]) -> dict[str, float]:
    """Execution accuracy: the query reads the rows that the gold query reads."""
    fenced = _FENCE.search(answers[-1])
    query = (fenced[1] if fenced else answers[-1]).strip().partition(";")[0]
    database = databases / f"{item.reference['database']}.sqlite"
    return {"execution": float(same_rows(database, query, item.reference["query"]))}
