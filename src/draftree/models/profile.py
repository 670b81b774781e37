"""What a model's passes really cost on this machine, as it is kept in the user's cache directory (``measure.py``).

A pass is ``extend``: n new nodes in each of some rows behind a context. Nothing is assumed of the curve's shape: on a
CPU a pass over 7 tokens may cost more than one over 8.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from ..artifacts import write_whole
from ..errors import DraftreeWarning, RunError
from .base import LanguageModel

FORMAT, VERSION = "draftree-profile", 3
"""A new version of our own passes has new times."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile depends on: with any other it would be another profile."""

    model: str
    architecture: str
    parameters: int
    dtype: str
    attention: str
    device: str
    threads: int
    torch: str
    transformers: str
    numerics: str = "stock"

    @classmethod
    def of(cls, model: LanguageModel) -> Identity:
        """The model's on this machine."""
        can = model.capabilities
        return cls(
            model=can.name,
            architecture=can.architecture,
            parameters=can.parameters,
            dtype=str(can.dtype).removeprefix("torch."),
            attention=can.attention,
            device=torch.cuda.get_device_name(can.device) if can.device.type == "cuda" else processor(),
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            numerics=can.numerics,
        )

    @property
    def file_name(self) -> str:
        """The same for other versions of libraries: theirs is the profile that goes stale."""
        fixed = [str(v) for k, v in asdict(self).items() if k not in ("torch", "transformers")]
        digest = hashlib.sha256("\n".join(fixed).encode()).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.model)[-60:]}-{digest}.json"


@lru_cache(maxsize=1)
def processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Point:
    """One measured curve: ``seconds[i]`` is the median of passes over ``sizes[i]`` nodes in each of ``batch`` rows."""

    batch: int
    context: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Seconds over ``tokens`` nodes: linear between the measured sizes, and beyond them as from 1 to the last."""
        above = next((i for i, size in enumerate(self.sizes) if size >= tokens), None)
        if above == 0:
            return self.seconds[0]
        if above is None:
            if len(self.sizes) == 1:
                return self.seconds[0]
            slope = (self.seconds[-1] - self.seconds[0]) / (self.sizes[-1] - self.sizes[0])
            return self.seconds[-1] + max(0.0, slope) * (tokens - self.sizes[-1])
        (low, high), (first, last) = self.sizes[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
        return first + (last - first) * (tokens - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured pass times of one model on one machine.

    Attributes:
        identity: whose they are.
        points: curves over the number of nodes, one for each batch size and context.
    """

    identity: Identity
    points: tuple[Point, ...]

    def seconds(self, nodes: float, context: int, batch: int = 1) -> float:
        """Seconds of a pass over ``nodes`` nodes in each of ``batch`` rows behind ``context`` tokens.

        Linear in the context between the measured ones; rows of a batch size that was not measured count as more nodes
        of the next smaller one.
        """
        size = max((p.batch for p in self.points if p.batch <= batch), default=min(p.batch for p in self.points))
        tokens = nodes * batch / size
        curves = sorted((p for p in self.points if p.batch == size), key=lambda p: p.context)
        above = next((i for i, p in enumerate(curves) if p.context >= context), len(curves) - 1)
        last = curves[above].at(tokens)
        if above == 0 or curves[above].context <= context:
            return last
        low = curves[above - 1]
        share = (context - low.context) / (curves[above].context - low.context)
        return low.at(tokens) + share * (last - low.at(tokens))

    def curve(self, nodes: int, context: int, batch: int = 1) -> list[float]:
        """[nodes + 1] seconds of passes over 1, 2, ... nodes + 1 tokens: the root, and so many drafted nodes."""
        return [self.seconds(n, context, batch) for n in range(1, nodes + 2)]

    def save(self) -> Path:
        """Write it to the cache directory, in one piece; where it is.

        Raises:
            RunError: it cannot be written.
        """
        path = profile_folder() / self.identity.file_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder {path.parent}: {error.strerror}: set XDG_CACHE_HOME") from None
        document = {"format": FORMAT, "version": VERSION, "identity": asdict(self.identity)}
        write_whole(path, json.dumps(document | {"points": [asdict(p) for p in self.points]}, indent=1))
        return path


def profile_folder() -> Path:
    """Where measured profiles are kept."""
    return platformdirs.user_cache_path("draftree") / "profiles"


def load_profile(model: LanguageModel) -> Profile | None:
    """The kept profile of a model; None, with a warning that says why, when there is none that can be used."""
    identity = Identity.of(model)
    path = profile_folder() / identity.file_name
    try:
        profile = _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(f"the profile {path} cannot be read ({type(error).__name__}): measuring again")
        return None
    for name, value in asdict(identity).items():
        if (old := getattr(profile.identity, name)) != value:
            warn(f"the profile of {identity.model} was measured with {name} {old}, now {value}: measuring again")
            return None
    return profile


def _parse(document: Any) -> Profile:
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        raise ValueError("another format")
    points = []
    for p in document["points"]:
        sizes, seconds = [int(n) for n in p["sizes"]], [float(s) for s in p["seconds"]]
        if len(sizes) != len(seconds) or sizes[:1] != [1] or sizes != sorted(set(sizes)):
            raise ValueError("sizes do not fit")
        if not all(0 < s < math.inf for s in seconds) or int(p["batch"]) < 1 or int(p["context"]) < 1:
            raise ValueError("seconds out of range")
        points.append(Point(int(p["batch"]), int(p["context"]), tuple(sizes), tuple(seconds)))
    if not points:
        raise ValueError("no points")
    return Profile(Identity(**document["identity"]), tuple(points))


def warn(message: str) -> None:
    """Of a profile that is not used or not kept."""
    warnings.warn(message, DraftreeWarning, stacklevel=3)
