"""Linear layers in the numerics that a user asked for, each with the kernel that is fastest for its shape here.

    fp32    float32 throughout: the ids of transformers
    fp16w   float16 weights, float32 arithmetic
    int8    int8 weights with a scale for each output, two-digit int8 activations with a scale for each row; shapes that
            are faster so, as fp16w
    auto    whichever of these is fastest
    int4    for drafting alone: int4 weights, the output layer in int8; shapes that are faster so, as fp16w

On a CPU, for float32 models. The original weights are freed, those of an embedding that shares them excepted.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..errors import ConfigError, DraftreeWarning
from .choice import Choice, Linear, Times, choose
from .kernel import Kernel
from .kernels import KERNELS, Stock, candidates, working
from .layers import Concatenated

AUTO, STOCK = "auto", "stock"
DEFAULT_NUMERICS = "fp32"
DRAFTING = "int4"
"""Numerics that a target cannot have: what it says of a token would depend on how many it is asked about."""
NUMERICS = (AUTO, *(kind for kind in KERNELS if kind != DRAFTING))
"""What a user may ask for. A model whose layers are left as they came has numerics "stock"."""

_Key = tuple[int, int, bool, bool]
_SHARED = 0.25
"""Largest part of a model that may be kept twice: an output layer packed beside the embedding that it shares."""
_SMALL = 1 << 20
"""Bytes of norms and biases, which are copied: they would keep the files of their neighbours mapped."""


class KernelLinear(nn.Module):
    """A linear layer that runs with a kernel; TorchScript can take it as a part.

    Attributes:
        in_features, out_features: as of ``nn.Linear``.
        kernel: its packed weights.
    """

    def __init__(self, kernel: Kernel, rows: Sequence[int], in_features: int, out_features: int) -> None:
        super().__init__()
        self.kernel, self.product, self._rows = kernel, kernel.product, list(rows) or [0]
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; not differentiable."""
        n = x.numel() // self.in_features
        run = self._rows[n] if n < len(self._rows) else n
        filled = x if run == n else pad(x.reshape(n, self.in_features), (0, 0, 0, run - n))
        out: Tensor = self.product.forward(filled)
        return out if run == n else out[:n].view(list(x.shape[:-1]) + [self.out_features])

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kernel.name}"


def check(numerics: str, device: torch.device, dtype: torch.dtype | None, drafting: bool = False) -> None:
    """Refuse what cannot be had, before any model is loaded.

    Args:
        numerics: what is wanted.
        device, dtype: of the weights.
        drafting: it is for a drafter.

    Raises:
        ConfigError: no such numerics, or they need a CPU and float32 weights.
    """
    if numerics not in NUMERICS and not (drafting and numerics == DRAFTING):
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
    if numerics not in (AUTO, *KERNELS):
        raise ConfigError(f"numerics is {numerics!r}: choose from {', '.join(NUMERICS)}")
    places = deque(_places(module))
    if not places:
        return STOCK
    kinds = [kind for kind in (NUMERICS[1:] if numerics == AUTO else (numerics,)) if working(kind)]
    if not kinds:
        warnings.warn(f"this CPU has no {numerics} kernel that works: using fp32", DraftreeWarning, stacklevel=2)
        kinds = [DEFAULT_NUMERICS]
    times = Times()
    plans = {kind: _plan(places, kind, times) for kind in kinds}
    times.keep()
    used = min(kinds, key=lambda kind: sum(plans[kind][place.key].seconds for place in places))
    available: list[type[Kernel]] = [Stock, *(kernel for kind in KERNELS for kernel in candidates(kind))]
    kernels = {kernel.name: kernel for kernel in available}
    for parameter in module.parameters():
        if parameter.nbytes <= _SMALL:
            parameter.data = parameter.data.clone()
    while places:  # in the model's order and one by one, so that files are unmapped as the last of their weights goes
        place = places.popleft()
        place.replace(kernels[plans[used][place.key].kernel], plans[used][place.key].rows)
    return used


