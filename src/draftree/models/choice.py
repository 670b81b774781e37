"""Which kernel a linear layer's shape is fastest with on this machine, and for how many rows it is better run for more.

Measured once for each shape, then kept in the user's cache directory, since a choice that changed from start to start
would change rounding. Knows shapes and kernels, not models.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import platformdirs
import torch
from torch import Tensor

from ..artifacts import write_whole
from ..errors import DraftreeWarning, RunError
from .kernel import Kernel
from .profile import processor

FORMAT, VERSION = "draftree-kernels", 3
"""A new version of the kernels, or of measuring them, has new times."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Rows a pass that count."""

_CALLS = 12
"""At least, of each size: on a busy machine most of them wait for a processor, and the least time counts."""
_COPIED = 192 << 20
"""Bytes of weights, as float32, that are gone through in turn: a model's are not in the processor's caches either."""
_GAIN, _PADDING = 0.9, 5e-6
"""Run for more rows where that takes at most this share of the time, seconds of filling them up included."""


class Linear(Protocol):
    """What ``nn.Linear`` has."""

    in_features: int
    out_features: int

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


Seconds = tuple[float, ...]
"""Of one call, for each of ``SIZES`` rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer runs with.

    Attributes:
        kernel: name of the fastest kernel.
        rows: [n] rows to run for n rows, for n = 0, 1, ...; as many as there are beyond its end.
        seconds: geometric mean over ``SIZES``.
    """

    kernel: str
    rows: tuple[int, ...]
    seconds: float


def choose(times: Mapping[str, Seconds]) -> Choice:
    """The kernel with the least geometric mean over ``SIZES``."""
    choices = [Choice(name, padded(seconds), _mean(seconds)) for name, seconds in times.items()]
    return min(choices, key=lambda c: c.seconds)


def padded(seconds: Seconds) -> tuple[int, ...]:
    """[max(SIZES) + 1] rows to run for 0, 1, 2, ... rows: the cheapest measured number from there on, if it pays."""
    measured = dict(zip(SIZES, seconds, strict=True))
    rows = list(range(SIZES[-1] + 1))
    for n, taken in measured.items():
        best = min((m for m in SIZES if m >= n), key=measured.__getitem__)
        if measured[best] + _PADDING <= _GAIN * taken:
            rows[n] = best
    return tuple(rows)


def _mean(seconds: Seconds) -> float:
    return math.exp(sum(map(math.log, seconds)) / len(seconds))


@torch.inference_mode()
def measure(kernel: type[Kernel], layers: Sequence[Linear]) -> Seconds:
    """Least seconds of a call for ``SIZES`` rows, going through these layers of one shape in turn."""
    packed = [kernel(layer.weight, None) for layer in layers]
    inputs = [torch.ones(n, layers[0].in_features) for n in SIZES]
    seconds = [math.inf] * len(SIZES)
    for _ in range(1 + max(2, _CALLS // len(packed))):
        for i, x in enumerate(inputs):
            for call in packed:
                began = time.perf_counter()
                call(x)
                seconds[i] = min(seconds[i], time.perf_counter() - began)
    return tuple(seconds)


class Times:
    """The measured times of this machine: read when made, written by ``keep``."""

    def __init__(self) -> None:
        self._machine = {"device": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        digest = hashlib.sha256(json.dumps([VERSION, self._machine]).encode()).hexdigest()[:10]
        self._path = kernels_folder() / f"{digest}.json"
        self._known = self._read()
        self._added = False

    def of(self, kernels: Sequence[type[Kernel]], layers: Sequence[Linear]) -> dict[str, Seconds]:
        """Kept or measured times, by kernel, of layers of one shape."""
        inputs, outputs = layers[0].in_features, layers[0].out_features
        known = self._known.setdefault(f"{inputs}x{outputs}", {})
        for kernel in kernels:
            if kernel.name not in known:
                known[kernel.name] = measure(kernel, layers[: max(1, _COPIED // (4 * inputs * outputs))])
                self._added = True
        return {kernel.name: known[kernel.name] for kernel in kernels}

    def keep(self) -> None:
        """Write what was added; where that cannot be, the next start measures again, and this one says so."""
        if not self._added:
            return
        document = {"format": FORMAT, "version": VERSION, "machine": self._machine, "sizes": SIZES}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(document | {"shapes": self._known}, indent=1))
        except (OSError, RunError) as error:
            _warn(f"times of linear layers are not kept: {error}: set XDG_CACHE_HOME")

    def _read(self) -> dict[str, dict[str, Seconds]]:
        try:
            return _parse(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _warn(f"times of linear layers, {self._path}, cannot be read ({type(error).__name__}): measuring again")
            return {}


def _parse(document: Any) -> dict[str, dict[str, Seconds]]:
    if (document["format"], document["version"], document["sizes"]) != (FORMAT, VERSION, list(SIZES)):
        raise ValueError("another format")
    shapes = {
        shape: {kernel: tuple(map(float, seconds)) for kernel, seconds in times.items()}
        for shape, times in document["shapes"].items()
    }
    for seconds in (s for times in shapes.values() for s in times.values()):
        if len(seconds) != len(SIZES) or not all(0 < s < math.inf for s in seconds):
            raise ValueError("seconds out of range")
    return shapes


def kernels_folder() -> Path:
    """Where measured times of linear layers are kept."""
    return platformdirs.user_cache_path("draftree") / "kernels"


def _warn(message: str) -> None:
    warnings.warn(message, DraftreeWarning, stacklevel=3)
