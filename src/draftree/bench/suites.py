"""Prompt sets, read from a directory that the user names; nothing is shipped or downloaded."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a suite.

    Attributes:
        id: unique in its suite.
        category: the suite's own.
        prompt: the first turn.
    """

    id: str
    category: str
    prompt: str


def data_folder() -> Path:
    """``DRAFTREE_DATA``, or ``../shared/data`` beside a checkout.

    Raises:
        UnknownNameError: there is no such folder.
    """
    folder = Path(os.environ.get("DRAFTREE_DATA", "../shared/data"))
    if not folder.is_dir():
        raise UnknownNameError(f"no prompt sets at {folder}: set DRAFTREE_DATA to the folder that holds spec_bench")
    return folder


def spec_bench(per_category: int, categories: Collection[str] | None = None) -> list[Item]:
    """The first prompts of each Spec-Bench category (``question.jsonl`` of github.com/hemingkx/Spec-Bench).

    Raises:
        UnknownNameError: the file is not there, or a category does not exist.
    """
    path = data_folder() / "spec_bench" / "question.jsonl"
    if not path.is_file():
        raise UnknownNameError(f"no Spec-Bench at {path}: put its question.jsonl there, or set DRAFTREE_DATA")
    items, seen = [], Counter[str]()
    for line in path.read_text().splitlines():
        question = json.loads(line)
        category = question["category"]
        seen[category] += 1
        if seen[category] <= per_category and (not categories or category in categories):
            items.append(Item(str(question["question_id"]), category, question["turns"][0]))
    if unknown := set(categories or ()) - set(seen):
        raise UnknownNameError(f"no Spec-Bench category {sorted(unknown)[0]!r}: choose from {', '.join(seen)}")
    return items
