"""What each decoder did with each prompt and width, in a file, so that a comparison that was stopped goes on.

The first line holds the settings; a line that a kill has torn is cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..artifacts import user_path
from ..errors import ConfigError, RunError

Found = list[tuple[list[int], float]]
"""Sequences and scores, best first."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one decoder did with one prompt.

    Attributes:
        width: beams.
        decoder: a drafter's name, or "transformers".
        prompt: number of the prompt, from 0.
        found: its sequences.
        seconds: prefill included.
        layers: layers of beams, the tokens of the longest one; 0 where the decoder does not tell.
        passes: target passes after the prefill.
        slots: tokens in the cache at its fullest, as a share of ``width`` caches.
    """

    width: int
    decoder: str
    prompt: int
    found: Found
    seconds: float
    layers: int = 0
    passes: int = 0
    slots: float = 0.0

    @property
    def key(self) -> tuple[int, str, int]:
        """No two lines have the same."""
        return self.width, self.decoder, self.prompt


class Lines:
    """All lines so far.

    Args:
        file: where they are kept; None: nowhere.
        settings: what makes lines comparable, as JSON can hold it.

    Raises:
        ConfigError: the file is of other settings, or holds something else.
        RunError: it cannot be written.
    """

    def __init__(self, file: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._path = None if file is None else user_path(file)
        self._lines: dict[tuple[int, str, int], Line] = {}
        if self._path is None:
            return
        head = json.dumps(settings)
        try:
            kept = self._path.read_bytes() if self._path.exists() else b""
            whole = kept[: kept.rfind(b"\n") + 1]
            if whole:
                self._read(whole.decode().splitlines(), head)
                os.truncate(self._path, len(whole))
            else:
                self._path.write_text(head + "\n")
        except OSError as error:
            raise self._unwritten(error) from None

    def _read(self, lines: list[str], head: str) -> None:
        if lines[0] != head:
            raise ConfigError(
                f"{self._path} has other settings, {lines[0][:200]}: give --out another file, or take those"
            )
        for number, text in enumerate(lines[1:], start=2):
            try:
                values = json.loads(text)
                values["found"] = [(ids, score) for ids, score in values["found"]]
                line = Line(**values)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{self._path}, line {number} is corrupt: take it out") from None
            self._lines[line.key] = line

    def __contains__(self, key: tuple[int, str, int]) -> bool:
        return key in self._lines

    def of(self, width: int, decoder: str) -> Iterator[Line]:
        """Of all prompts, in their order."""
        return iter(sorted((n for n in self._lines.values() if n.key[:2] == (width, decoder)), key=lambda n: n.prompt))

    def add(self, line: Line) -> None:
        """Keep one.

        Raises:
            RunError: it cannot be written.
        """
        self._lines[line.key] = line
        if self._path is not None:
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(line)) + "\n")
            except OSError as error:
                raise self._unwritten(error) from None

    def _unwritten(self, error: OSError) -> RunError:
        return RunError(f"cannot write {self._path}: {error.strerror or error}: give --out a file in a folder of yours")
