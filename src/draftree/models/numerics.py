"""Linear layers in the numerics that a user asked for, each with the kernel that is fastest for its shape here.

    fp32    float32 throughout: the ids of transformers
    fp16w   float16 weights, float32 arithmetic
    int8    int8 weights with a scale for each output, two-digit int8 activations with a scale for each row; where a shape
            is faster so, as fp16w
    auto    whichever of these is fastest

On a CPU, for float32 models. The original weights are freed, those of an embedding that shares them excepted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..errors import ConfigError, DraftreeWarning
from .choice import Choice, Times, choose
from .kernels import KERNELS, Kernel, Stock, candidates, working

AUTO, STOCK = "auto", "stock"
DEFAULT_NUMERICS = "fp32"
NUMERICS = (AUTO, *KERNELS)
"""What a user may ask for. A model whose layers are left as they came has numerics "stock"."""

_SHARED = 0.25
"""Largest part of a model that may be kept twice: an output layer packed beside the embedding that it shares."""


class KernelLinear(nn.Module):
    """A linear layer that runs with a kernel.

    Attributes:
        in_features, out_features: as of ``nn.Linear``.
        kernel: its packed weights.
    """

    def __init__(self, kernel: Kernel, rows: Sequence[int], in_features: int, out_features: int) -> None:
        super().__init__()
        self.kernel, self._rows = kernel, rows
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; not differentiable."""
        flat = x.reshape(-1, self.in_features)
        n = flat.shape[0]
        run = self._rows[n] if n < len(self._rows) else n
        out = self.kernel(flat) if run == n else self.kernel(pad(flat, (0, 0, 0, run - n)))[:n]
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kernel.name}"


def check(numerics: str, device: torch.device, dtype: torch.dtype | None) -> None:
    """Refuse what cannot be had, before any model is loaded.

    Raises:
        ConfigError: no such numerics, or they need a CPU and float32 weights.
    """
    if numerics not in NUMERICS:
        raise ConfigError(f"numerics is {numerics!r}: choose from {', '.join(NUMERICS)}")
    if numerics in (AUTO, DEFAULT_NUMERICS):
        return
    for what, value, needed in (("device", device.type, "cpu"), ("dtype", dtype, torch.float32)):
        if value != needed:
            raise ConfigError(f"numerics {numerics} needs {what} {needed}, not {value}: leave one of the two out")


def convert(module: nn.Module, numerics: str = DEFAULT_NUMERICS) -> str:
    """Give every float32 linear layer on a CPU in ``module`` a kernel, and free its weights; the numerics in use.

    "stock" where there is no such layer. Times of shapes not met before are measured, which takes a second or two.

    Raises:
        ConfigError: no such numerics.

    Warns:
        DraftreeWarning: this processor or this PyTorch has no kernel for them; fp32 is used.
    """
    check(numerics, torch.device("cpu"), torch.float32)
    groups = _groups(module)
    if not groups:
        return STOCK
    kinds = [kind for kind in KERNELS if numerics in (kind, AUTO) and working(kind)]
    if not kinds:
        warnings.warn(f"this CPU has no {numerics} kernel that works: using fp32", DraftreeWarning, stacklevel=2)
        kinds = [DEFAULT_NUMERICS]
    times = Times()
    plans = {kind: _plan(groups, kind, times) for kind in kinds}
    times.keep()
    used = min(kinds, key=lambda k: sum(c.seconds * len(g) for c, g in zip(plans[k], groups, strict=True)))
    kernels = {kernel.name: kernel for kernel in candidates(used)}
    for group, choice in zip(groups, plans[used], strict=True):
        while group.places:  # emptied on the way, so that weights go one by one
            place = group.places.pop()
            place.replace(kernels[choice.kernel], choice.rows)
    return used


def summary(module: nn.Module) -> str:
    """How many linear layers run with which kernel."""
    linears = [m for m in module.modules() if isinstance(m, (KernelLinear, nn.Linear))]
    names = Counter(m.kernel.name if isinstance(m, KernelLinear) else STOCK for m in linears)
    return f"{len(linears)} layers, {', '.join(f'{count} {name}' for name, count in names.most_common())}"


@dataclass(frozen=True, slots=True)
class _Place:
    """A linear layer and where it is."""

    parent: nn.Module
    name: str
    linear: nn.Linear

    def replace(self, kernel: type[Kernel], rows: Sequence[int]) -> None:
        linear = self.linear
        bias = None if linear.bias is None else linear.bias.detach()
        packed = kernel(linear.weight.detach(), bias)
        setattr(self.parent, self.name, KernelLinear(packed, rows, linear.in_features, linear.out_features))


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers of one shape.

    Attributes:
        places: the layers.
        keep: their weights stay anyway, and are too large to be kept twice.
    """

    places: list[_Place]
    keep: bool

    def __len__(self) -> int:
        return len(self.places)


def _groups(module: nn.Module) -> list[_Group]:
    shared = {m.weight.data_ptr() for m in module.modules() if isinstance(m, nn.Embedding)}
    whole = sum(p.nbytes for p in module.parameters())
    groups: dict[tuple[int, int, bool], list[_Place]] = {}
    for parent in module.modules():
        for name, linear in parent.named_children():
            if (
                type(linear) is nn.Linear
                and linear.weight.dtype == torch.float32
                and linear.weight.device.type == "cpu"
            ):
                keep = linear.weight.data_ptr() in shared and linear.weight.nbytes > _SHARED * whole
                key = (linear.in_features, linear.out_features, keep)
                groups.setdefault(key, []).append(_Place(parent, name, linear))
    return [_Group(places, keep) for (_, _, keep), places in groups.items()]


def _plan(groups: Sequence[_Group], kind: str, times: Times) -> list[Choice]:
    """What each group would run with in these numerics."""
    choices = []
    for group in groups:
        kernels: tuple[type[Kernel], ...] = (Stock,) if group.keep and kind == DEFAULT_NUMERICS else candidates(kind)
        weights = [place.linear.weight.detach() for place in group.places]
        choices.append(choose(times.of(kernels, weights)))
    return choices
