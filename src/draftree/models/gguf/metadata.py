"""The metadata of a GGUF file, by key and type: whoever wrote the file chose both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

from ...errors import ModelFileError

Value = int | float | bool | str | NDArray[Any] | list[bytes]
"""Of metadata: texts of the vocabulary stay bytes."""

AGAIN = "download it again"


def damaged(path: Path, what: str) -> ModelFileError:
    """The error of a file that holds something else than it must."""
    return ModelFileError(f"{path} is damaged: {what}: {AGAIN}")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a header holds beside its tensors; in a key "{arch}" stands for the architecture.

    Attributes:
        path: of the file.
        stored: values as they are in the file, of any type; read them by the methods.

    Raises:
        ModelFileError: (every method) the value under a key is of another type.
    """

    path: Path
    stored: Mapping[str, Value]

    @property
    def architecture(self) -> str:
        """Empty where the file has none."""
        return self.text(Keys.General.ARCHITECTURE) or ""

    def name(self, key: str) -> str:
        """A key as the file has it."""
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def text(self, key: str) -> str | None:
        """The text under a key; None: no such key."""
        value = self._find(key)
        if value is not None and not isinstance(value, str):
            raise self._mistyped(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under a key."""
        value = self._find(key)
        if value is not None and not isinstance(value, bool):
            raise self._mistyped(key, value, "true or false")
        return default if value is None else value

    def number(self, key: str) -> int | None:
        """The whole number under a key, at least 0; None: no such key."""
        value = self._find(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise self._mistyped(key, value, "a whole number of at least 0")
        return value

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """The whole numbers under a key, or the one, each at least 0 (true is 1); None: no such key."""
        value = self._find(key)
        if value is None:
            return None
        numbers = np.atleast_1d(value) if isinstance(value, int | np.ndarray) else np.zeros(0)
        if not numbers.size or numbers.dtype.kind not in "biu" or (numbers < 0).any():
            raise self._mistyped(key, value, "whole numbers of at least 0")
        return tuple(numbers.tolist())

    def real(self, key: str) -> float | None:
        """The number under a key; None: no such key."""
        value = self._find(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._mistyped(key, value, "a number")
        return None if value is None else float(value)

    def texts(self, key: str) -> list[bytes]:
        """The texts under a key, as they are stored; none where there is no such key."""
        value = self._find(key)
        if value is not None and not isinstance(value, list):
            raise self._mistyped(key, value, "an array of texts")
        return value or []

    def array(self, key: str, *types: str) -> NDArray[Any] | None:
        """The array of numbers of one of these NumPy types under a key; None: no such key."""
        value = self._find(key)
        if value is not None and (not isinstance(value, np.ndarray) or value.dtype.name not in types):
            raise self._mistyped(key, value, f"an array of {' or '.join(types)}")
        return value

    def infinite(self) -> Iterator[tuple[str, float]]:
        """Keys of numbers and of arrays that are, or hold, NaN or infinity, and it."""
        for key, value in self.stored.items():
            if isinstance(value, float | np.ndarray):
                numbers = np.atleast_1d(value)
                yield from ((key, number) for number in numbers[~np.isfinite(numbers)][:1].tolist())

    def _find(self, key: str) -> Value | None:
        return self.stored.get(self.name(key))

    def _mistyped(self, key: str, value: Value, wanted: str) -> ModelFileError:
        shown = repr(value)
        if isinstance(value, list):
            shown = f"an array of {len(value)} texts"
        elif isinstance(value, np.ndarray):
            shown = f"an array of {len(value)} {value.dtype.name}"
        return damaged(self.path, f"{self.name(key)} is {shown}, not {wanted}")
