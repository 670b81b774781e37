"""The kernels there are for linear layers on a CPU, by numerics; those in float arithmetic themselves.

Knows nothing of models, nor which kernel is fastest.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .kernel import Kernel, fbgemm, works
from .script import scripted
from .whole import Int4, Int8, Int8OneDNN

_TYPICAL_ROWS = 16
"""Rows a pass that oneDNN chooses its blocks for."""


class Stock(Kernel):
    """PyTorch's own linear; keeps the weight itself, all others keep their packed copy only."""

    name = "stock"

    def _packed(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return _StockProduct(weight.detach(), bias)

    @property
    def weight(self) -> Tensor:
        """The weight itself."""
        return cast(Tensor, self.product.weight)


class _StockProduct(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Prepacked(Kernel):
    """oneDNN with the weight already in its blocks."""

    name = "prepacked"

    def _packed(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return _PrepackedProduct(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS), bias)

    @property
    def weight(self) -> Tensor:
        """Out of its blocks."""
        return cast(Tensor, self.product.packed).to_dense()


class _PrepackedProduct(nn.Module):
    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class HalfWeights(Kernel):
    """FBGEMM with float16 weights, widened on their way into float32 arithmetic: half the bytes to read."""

    name = "fp16w"

    def _packed(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        with fbgemm():
            return scripted(_HalfProduct(torch.ops.quantized.linear_prepack_fp16(weight, bias)))

    @property
    def weight(self) -> Tensor:
        """Widened."""
        with fbgemm():
            return cast(Tensor, torch.ops.quantized.linear_unpack_fp16(self.product.packed)[0])


class _HalfProduct(nn.Module):
    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return out


KERNELS: dict[str, tuple[type[Kernel], ...]] = {
    "fp32": (Stock, Prepacked),
    "fp16w": (HalfWeights,),
    "int8": (Int8, Int8OneDNN),
    "int4": (Int4,),
}
"""Numerics -> kernels that compute in them."""


@cache
def working(numerics: str) -> tuple[type[Kernel], ...]:
    """The kernels of these numerics that this processor and this PyTorch have, tried on a small product."""
    return tuple(kernel for kernel in KERNELS[numerics] if works(kernel))


def candidates(numerics: str) -> tuple[type[Kernel], ...]:
    """Kernels to choose from for these numerics: small layers are not worth making digits for."""
    own = working(numerics)
    return own + working("fp16w") if own and numerics == "int8" else own
