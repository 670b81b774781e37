"""Prompts that a user gives in a file: one a line, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import PromptError, UnknownNameError

KEYS = ("prompt", "text")


def read_prompts(name: str) -> list[str]:
    """The prompts of a text file, one a line, or of a .jsonl file, one object with a "prompt" or "text" a line.

    Raises:
        UnknownNameError: there is no such file.
        PromptError: it cannot be read, or holds no prompts.
    """
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnknownNameError(f"no prompt file {name!r}: give a text file with one prompt a line, or .jsonl") from None
    except UnicodeError:
        raise PromptError(f"{name} is not valid UTF-8: convert it, for example with iconv") from None
    except OSError as error:
        raise PromptError(f"cannot read {name}: {error.strerror}: give a text file with one prompt a line") from None
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt(line, f"{name} line {at}") for at, line in lines]
    else:
        prompts = [line.strip() for _, line in lines]
    if not prompts:
        raise PromptError(f"{name} has no prompts: write one a line")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} is not JSON: write one object a line") from None
    found = next((item[key] for key in KEYS if key in item), None) if isinstance(item, dict) else None
    if not isinstance(found, str) or not found.strip():
        raise PromptError(f'{where} has no "prompt" or "text" with at least one character: add one')
    return found
