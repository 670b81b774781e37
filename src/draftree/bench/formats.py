"""Rows of published prompt sets as items: one function for each format. Knows no files.

A parser raises ValueError, KeyError, TypeError or IndexError where a row is not of its format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a suite.

    Attributes:
        id: unique in its suite.
        category: the suite's own.
        turns: the user's side of a conversation; one for most suites.
        reference: what answers are scored by, as JSON can hold it (``bench.quality``); None: nothing.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    reference: Any = None

    @property
    def prompt(self) -> str:
        """The first turn."""
        return self.turns[0]


_PYTHON = "Answer with the whole function in one Python code block."


def question(row: Row, number: int) -> Item:
    """Spec-Bench and MT-Bench (FastChat's ``question.jsonl``, or ``HuggingFaceH4/mt_bench_prompts``)."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    key = row.get("question_id", row.get("prompt_id"))
    return Item(str(key), _text(row["category"]), _turns(turns))


def humaneval(row: Row, number: int) -> Item:
    """HumanEval, asked as an instruction; the reference is its test."""
    prompt = _text(row["prompt"])
    asked = f"Complete this Python function. {_PYTHON}\n\n```python\n{prompt.rstrip()}\n```"
    test = f"{_text(row['test'])}\n\ncheck({_text(row['entry_point'])})\n"
    return Item(_text(row["task_id"]), "humaneval", (asked,), {"prefix": prompt, "test": test})


def mbpp(row: Row, number: int) -> Item | None:
    """MBPP: the test split (tasks 11 to 510), with its first assertion in the prompt, as its authors ask it."""
    if not 11 <= int(row["task_id"]) <= 510:
        return None
    tests = [_text(t) for t in row["test_list"]]
    asked = f"{_text(row['text'])} {_PYTHON}\n\nYour code must pass this test:\n\n```python\n{tests[0]}\n```"
    test = "\n".join([row.get("test_setup_code") or "", *tests])
    return Item(str(row["task_id"]), "mbpp", (asked,), {"prefix": "", "test": test})


def gsm8k(row: Row, number: int) -> Item:
    """GSM8K; the reference is the number behind ``####``."""
    found = re.search(r"####\s*(-?[\d.,]+)", _text(row["answer"]))
    if found is None:
        raise ValueError("no '#### NUMBER' in its answer")
    asked = f"{_text(row['question'])}\nThink step by step. End with the answer as a number after ####."
    return Item(str(number), "gsm8k", (asked,), found[1].replace(",", "").rstrip("."))


def squad(row: Row, number: int) -> list[Item]:
    """An article of SQuAD v1.1's JSON, or a row of ``rajpurkar/squad``; the reference is the list of answers."""
    if "paragraphs" not in row:
        return [_squad(row["context"], row["question"], row["id"], row["answers"]["text"])]
    return [
        _squad(part["context"], qa["question"], qa["id"], [a["text"] for a in qa["answers"]])
        for part in row["paragraphs"]
        for qa in part["qas"]
    ]


def _squad(context: str, asked: str, key: str, answers: list[str]) -> Item:
    prompt = f"{_text(context)}\n\nAnswer with the shortest phrase of this text that is right: {_text(asked)}"
    return Item(_text(key), "squad", (prompt,), [_text(a) for a in answers])


def spider(row: Row, number: int, schemas: Mapping[str, str]) -> Item | None:
    """Spider; None where its database is not there. The reference is the gold query and the database's name.

    Args:
        row: of ``dev.jsonl``.
        number: its line.
        schemas: database -> its schema as text.
    """
    name = _text(row["db_id"])
    if name not in schemas:
        return None
    asked = f"{schemas[name]}\n\nWrite one SQLite query, and nothing else, that answers: {_text(row['question'])}"
    key = str(row.get("id", number))
    return Item(key, "spider", (asked,), {"query": _text(row["query"]), "database": name})


def schema(row: Row) -> str:
    """A database of Spider's ``tables.json`` as one line a table."""
    columns: list[list[str]] = [[] for _ in row["table_names_original"]]
    for table, column in row["column_names_original"]:
        if table >= 0:
            columns[table].append(column)
    return "\n".join(
        f"{table}({', '.join(own)})" for table, own in zip(row["table_names_original"], columns, strict=True)
    )


def own(row: Row, number: int) -> Item:
    """A user's own line: ``prompt`` or ``turns``, optional ``id``, ``category`` and ``reference``."""
    if ("prompt" in row) == ("turns" in row):
        raise ValueError('it needs either "prompt" (text) or "turns" (a list of texts)')
    turns = _turns([row["prompt"]] if "prompt" in row else row["turns"])
    key = row.get("id", row.get("question_id", number))
    return Item(str(key), _text(row.get("category", "all")), turns, _reference(row.get("reference")))


def _reference(value: Any) -> str | list[str] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f'"reference" is {value!r}: use a text, or a list of texts')
    return value


def _turns(turns: Any) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise ValueError('"turns" is not a list of texts')
    return tuple(_text(t) for t in turns)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text of at least one character")
    value.encode()  # half of a surrogate pair is no text
    return value
