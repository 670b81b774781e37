"""Linear layers with fp32, fp16, int8 and int4 weights for CPUs."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .fused_model import scripted

_TOLERANCE = 0.02
"""Largest error of a kernel that works, relative to the largest result."""


class Kernel(nn.Module):
    """A linear layer of packed weights, [..., in] -> [..., out], n rows in all; TorchScript can take it as a part.

    Made from a weight [out, in] and a bias [out] or None.

    Attributes:
        inputs: in.
    """

    name: ClassVar[str]
    in_torchscript: ClassVar[bool] = True
    """Its operator takes packed weights: to hand them over takes Python 10 microseconds a call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.inputs, self.bias = weight.shape[1], bias

    @classmethod
    def packed_for(cls, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """This kernel of a weight and a bias, as it is called."""
        made = cls(weight, bias)
        return scripted(made) if cls.in_torchscript else made

    @classmethod
    def weight_of(cls, made: Any) -> Tensor:
        """[out, in] of what ``packed_for`` made, as it is used; of packed weights what becomes of the unit matrix."""
        columns: Tensor = made.forward(torch.eye(made.inputs))
        return (columns if made.bias is None else columns - made.bias).T.contiguous()


@contextmanager
def fbgemm() -> Iterator[None]:
    """Pack for FBGEMM, whose constructors announce their end in a future PyTorch."""
    quantized: Any = torch.backends.quantized
    engine = quantized.engine
    try:
        quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            yield
    finally:
        quantized.engine = engine


def works(kernel: Callable[[Tensor, Tensor | None], nn.Module]) -> bool:
    """Is it there and right, where sums of products are largest?"""
    weight = torch.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64).sign()
    want = linear(weight[::4], weight)
    try:
        error = (kernel(weight, None).forward(weight[::4]) - want).abs().max()
    except (RuntimeError, AttributeError):
        return False
    return bool(error <= _TOLERANCE * want.max())


_TYPICAL_ROWS = 16
"""Rows a pass that oneDNN chooses its blocks for."""


class Stock(Kernel):
    """PyTorch's own linear; keeps the weight itself, all others keep their packed copy only."""

    name, in_torchscript = "stock", False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @classmethod
    def weight_of(cls, made: Any) -> Tensor:
        """The weight itself."""
        return cast(Tensor, made.weight)


class Prepacked(Kernel):
    """oneDNN with the weight already in its blocks."""

    name, in_torchscript = "prepacked", False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    @classmethod
    def weight_of(cls, made: Any) -> Tensor:
        """Out of its blocks."""
        return cast(Tensor, made.packed).to_dense()


class HalfWeights(Kernel):
    """FBGEMM with float16 weights, widened on their way into float32 arithmetic: half the bytes to read."""

    name = "fp16w"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        with fbgemm():
            self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return out

    @classmethod
    def weight_of(cls, made: Any) -> Tensor:
        """Widened."""
        with fbgemm():
            return cast(Tensor, torch.ops.quantized.linear_unpack_fp16(made.packed)[0])


_DIGITS = ((127, 128), (63, 64))
"""Largest digit of int8 activations, and the zero point that makes digits unsigned. The second is for processors that
saturate sums of two products: 127 x 127 x 2 < 2^15."""
_SMALLEST = 1e-30
"""Rows of zeros have a scale too."""
_AT_ONCE = 1 << 20
"""Weights that are made whole numbers at once: copies of a whole output layer would be a model's largest tensors."""
_GROUP, _OUTPUTS, _BLOCK = 32, 16, 64
"""Of int4: inputs that share a scale, and outputs that come together, to which weights are filled up; and outputs whose
packed weights lie together."""


class _Int8(Kernel, ABC):
    """int8 weights with a scale for each output; activations of two int8 digits with a scale for each row.

    x = s (h + l / 2d) within s / 4d, where d is the largest digit and s = max |x| / d over the row. Both digits are
    rows of one product in whole numbers, so that results do not depend on n. One digit would not do: float32 noise of
    1e-7 before it (attention in a pass of another shape) moves it now and then by 1 / d, some layers later nearly all,
    and the logits by as much as quantisation itself does. Two digits keep that noise as small as their error.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, digits: tuple[int, int] | None = None) -> None:
        super().__init__(weight, bias)
        own: Callable[..., Kernel] = type(self)
        self.largest, self.zero = digits or _digits(own)
        self.step, self.least = 2 * self.largest, _SMALLEST
        scales = (torch.maximum(weight.amax(1), -weight.amin(1)) / 127).clamp_(min=_SMALLEST)
        whole = torch.empty(weight.shape, dtype=torch.int8)
        rows = max(1, _AT_ONCE // weight.shape[1])
        for into, part, scale in zip(whole.split(rows), weight.split(rows), scales.split(rows), strict=True):
            into.copy_((part / scale[:, None]).round_())
        self._pack(whole, scales)

    @abstractmethod
    def _pack(self, weight: Tensor, scales: Tensor) -> None:
        """Take [out, in] int8 weights up to 127, and [out] scales of their rows."""

    @abstractmethod
    def multiply(self, digits: Tensor) -> Tensor:
        """Rounded digits [..., in] -> [..., out], products with the weight, times its scales."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_(min=self.least).div_(self.largest)
        low = x / scale
        high = low.round()
        highs, lows = self.multiply(torch.cat((high, low.sub_(high).mul_(self.step)))).chunk(2)
        out = torch.add(highs, lows, alpha=1 / self.step).mul_(scale)
        return out if self.bias is None else out.add_(self.bias)


