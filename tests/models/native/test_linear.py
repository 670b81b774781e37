"""Weight formats and linear layers of the native engine: equal to the bit to ``gguf`` and to a reference in NumPy."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_uint16, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from native import build
from tests.models.native import sanitizer

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
GROUP, TILE = 32, 16


class _Kernels(ctypes.Structure):
    """linear.h: LinearKernels."""

    _fields_ = (
        ("quantize", ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_int, c_int64, c_int64, c_void_p)),
        ("multiply", ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
    )


class _Tier(ctypes.Structure):
    """cpu.h: Tier."""

    _fields_ = (("name", c_char_p), ("linear", ctypes.POINTER(_Kernels)), ("vector", c_void_p))


class _Matrix(ctypes.Structure):
    """formats.h: PackedMatrix."""

    _fields_ = (
        ("format", c_int),
        ("rows", c_int64),
        ("columns", c_int64),
        ("tile_bytes", c_size_t),
        ("tiles", c_void_p),
    )


class _Activations(ctypes.Structure):
    """linear.h: Activations."""

    _fields_ = (("count", c_int), ("values", c_void_p), ("stride", c_int64), ("groups", c_void_p))


class _Exports(ctypes.Structure):
    """native/check/exports.c."""

    _fields_ = (
        ("format_row_bytes", ctypes.CFUNCTYPE(c_size_t, c_int, c_int64)),
        ("format_decode_row", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_int64, c_void_p)),
        ("packed_tile_bytes", ctypes.CFUNCTYPE(c_size_t, c_int, c_int64)),
        ("pack_tile", ctypes.CFUNCTYPE(None, c_int, c_int64, c_void_p, c_size_t, c_int, c_void_p)),
        ("fp16_to_fp32", ctypes.CFUNCTYPE(c_float, c_uint16)),
        ("fp32_to_fp16", ctypes.CFUNCTYPE(c_uint16, c_float)),
        ("activation_bytes", ctypes.CFUNCTYPE(c_size_t, c_int, c_int64)),
        ("tier_at", ctypes.CFUNCTYPE(ctypes.POINTER(_Tier), c_int)),
    )


@dataclass(frozen=True)
class Library:
    """The kernels of this CPU by name, and what is the same for all."""

    exports: Any
    kernels: dict[str, Any]


@dataclass(frozen=True)
class Format:
    """Where a block of a file has what.

    Attributes:
        scale: its float16 scale.
        minimum: its float16 minimum; None: there is none.
        ones: bytes that make all of its codes stand for 1.
        scales: "groups": the scale is a group's; "blocks": times an integer for each 32 inputs; "halves": for each 16.
    """

    kind: Kind
    scales: str
    scale: int
    minimum: int | None
    ones: dict[tuple[int, int], int]


FORMATS = [
    Format(Kind.Q4_0, "groups", 0, None, {(2, 18): 0x99}),
    Format(Kind.Q4_1, "groups", 0, 2, {(4, 20): 0x11}),
    Format(Kind.Q5_0, "groups", 0, None, {(2, 6): 0xFF, (6, 22): 0x11}),
    Format(Kind.Q5_1, "groups", 0, 2, {(4, 8): 0, (8, 24): 0x11}),
    Format(Kind.Q8_0, "groups", 0, None, {(2, 34): 1}),
    Format(Kind.Q2_K, "halves", 80, 82, {(16, 80): 0x55}),
    Format(Kind.Q3_K, "halves", 108, None, {(0, 32): 0xFF, (32, 96): 0x55}),
    Format(Kind.Q4_K, "blocks", 0, 2, {(16, 144): 0x11}),
    Format(Kind.Q5_K, "blocks", 0, 2, {(16, 48): 0, (48, 176): 0x11}),
    Format(Kind.Q6_K, "halves", 208, None, {(0, 128): 0x11, (128, 192): 0xAA}),
    Format(Kind.IQ4_NL, "groups", 0, None, {(2, 18): 0x88}),
    Format(Kind.IQ4_XS, "blocks", 0, None, {(8, 136): 0x88}),
]
KINDS = [*(each.kind for each in FORMATS), Kind.F16, Kind.BF16, Kind.F32]


@pytest.fixture(scope="module")
def compiler() -> build.Compiler:
    found = build.find_compiler()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.fixture(scope="module")
def library(compiler: build.Compiler, tmp_path_factory: pytest.TempPathFactory) -> Library:
    def load(*more: build.Unit) -> ctypes.CDLL:
        output = tmp_path_factory.mktemp("linear") / "kernels.so"
        units = build.units(compiler, *build.KERNELS, "check/exports.c")
        return ctypes.CDLL(str(build.link(output, compiler, [*units, *more], "-shared")))

    exports = _Exports.in_dll(load(), "exports")
    kernels = {}
    for index in range(9):
        if not (tier := exports.tier_at(index)):
            break
        kernels[tier.contents.name.decode()] = tier.contents.linear.contents
    if "avx512-vnni" in kernels and "avx-vnni" not in kernels:
        flags = (*build.TIERS["x86_64"]["avx512"], "-include", str(build.SOURCES / "check" / "vnni_by_avx512.h"))
        vnni = load(build.Unit(build.SOURCES / "linear_avx2.c", flags))
        kernels["avx-vnni"] = _Kernels.in_dll(vnni, "vnni_by_avx512")
    return Library(exports, kernels)


def random_rows(kind: Kind, rows: int, columns: int) -> Bytes:
    """[rows, bytes] of a file, with finite scales."""
    rng = np.random.default_rng([int(kind), columns])
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return gguf.quantize(rng.normal(size=(rows, columns)).astype(np.float32), kind).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * columns // inputs, size), dtype=np.uint8)
    form = next(each for each in FORMATS if each.kind == kind)
    for place in (form.scale, form.minimum):
        if place is not None:
            numbers = rng.uniform(-1, 1, (len(blocks), 1)).astype(np.float16)
            blocks[:, place : place + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


def edited(
    form: Format, rows: Bytes, scale: float | None = None, minimum: float | None = None, ones: bool = False
) -> Floats:
    """[rows, columns] that ``gguf`` reads where some fields have other values."""
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[form.kind][1]).copy()
    for place, value in ((form.scale, scale), (form.minimum, minimum)):
        if place is not None and value is not None:
            blocks[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)
    for (first, last), code in form.ones.items() if ones else ():
        blocks[:, first:last] = code
    return gguf.dequantize(blocks.reshape(rows.shape), form.kind)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: the product is exact in float64, the sum is rounded to odd, then to float32."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    part = total - product
    rest = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    odd = np.where((rest > 0) == (total > 0), bits + 1, bits - 1)
    return np.where((rest != 0) & (bits % 2 == 0), odd, bits).view(np.float64).astype(np.float32)


def quantized(x: Floats) -> tuple[Integers, Floats]:
    """Activations as int8 [columns, groups, 32] and their scales [columns, groups]."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest >= np.float32(1e-30), np.float32(127) / largest, np.float32(0))
    return np.rint(groups * inverse[..., None]).astype(np.int64), largest / np.float32(127)


