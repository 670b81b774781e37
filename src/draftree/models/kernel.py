"""A linear layer's weights, packed for one CPU kernel: [..., in] float32 -> [..., out] float32.

A row of the result depends on its own row of the input alone, bit for bit: no kernel mixes rows, and activations are
scaled row by row. It may depend on n, and of a stock layer on its place, since rounding follows the kernel's blocking;
by how much, sets ``Int4`` apart.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_TOLERANCE = 0.02
"""Largest error of a kernel that works, relative to the largest result."""


class Kernel(ABC):
    """Packed weights, made from a weight [out, in] and a bias [out] or None.

    Attributes:
        inputs: in.
        bias: the bias.
        product: [..., in] -> [..., out], n rows in all; TorchScript can take it as a part. It is in TorchScript itself
            where the operator takes packed weights: to hand them over takes Python 10 microseconds a call.
    """

    name: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.inputs, self.bias = weight.shape[1], bias
        self.product = self._packed(weight, bias)
        self._multiply: Callable[[Tensor], Tensor] = self.product.forward

    def __call__(self, x: Tensor) -> Tensor:
        """``product``."""
        return self._multiply(x)

    @abstractmethod
    def _packed(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """``product``."""

    @property
    def weight(self) -> Tensor:
        """[out, in], as it is used: what becomes of the unit matrix, where a packed weight cannot be unpacked."""
        columns = self(torch.eye(self.inputs))
        return (columns if self.bias is None else columns - self.bias).T.contiguous()


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


def works(kernel: Callable[[Tensor, Tensor | None], Kernel]) -> bool:
    """Is it there and right, where sums of products are largest?"""
    weight = torch.linspace(-1.0, 1.0, 32 * 64).reshape(32, 64).sign()
    want = linear(weight[::4], weight)
    try:
        error = (kernel(weight, None)(weight[::4]) - want).abs().max()
    except (RuntimeError, AttributeError):
        return False
    return bool(error <= _TOLERANCE * want.max())