def price(model: PreTrainedModel, numerics: str) -> float:
    """Seconds of the linear layers of a converted model for one token, were they in ``numerics``, over what they are.

    Infinite where this processor has no kernel for them.
    """
    if not working(numerics):
        return math.inf
    groups: dict[_Key, list[_Place]] = {}
    for place in _places(model):
        groups.setdefault(place.key, []).append(place)
    times, seconds = Times(), [0.0, 0.0]
    for places in groups.values():
        linears = [place.linear for place in places]
        now = {type(linear.kernel) for linear in linears if isinstance(linear, _Unpacked)}
        for i, kernels in enumerate((_kernels(places[0], numerics), tuple(now) or (Stock,))):
            seconds[i] += len(places) * min(each[0] for each in times.of(kernels, linears).values())
    times.keep()
    return seconds[0] / seconds[1] if seconds[1] else math.inf


def apart(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that can be given other linear layers; it shares all weights and other layers with it."""
    parts = [*model.parameters(), *model.buffers(), *(m for m in model.modules() if isinstance(m, KernelLinear))]
    copy = deepcopy(model, {id(part): part for part in (*parts, model.config)})
    for module in copy.modules():
        if not isinstance(module, KernelLinear):
            module._forward_hooks = OrderedDict()
    return copy


def summary(module: nn.Module) -> str:
    """How many linear layers run with which kernel."""
    linears = [m for m in module.modules() if isinstance(m, (KernelLinear, nn.Linear))]
    names = Counter(m.kernel.name if isinstance(m, KernelLinear) else STOCK for m in linears)
    return f"{len(linears)} layers, {', '.join(f'{count} {name}' for name, count in names.most_common())}"


class _Unpacked:
    """A layer with a kernel as the linear layer that it was; TorchScript would work out the properties of a module."""

    def __init__(self, layer: KernelLinear) -> None:
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kernel = layer.kernel

    @property
    def weight(self) -> Tensor:
        return self.kernel.weight

    @property
    def bias(self) -> Tensor | None:
        return self.kernel.bias


@dataclass(frozen=True, slots=True)
class _Place:
    """A linear layer and where it is.

    Attributes:
        shared: its weight stays anyway, as an embedding's.
        large: and is too large to be kept twice.
        output: it is the model's output layer.
    """

    parent: nn.Module
    name: str
    linear: Linear
    shared: bool
    large: bool
    output: bool

    @property
    def key(self) -> _Key:
        """Equal for layers that run with the same kernel."""
        return self.linear.in_features, self.linear.out_features, self.shared and self.large, self.output

    @torch.no_grad()
    def replace(self, kernel: type[Kernel], rows: Sequence[int]) -> None:
        linear = self.linear
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        packed = kernel(weight.clone() if kernel is Stock and not self.shared else weight, bias)
        setattr(self.parent, self.name, KernelLinear(packed, rows, linear.in_features, linear.out_features))


def _places(module: nn.Module) -> Iterator[_Place]:
    """The linear layers whose weights are float32 on a CPU, in the module's order."""
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    whole = sum(p.nbytes for p in module.parameters())
    output = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    for parent in [m for m in module.modules() if not isinstance(m, (Concatenated, KernelLinear))]:
        for name, linear in parent.named_children():
            if isinstance(linear, KernelLinear):
                yield _Place(parent, name, _Unpacked(linear), False, False, linear is output)
            elif type(linear) in (nn.Linear, Concatenated) and all(
                p.dtype == torch.float32 and p.device.type == "cpu" for p in linear.parameters()
            ):
                weight = next(linear.parameters())
                large = weight.nbytes > _SHARED * whole
                yield _Place(parent, name, cast(Linear, linear), id(weight) in shared, large, linear is output)


def _plan(places: Sequence[_Place], kind: str, times: Times) -> dict[_Key, Choice]:
    """What layers would run with in these numerics, by their keys."""
    groups: dict[_Key, list[Linear]] = {}
    kernels = {place.key: _kernels(place, kind) for place in places}
    for place in places:
        groups.setdefault(place.key, []).append(place.linear)
    plan = {}
    for key, linears in groups.items():
        plan[key] = choose(times.of(kernels[key], linears))
    return plan


def _kernels(place: _Place, kind: str) -> tuple[type[Kernel], ...]:
    """What a layer may run with in these numerics."""
    if place.shared and place.large and kind == DEFAULT_NUMERICS:
        return (Stock,)
    return candidates("int8" if place.output and kind == DRAFTING and working("int8") else kind)
