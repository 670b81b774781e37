"""Weight formats of linear layers: which kernel each layer gets, by measurement."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ...artifacts import JsonFormat
from ...errors import ConfigError, DraftreeWarning, RunError
from ..cost_profile import processor, warn, write_cached
from .fused_model import Concatenated
from .kernels import KERNELS, Kernel, Stock, candidates, working

VERSION = 3
"""Of kernel times: a new version of the kernels, or of measuring them, has new ones."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Rows a pass that count."""

_CALLS = 12
"""At least, of each size: on a busy machine most of them wait for a processor, and the least time counts."""
_COPIED = 192 << 20
"""Bytes of weights, as float32, that are gone through in turn: a model's are not in the processor's caches either."""
_GAIN, _PADDING = 0.9, 5e-6
"""Run for more rows where that takes at most this share of the time, seconds of filling them up included."""


Seconds = tuple[PositiveFloat, ...]
"""Of one call, for each of ``SIZES`` rows."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer runs with.

    Attributes:
        kernel: the fastest kernel.
        rows: [n] rows to run for n rows, for n = 0, 1, ...; as many as there are beyond its end.
        seconds: geometric mean over ``SIZES``.
    """

    kernel: type[Kernel]
    rows: tuple[int, ...]
    seconds: float


def choose(times: Mapping[type[Kernel], Seconds]) -> Choice:
    """The kernel with the least geometric mean over ``SIZES``."""
    choices = [Choice(kernel, padded(each), statistics.geometric_mean(each)) for kernel, each in times.items()]
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


