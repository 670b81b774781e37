"""Kernels: right, each row by itself whatever its neighbours hold, and there or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from draftree.models.cpu import kernels
from draftree.models.cpu import kernels as whole
from draftree.models.cpu.kernels import KERNELS, Int4, Int8, Int8OneDNN, Kernel, _digits, working, works

HERE = [kernel for weight_format in KERNELS for kernel in working(weight_format)]
"""What this processor has; ``load`` falls back on these where one is missing."""
SHAPES = [(32, 61), (64, 32), (576, 192)]
ERROR = {"stock": 1e-5, "prepacked": 1e-5, "fp16w": 1e-2, "int8": 0.1, "int8-onednn": 0.1, "int4": 0.4}
"""Largest, for weights and activations of standard deviation 1 / sqrt(in) and 1."""

every = pytest.mark.parametrize("kernel", HERE, ids=lambda k: k.name)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def made(kernel: type[Kernel], inputs: int, outputs: int, bias: bool = False) -> tuple[Any, Tensor, Tensor | None]:
    noise = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn((outputs, inputs), generator=noise) / inputs**0.5
    shift = torch.randn(outputs, generator=noise) if bias else None
    return kernel.packed_for(weight, shift), weight, shift


def rows(n: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn((n, inputs), generator=torch.Generator().manual_seed(seed))


@every
@shapes
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_a_linear_layer(kernel: type[Kernel], shape: tuple[int, int], bias: bool) -> None:
    layer, weight, shift = made(kernel, *shape, bias)
    for n in (1, 2, 7, 33):
        x = rows(n, shape[0])
        error = (layer(x) - linear(x, weight, shift)).abs().max()
        assert error <= ERROR[kernel.name]


@every
@shapes
@pytest.mark.parametrize("n", [2, 3, 5, 8, 17, 40])
def test_a_row_does_not_depend_on_what_its_neighbours_hold(
    kernel: type[Kernel], shape: tuple[int, int], n: int
) -> None:
    """Per-tensor activation scales fail this: a large neighbour would coarsen the row's own digits."""
    layer, _, _ = made(kernel, *shape)
    x = rows(n, shape[0])
    before = layer(x)
    for kept in range(n):
        others = rows(n, shape[0], seed=1) * 100
        others[kept] = x[kept]
        assert torch.equal(layer(others)[kept], before[kept])


@every
@shapes
def test_a_row_does_not_depend_on_its_place(kernel: type[Kernel], shape: tuple[int, int]) -> None:
    """PyTorch's own linear is a library's, whose blocks end where two threads meet: there it is rounding."""
    layer, _, _ = made(kernel, *shape)
    x, order = rows(9, shape[0]), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x[order]), layer(x)[order], rtol=0, atol=2e-6 if kernel is kernels.Stock else 0)


@pytest.mark.parametrize("kernel", [Int8, Int8OneDNN], ids=lambda k: k.name)
@shapes
def test_products_of_whole_numbers_do_not_depend_on_the_number_of_rows(
    kernel: type[Kernel], shape: tuple[int, int]
) -> None:
    layer, _, _ = made(kernel, *shape)
    x = rows(40, shape[0])
    whole = layer(x)
    for n in (1, 2, 3, 4, 7, 8, 16, 33):
        assert torch.equal(layer(x[:n].clone()), whole[:n])


@every
def test_rows_of_zeros_give_the_bias(kernel: type[Kernel]) -> None:
    layer, _, bias = made(kernel, 32, 61, bias=True)
    assert bias is not None
    assert torch.equal(layer(torch.zeros(3, 32)), bias.expand(3, -1))


@every
@shapes
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_can_be_had_again(kernel: type[Kernel], shape: tuple[int, int], bias: bool) -> None:
    """And what is made of it computes the same, but for a rounding of the second kind where the first had one."""
    layer, weight, shift = made(kernel, *shape, bias)
    again = kernel.weight_of(layer)
    assert again.shape == weight.shape
    assert (again - weight).abs().max() <= {"fp16w": 1e-3, "int4": 0.1}.get(kernel.name, 1e-2) * weight.abs().max()
    x = rows(5, shape[0])
    assert (linear(x, again, shift) - layer(x)).abs().max() <= (0.05 if kernel is Int4 else 0.02)
    if kernel in (kernels.Stock, kernels.Prepacked):
        assert torch.equal(again, weight)


