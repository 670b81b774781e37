"""Prompts to learn from: files that a user names, their order, and their tokens."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..artifacts import LARGEST_DATA, read_text, user_path
from ..errors import PromptError, UnknownNameError
from ..models.base import LanguageModel
from ..text.encoding import encode, user

LONGEST_PROMPT = 512
"""Tokens; longer prompts are left out: prefill would take most of the time."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts.

    Attributes:
        name: without its folder.
        digest: SHA-256 of its bytes.
        licence: as the user states it, or None.
    """

    name: str
    count: int
    digest: str
    licence: str | None = None


def shuffled(files: Sequence[Sequence[str]], seed: int) -> list[str]:
    """All prompts of some files once each, in an order that the seed gives."""
    prompts = list(dict.fromkeys(prompt for file in files for prompt in file))
    random.Random(seed).shuffle(prompts)  # noqa: S311 - an order, not a secret
    return prompts


def encoded(target: LanguageModel, prompts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of the prompts that are short enough, through the target's chat template unless they are taken raw.

    Raises:
        PromptError: none is.
    """
    longest = min(LONGEST_PROMPT, target.capabilities.max_length // 2)
    found = [encode(target.tokenizer, prompt if raw else user(prompt)) for prompt in prompts]
    if not (short := [ids for ids in found if len(ids) <= longest]):
        raise PromptError(f"all prompts are longer than {longest} tokens: give shorter ones")
    return short


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Identifies a list of prompts by their token ids."""
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()[:16]


_KEYS = ("prompt", "text", "question", "instruction")
"""Where a JSON object has its prompt; the first that it has counts."""
_CONTEXTS = ("context", "input")
"""Where it has what the prompt is about; added below it."""

_WAY_OUT = "give a text file with one prompt a line, .jsonl or .csv"
_LONGEST_CELL = 1 << 24


def read_prompts(name: str) -> list[str]:
    """The prompts of a text file, one a line; a .jsonl file, one object a line; or a .csv file, column "prompt".

    An object has its prompt under one of ``_KEYS``, and may have more text for it under one of ``_CONTEXTS``, itself or
    in the first of its "instances": the formats of Dolly, GSM8K, MBPP and Self-Instruct.

    Raises:
        UnknownNameError: there is no such file.
        PromptError: it cannot be read, or holds no prompts; the message says which line.
    """
    path = user_path(name)
    try:
        text = read_text(path, LARGEST_DATA)
    except FileNotFoundError:
        raise UnknownNameError(f"no prompt file {name!r}: {_WAY_OUT}") from None
    except UnicodeError:
        raise PromptError(f"{name} is not valid UTF-8: convert it, for example with iconv") from None
    except OSError as error:
        raise PromptError(f"cannot read {name}: {error.strerror}: {_WAY_OUT}") from None
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt(line, f"{name} line {at}") for at, line in lines]
    elif path.suffix == ".csv":
        prompts = list(_column(text, name))
    else:
        prompts = [line.strip() for _, line in lines]
    if not prompts:
        raise PromptError(f"{name} has no prompts: {_WAY_OUT}")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} is not JSON: write one object a line") from None
    found = _first(item, _KEYS)
    if found is None:
        *others, last = (f'"{key}"' for key in _KEYS)
        raise PromptError(f"{where} has no {', '.join(others)} or {last} with at least one character: add one")
    cases = item.get("instances")
    about = _first(item, _CONTEXTS) or _first(cases[0] if isinstance(cases, list) and cases else None, _CONTEXTS)
    return found if about is None else f"{found}\n\n{about}"


def _first(item: object, keys: tuple[str, ...]) -> str | None:
    """The text under the first key that is there; None where it is no text, or empty."""
    found = next((item[key] for key in keys if key in item), None) if isinstance(item, dict) else None
    return found if isinstance(found, str) and found.strip() else None


def _column(text: str, name: str) -> Iterator[str]:
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if "prompt" not in (rows.fieldnames or ()):
            raise PromptError(f'{name} line 1 has no column "prompt": name one so')
        for row in rows:
            if not (row["prompt"] or "").strip():
                raise PromptError(f"{name} line {rows.line_num} has no prompt: fill its column, or take the line out")
            yield row["prompt"]
    except csv.Error as error:
        raise PromptError(
            f"{name} line {rows.line_num + 1} is not CSV ({error}): put texts of several lines into quotes"
        ) from None