class Int8(_Int8):
    """FBGEMM."""

    name = "int8"

    def _pack(self, weight: Tensor, scales: Tensor) -> None:
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        with fbgemm():
            whole = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
            self.packed: Any = torch.ops.quantized.linear_prepack(whole, None)

    def multiply(self, digits: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            digits, 1.0, self.zero, self.packed
        )
        return out


class Int8OneDNN(_Int8):
    """oneDNN."""

    name = "int8-onednn"

    def _pack(self, weight: Tensor, scales: Tensor) -> None:
        self.packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
        self.scales, self.zeros = scales, torch.zeros_like(scales, dtype=torch.int32)

    def multiply(self, digits: Tensor) -> Tensor:
        whole = digits.round_().add_(self.zero).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, self.zero, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return out


class Int4(Kernel):
    """int4 weights, each 32 inputs with a scale and a least value of their own; bfloat16 activations and results.

    Weights that come from 4 bits in such groups (GGUF's Q4_0 and Q4_1) are kept as they are, but for the bfloat16 of
    their scales. Results of another n may differ by their bfloat16 rounding, which grows from layer to layer into what
    turns a close decision: it is for drafting, not for a target.
    """

    name, in_torchscript = "int4", False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.outputs = weight.shape[0]
        self.more, self.group, self.exact = -self.inputs % _GROUP, _GROUP, self.outputs % _OUTPUTS == 0
        rows = max(_BLOCK, _AT_ONCE // self.inputs // _BLOCK * _BLOCK)
        packed, levels = zip(*map(self._part, weight.split(rows)), strict=True)
        self.packed, self.levels = torch.cat(packed), torch.cat(levels, 1)

    @staticmethod
    def _part(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Packed whole numbers, and [groups, out, 2] bfloat16 scale and value of the number 8."""
        weight = pad(weight, (0, -weight.shape[1] % _GROUP, 0, -weight.shape[0] % _OUTPUTS))
        groups = weight.unflatten(1, (-1, _GROUP))
        least = groups.amin(-1, keepdim=True)
        scales = ((groups.amax(-1, keepdim=True) - least) / 15).clamp_(min=_SMALLEST)
        whole = ((groups - least) / scales).round_().to(torch.int32).view_as(weight)
        levels = torch.cat((scales, least + 8 * scales), -1).transpose(0, 1).bfloat16()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1), levels.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(torch.bfloat16)
        if self.more > 0:
            rows = pad(rows, (0, self.more))
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.levels)
        if not self.exact:
            out = out.narrow(1, 0, self.outputs)
        wide: Tensor = out.float().view(list(x.shape[:-1]) + [self.outputs])
        return wide if self.bias is None else wide.add_(self.bias)


@cache
def _digits(kernel: Callable[..., Kernel]) -> tuple[int, int]:
    """The finest digits that do not saturate; the first if all do."""
    return next((digits for digits in _DIGITS if works(partial(kernel, digits=digits))), _DIGITS[0])


KERNELS: dict[str, tuple[type[Kernel], ...]] = {
    "fp32": (Stock, Prepacked),
    "fp16w": (HalfWeights,),
    "int8": (Int8, Int8OneDNN),
    "int4": (Int4,),
}
"""Weight format -> kernels that compute in it."""


@cache
def working(weight_format: str) -> tuple[type[Kernel], ...]:
    """The kernels of this weight format that this processor and this PyTorch have, tried on a small product."""
    return tuple(kernel for kernel in KERNELS[weight_format] if works(kernel))


def candidates(weight_format: str) -> tuple[type[Kernel], ...]:
    """Kernels to choose from for this weight format; making digits costs small layers more than it saves."""
    own = working(weight_format)
    return own + working("fp16w") if own and weight_format == "int8" else own