@pytest.mark.parametrize("inputs", [32, 576, 40])
def test_weights_of_four_bits_in_groups_are_kept(inputs: int) -> None:
    """As GGUF's Q4_1 has them; scales and least values here are numbers of bfloat16."""
    noise = torch.Generator().manual_seed(inputs)
    whole = torch.randint(0, 16, (48, -(-inputs // 32), 32), generator=noise).float()
    whole[..., 0], whole[..., 1] = 0, 15
    scales = 2.0 ** torch.randint(-6, -2, (48, whole.shape[1], 1), generator=noise)
    weight = ((whole - 8) * scales).flatten(1)[:, :inputs]
    if inputs % 32:
        weight[:, 32:34] = torch.tensor([-1.0, 0.875])  # the zeros that it is filled up with lie between
        weight[:, 34:] = 0.125
    x = torch.randint(-8, 9, (6, inputs), generator=noise).float()
    want, got = linear(x, weight), Int4(weight, None)(x)
    assert ((got - want).abs() <= want.abs() / 128 + 1e-5).all(), "more than the rounding of results to bfloat16"


def test_parts_of_a_large_weight_are_packed_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    entire, weight, _ = made(Int4, 64, 333)
    monkeypatch.setattr(whole, "_AT_ONCE", 64 * 70)
    assert torch.equal(Int4(weight, None)(rows(3, 64)), entire(rows(3, 64)))


@pytest.mark.parametrize("kernel", [Int8, Int8OneDNN], ids=lambda k: k.name)
def test_activations_are_as_fine_as_two_digits(kernel: Any) -> None:
    """Against one digit, whose noise made the ids of a tree pass and of AR decoding differ."""
    made(kernel, 32, 61)
    weight = (torch.randint(-127, 128, (61, 32), generator=torch.Generator().manual_seed(0)) / 127).float()
    weight[:, 0] = 1  # the scales are 1 / 127: weights lose nothing
    x = rows(8, 32)
    largest = _digits(kernel)[0]
    bound = x.abs().amax(-1) / largest / (4 * largest) * weight.abs().sum(1).max() * 1.01 + 1e-5
    error = (kernel(weight, None)(x) - linear(x, weight)).abs().amax(-1)
    assert (error <= bound).all()


@pytest.mark.parametrize("kernel", [Int8, Int8OneDNN], ids=lambda k: k.name)
def test_processors_that_saturate_get_smaller_digits(kernel: type[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    made(kernel, 32, 61)
    monkeypatch.setattr(whole, "works", lambda made: made.keywords["digits"][0] < 127 and works(made))
    _digits.cache_clear()
    try:
        x, weight = rows(5, 64), rows(32, 64, seed=4) / 8
        layer = kernel(weight, None)
        assert (layer(x) - linear(x, weight)).abs().max() <= ERROR[kernel.name]
        assert layer.largest == 63
    finally:
        _digits.cache_clear()


def test_a_kernel_that_is_wrong_or_not_there_does_not_work() -> None:
    class Wrong(kernels.Stock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.1

    class Absent(kernels.Stock):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.ops.quantized.there_is_no_such_kernel(x)
            return out

    assert works(kernels.Stock)
    assert not works(Wrong)
    assert not works(Absent)


def test_int8_layers_may_be_faster_in_float16_but_only_where_there_is_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, tuple[type[Kernel], ...]] = {
        "fp32": (kernels.Stock,),
        "fp16w": (kernels.HalfWeights,),
        "int8": (Int8,),
    }
    monkeypatch.setattr(kernels, "working", found.__getitem__)
    assert [kernels.candidates(weight_format) for weight_format in found] == [
        (kernels.Stock,),
        (kernels.HalfWeights,),
        (Int8, kernels.HalfWeights),
    ]
    found["int8"] = ()
    assert kernels.candidates("int8") == ()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor of floats that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("kernel", [k for k in HERE if k in (Int4, Int8, Int8OneDNN)], ids=lambda k: k.name)
def test_a_large_weight_is_made_whole_numbers_piece_by_piece(kernel: type[Kernel]) -> None:
    """Three float32 copies of the output layer at once were a third of the memory of the model's first load."""
    weight = torch.randn((12000, 512), generator=torch.Generator().manual_seed(0))
    with Largest() as made:  # type: ignore[no-untyped-call]
        layer = kernel.packed_for(weight, None)
    assert 0 < made.nbytes <= weight.nbytes / 5
    x = rows(3, 512) / 512**0.5
    assert (layer(x) - linear(x, weight)).abs().max() <= ERROR[kernel.name]