def expected(form: Format, rows: Bytes, x: Floats) -> Floats:
    """[columns, rows]: integers inside a group, then fused multiply-adds of groups in order."""
    values, activation_scales = quantized(x)
    shape = (len(rows), -1, 2, GROUP // 2)
    products = np.einsum("rghi,cghi->gcrh", weights_of(form, rows).reshape(shape), values.reshape(len(x), *shape[1:]))
    factors = edited(form, rows, scale=1, minimum=0, ones=True).reshape(shape)[..., 0]
    scale = edited(form, rows, minimum=0, ones=True).reshape(shape)[..., 0, 0]
    if form.scales == "halves":
        products = products * factors.transpose(1, 0, 2)[:, None].astype(np.int64)
        scale = super_scale(form, rows, form.scale)
    minus = -values.reshape(len(x), *shape[1:]).sum(-1)
    y = np.zeros((len(x), len(rows)), np.float32)
    for g in range(values.shape[1]):
        activation = activation_scales[:, g, None]
        y = fma(scale[:, g] * activation, products[g].sum(-1).astype(np.float32), y)
        if form.minimum is None:
            continue
        if form.scales == "halves":
            minima = -edited(form, rows, scale=0, minimum=1).reshape(shape)[:, g, :, 0].astype(np.int64)
            minimum = super_scale(form, rows, form.minimum)[:, g]
            y = fma(minimum * activation, (minus[:, g] @ minima.T).astype(np.float32), y)
        else:
            minimum = edited(form, rows, scale=0).reshape(shape)[:, g, 0, 0]
            y = fma(minimum[None], activation * -minus[:, g].sum(-1, keepdims=True).astype(np.float32), y)
    return y


def weights_of(form: Format, rows: Bytes) -> Integers:
    """[rows, columns]: codes less their zero; where an integer scale is 0 any code will do."""
    products = edited(form, rows, scale=1, minimum=0).astype(np.int64)
    factors = edited(form, rows, scale=1, minimum=0, ones=True).astype(np.int64)
    return products // np.where(factors == 0, 1, factors)


def super_scale(form: Format, rows: Bytes, place: int) -> Floats:
    """[rows, groups]: a float16 of each super-block."""
    blocks = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[form.kind][1])
    numbers = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]
    return np.repeat(numbers.astype(np.float32), 8, axis=1)