@torch.inference_mode()
def measure(kernel: type[Kernel], layers: Sequence[Linear]) -> Seconds:
    """Least seconds of a call for ``SIZES`` rows, going through these layers of one shape in turn."""
    packed = [kernel.packed_for(layer.weight, None) for layer in layers]
    inputs = [torch.ones(n, layers[0].in_features) for n in SIZES]
    seconds = [math.inf] * len(SIZES)
    for _ in range(1 + max(2, _CALLS // len(packed))):
        for i, x in enumerate(inputs):
            for made in packed:
                began = time.perf_counter()
                made.forward(x)
                seconds[i] = min(seconds[i], time.perf_counter() - began)
    return tuple(seconds)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What was measured on a machine.

    Attributes:
        sizes: ``SIZES``.
        shapes: "inputs x outputs" of a layer -> name of a kernel -> seconds.

    Raises:
        ValueError: the sizes are others, or times for some of them are missing.
    """

    machine: dict[str, str | int]
    sizes: tuple[int, ...]
    shapes: dict[str, dict[str, Seconds]]

    def __post_init__(self) -> None:
        every = [seconds for times in self.shapes.values() for seconds in times.values()]
        if self.sizes != SIZES or any(len(seconds) != len(SIZES) for seconds in every):
            raise ValueError("times are of other sizes")


_FORMAT = JsonFormat("draftree-kernels", VERSION, "file of kernel times", "delete it", content=KernelTimes)


class Times:
    """The measured times of this machine: read when made, written by ``keep``."""

    def __init__(self) -> None:
        machine: dict[str, str | int] = {
            "device": processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        digest = hashlib.sha256(json.dumps([VERSION, machine]).encode()).hexdigest()[:10]
        self._path = kernels_folder() / f"{digest}.json"
        self._known, self._added = KernelTimes(machine, SIZES, {}), False
        try:
            self._known = _FORMAT.read(self._path)
        except FileNotFoundError:
            pass
        except ConfigError as error:
            warn(f"times of linear layers cannot be read ({error}): measuring again")

    def of(self, kernels: Sequence[type[Kernel]], layers: Sequence[Linear]) -> dict[type[Kernel], Seconds]:
        """Kept or measured times, by kernel, of layers of one shape."""
        inputs, outputs = layers[0].in_features, layers[0].out_features
        known = self._known.shapes.setdefault(f"{inputs}x{outputs}", {})
        for kernel in kernels:
            if kernel.name not in known:
                known[kernel.name] = measure(kernel, layers[: max(1, _COPIED // (4 * inputs * outputs))])
                self._added = True
        return {kernel: known[kernel.name] for kernel in kernels}

    def keep(self) -> None:
        """Write what was added; where that cannot be, the next start measures again, and this one warns."""
        if self._added:
            try:
                write_cached(_FORMAT, self._path, self._known)
            except RunError as error:
                warn(f"times of linear layers are not kept: {error}")


def kernels_folder() -> Path:
    """Where measured times of linear layers are kept."""
    return platformdirs.user_cache_path("draftree") / "kernels"


AUTO, STOCK = "auto", "stock"
DEFAULT_WEIGHT_FORMAT = "fp32"
DRAFTING = "int4"
"""A weight format that a target cannot have: its logits of a token would depend on how many it computes."""
WEIGHT_FORMATS = (AUTO, *(kind for kind in KERNELS if kind != DRAFTING))
"""What a target may have. A model whose layers are left as they came has "stock"."""

_Key = tuple[int, int, bool, bool]
_SHARED = 0.25
"""Largest part of a model that may be kept twice: an output layer packed beside the embedding that it shares."""
_SMALL = 1 << 20
"""Bytes of norms and biases, which are copied: they would keep the files of their neighbours mapped."""


class KernelLinear(nn.Module):
    """A linear layer that runs with a kernel; TorchScript can take it as a part.

    Attributes:
        kernel: which.
        product: it, with its packed weights.
    """

    __jit_unused_properties__ = ("weight",)

    def __init__(self, choice: Choice, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kernel, self.product, self._rows = choice.kernel, choice.kernel.packed_for(weight, bias), list(choice.rows)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """[out, in], as it is used."""
        return self.kernel.weight_of(self.product)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; not differentiable."""
        n = x.numel() // self.in_features
        run = self._rows[n] if n < len(self._rows) else n
        filled = x if run == n else pad(x.reshape(n, self.in_features), (0, 0, 0, run - n))
        out: Tensor = self.product.forward(filled)
        return out if run == n else out[:n].view(list(x.shape[:-1]) + [self.out_features])

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kernel.name}"


Linear = nn.Linear | Concatenated | KernelLinear


def check(weight_format: str, device: torch.device, dtype: torch.dtype | None, drafting: bool = False) -> None:
    """Reject a weight format that weights of this device and dtype cannot have, before any model is loaded.

    Raises:
        ConfigError: no such weight format, or it needs a CPU and float32 weights.
    """
    if weight_format not in WEIGHT_FORMATS and not (drafting and weight_format == DRAFTING):
        raise ConfigError(f"weight format is {weight_format!r}: choose from {', '.join(WEIGHT_FORMATS)}")
    if weight_format in (AUTO, DEFAULT_WEIGHT_FORMAT):
        return
    for what, value, needed in (("device", device.type, "cpu"), ("dtype", dtype, torch.float32)):
        if value != needed:
            raise ConfigError(
                f"weight format {weight_format} needs {what} {needed}, not {value}: leave one of the two out"
            )


def convert(module: nn.Module, weight_format: str = DEFAULT_WEIGHT_FORMAT) -> str:
    """Give every float32 linear layer on a CPU in ``module`` a kernel, and free its weights.

    Times of shapes not met before are measured, which takes a second or two.

    Returns:
        the weight format in use, "stock" where there is no such layer.

    Raises:
        ConfigError: no such weight format.

    Warns:
        DraftreeWarning: this processor or this PyTorch has no kernel for them; fp32 is used.
    """
    if weight_format not in (AUTO, *KERNELS):
        raise ConfigError(f"weight format is {weight_format!r}: choose from {', '.join(WEIGHT_FORMATS)}")
    places = deque(_places(module))
    if not places:
        return STOCK
    kinds = [kind for kind in (WEIGHT_FORMATS[1:] if weight_format == AUTO else (weight_format,)) if working(kind)]
    if not kinds:
        warnings.warn(f"this CPU has no {weight_format} kernel that works: using fp32", DraftreeWarning, stacklevel=2)
        kinds = [DEFAULT_WEIGHT_FORMAT]
    times = Times()
    plans = {kind: _plan(places, kind, times) for kind in kinds}
    times.keep()
    used = min(kinds, key=lambda kind: sum(plans[kind][place.key].seconds for place in places))
    for parameter in module.parameters():
        if parameter.nbytes <= _SMALL:
            parameter.data = parameter.data.clone()
    while places:  # in the model's order and one by one, so that files are unmapped as the last of their weights goes
        place = places.popleft()
        place.replace(plans[used][place.key])
    return used


def price(model: PreTrainedModel, weight_format: str) -> float:
    """Seconds of a converted model's linear layers for one token in ``weight_format``, over those as they are.

    Infinite where this processor has no kernel for them.
    """
    if not working(weight_format):
        return math.inf
    times, then, now = Times(), 0.0, 0.0
    for places in _by_key(_places(model)).values():
        linears = [place.linear for place in places]
        used = {linear.kernel for linear in linears if isinstance(linear, KernelLinear)} or {Stock}
        then += len(places) * min(each[0] for each in times.of(_kernels(places[0], weight_format), linears).values())
        now += len(places) * min(each[0] for each in times.of(tuple(used), linears).values())
    times.keep()
    return then / now if now else math.inf


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
    def replace(self, choice: Choice) -> None:
        weight, bias = self.linear.weight.detach(), None if self.linear.bias is None else self.linear.bias.detach()
        if choice.kernel is Stock and not self.shared:
            weight = weight.clone()
        setattr(self.parent, self.name, KernelLinear(choice, weight, bias))


def _places(module: nn.Module) -> Iterator[_Place]:
    """The linear layers whose weights are float32 on a CPU, in the module's order."""
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    whole = sum(p.nbytes for p in module.parameters())
    output = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    for parent in [m for m in module.modules() if not isinstance(m, (Concatenated, KernelLinear))]:
        for name, linear in parent.named_children():
            if isinstance(linear, KernelLinear):
                yield _Place(parent, name, linear, False, False, linear is output)
            elif (type(linear) is nn.Linear or isinstance(linear, Concatenated)) and all(
                p.dtype == torch.float32 and p.device.type == "cpu" for p in linear.parameters()
            ):
                weight = next(linear.parameters())
                large = weight.nbytes > _SHARED * whole
                yield _Place(parent, name, linear, id(weight) in shared, large, linear is output)


def _by_key(places: Iterable[_Place]) -> dict[_Key, list[_Place]]:
    groups: dict[_Key, list[_Place]] = {}
    for place in places:
        groups.setdefault(place.key, []).append(place)
    return groups


def _plan(places: Iterable[_Place], kind: str, times: Times) -> dict[_Key, Choice]:
    """What layers would run with in this weight format, by their keys."""
    return {
        key: choose(times.of(_kernels(group[0], kind), [place.linear for place in group]))
        for key, group in _by_key(places).items()
    }


def _kernels(place: _Place, kind: str) -> tuple[type[Kernel], ...]:
    """What a layer may run with in this weight format."""
    if place.shared and place.large and kind == DEFAULT_WEIGHT_FORMAT:
        return (Stock,)
    return candidates("int8" if place.output and kind == DRAFTING and working("int8") else kind)