def multiplied(library: Library, kernels: Any, kind: Kind, rows: Bytes, x: Floats) -> Floats:
    """[columns, whole tiles], as the engine computes it."""
    exports, columns = library.exports, x.shape[1]
    tiles, tile_bytes = -(-len(rows) // TILE), exports.packed_tile_bytes(kind, columns)
    packed = np.full((tiles, tile_bytes), 0xAA, np.uint8)
    for tile, first in enumerate(range(0, len(rows), TILE)):
        part = np.ascontiguousarray(rows[first : first + TILE])
        exports.pack_tile(kind, columns, part.ctypes.data, rows.shape[1], len(part), packed[tile].ctypes.data)
    groups = np.empty(exports.activation_bytes(len(x), columns // GROUP * GROUP), np.uint8)
    kernels.quantize(x.ctypes.data, columns, columns, len(x), 0, columns // GROUP, groups.ctypes.data)
    matrix = _Matrix(kind, len(rows), columns, tile_bytes, packed.ctypes.data)
    activations = _Activations(len(x), x.ctypes.data, columns, groups.ctypes.data)
    y = np.full((len(x), tiles * TILE), np.nan, np.float32)
    kernels.multiply(ctypes.byref(matrix), 0, tiles, ctypes.byref(activations), y.ctypes.data, y.shape[1])
    return y


def assert_bits(found: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def activations(count: int, columns: int) -> Floats:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, columns)).astype(np.float32)
    x[:, :GROUP] = 0
    x[:, GROUP : 2 * GROUP] *= np.float32(1e-34)
    return x


def test_the_tiers_of_this_cpu_are_in_the_library(library: Library) -> None:
    assert next(iter(library.kernels)) == "base"
    if platform.machine() == "x86_64" and "avx2" in Path("/proc/cpuinfo").read_text():
        assert "avx2" in library.kernels


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.kind.name)
def test_quantized_layers_compute_the_written_sum(form: Format, library: Library) -> None:
    columns, count = 768, 5
    rows, x = random_rows(form.kind, 19, columns), activations(count, columns)
    reference = expected(form, rows, x)
    for kernels in library.kernels.values():
        found = multiplied(library, kernels, form.kind, rows, x)
        assert_bits(found[:, :19], reference)
        np.testing.assert_array_equal(found[:, 19:], 0)
    exact = x.astype(np.float64) @ gguf.dequantize(rows, form.kind).T
    assert np.abs(reference - exact).max() < 0.02 * np.abs(exact).max()


def test_activations_that_are_no_numbers_hide_no_others(library: Library) -> None:
    """A NaN took the place of the largest value of its lane, by the width of the instruction set."""
    rows, x = random_rows(Kind.Q8_0, 19, 768), activations(5, 768)
    draws = np.random.default_rng(3)
    x[draws.random(x.shape) < 0.1] = 1e20
    x[draws.random(x.shape) < 0.2] = np.nan
    reference = multiplied(library, library.kernels["base"], Kind.Q8_0, rows, x)
    assert np.isfinite(reference).all()
    for kernels in library.kernels.values():
        assert_bits(multiplied(library, kernels, Kind.Q8_0, rows, x), reference)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_float_layers_are_one_chain_of_fused_multiply_adds(kind: Kind, library: Library) -> None:
    columns = 70
    rows, x = random_rows(kind, 19, columns), activations(7, columns)
    weights, reference = gguf.dequantize(rows, kind).reshape(19, columns), np.zeros((7, 19), np.float32)
    for i in range(columns):
        reference = fma(weights[None, :, i], x[:, i, None], reference)
    for kernels in library.kernels.values():
        assert_bits(multiplied(library, kernels, kind, rows, x)[:, :19], reference)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_decode_as_gguf_reads_them(kind: Kind, library: Library) -> None:
    """Random bytes: any scale, infinite and NaN too."""
    columns = 4096
    size = library.exports.format_row_bytes(kind, columns)
    source = np.random.default_rng(int(kind)).integers(0, 256, size, dtype=np.uint8)
    found = np.empty(columns, np.float32)
    library.exports.format_decode_row(kind, source.ctypes.data, columns, found.ctypes.data)
    with np.errstate(all="ignore"):
        reference = gguf.dequantize(source, kind).astype(np.float32)
    same = (found.view(np.uint32) == reference.view(np.uint32)) | (np.isnan(found) & np.isnan(reference))
    assert same.all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_packed_weights_take_little_more_than_the_file(kind: Kind, library: Library) -> None:
    for columns in (768, 8960):
        size = TILE * library.exports.format_row_bytes(kind, columns)
        assert size <= library.exports.packed_tile_bytes(kind, columns) <= 1.06 * size


def test_rows_that_a_format_cannot_have_take_no_bytes(library: Library) -> None:
    for kind in KINDS:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert library.exports.format_row_bytes(kind, 3 * block) == 3 * size
        assert library.exports.format_row_bytes(kind, 0) == library.exports.format_row_bytes(kind, -block) == 0
        if block > 1:
            assert library.exports.format_row_bytes(kind, block + 1) == 0
    for unknown in {*range(-3, 50)} - {*map(int, KINDS)}:
        assert library.exports.format_row_bytes(unknown, 256) == 0


def test_float16_is_ieees(library: Library) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.array([library.exports.fp16_to_fp32(int(half)) for half in halves], np.float32)
    reference = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(floats, reference)
    finite = reference[np.isfinite(reference)]
    ties = ((finite + np.roll(finite, 1)) / 2).astype(np.float32)
    numbers = np.concatenate([finite, ties, np.nextafter(ties, np.float32(9)), [65519, 65520, 1e9, -np.inf, 3e-8]])
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float16).view(np.uint16)
    assert [library.exports.fp32_to_fp16(float(number)) for number in numbers] == rounded.tolist()
    assert np.isnan(np.uint16(library.exports.fp32_to_fp16(np.nan)).view(np.float16))


def run_check(program: Path, *before: str) -> list[str]:
    """Run ``check_linear``; the instruction sets whose digests it printed, which are the same for each format."""
    done = subprocess.run([*before, program], check=True, capture_output=True, text=True)  # noqa: S603 - our own program
    digests: dict[tuple[str, str], str] = {}
    for line in done.stdout.splitlines():
        kind, tier, digests[kind, tier] = line.split()
    tiers = list(dict.fromkeys(tier for _, tier in digests))
    assert len(digests) == len(tiers) * (len(KINDS) + 2)  # and delta nets of two sizes
    different = [(kind, tier) for (kind, tier), found in digests.items() if found != digests[kind, tiers[0]]]
    assert not different
    return tiers


def test_every_tier_equals_the_portable_one_and_stays_inside_of_its_memory(library: Library, tmp_path: Path) -> None:
    tiers = run_check(sanitizer.link(tmp_path / "check", files=build.CHECK))
    assert set(library.kernels) - set(tiers) <= {"avx-vnni"}


@pytest.mark.qemu
def test_neon_equals_the_portable_kernels(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    command = shutil.which("aarch64-linux-gnu-gcc")
    if emulator is None or command is None:
        pytest.skip("no qemu-aarch64 or no aarch64-linux-gnu-gcc (Debian: qemu-user-static, gcc-aarch64-linux-gnu)")
    compiler = build.Compiler((command,), "aarch64", "linux")
    units = [
        unit._replace(flags=(*unit.flags, "-O1")) for unit in build.units(compiler, *build.CHECK)
    ]  # compiles sooner
    program = build.link(tmp_path / "check", compiler, units, "-static")
    assert run_check(program, emulator) == ["base", "neon"]
