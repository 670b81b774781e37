"""Passes of the native engine: what they compute, and that their bits depend on a node's path alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product as pairs
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from draftree.errors import CacheError
from draftree.models.gguf.gguf_checks import check
from draftree.models.native.architecture import describe
from draftree.models.native.binding import LoadedModel, tiers
from draftree.models.native.header_reader import FORMATS
from tests import tiny_gguf
from tests.checkpoints import DENSE
from tests.models.native.conftest import STOCK, Dense, quantized
from tests.models.native.reference import Array, Reference
from tests.models.native.stock import CONFIGS, stock_model, write_gguf

Logits = NDArray[np.float32]
FORMAT_NAMES = sorted(GGMLQuantizationType(kind).name for kind in FORMATS)


def load(path: Path, tier: str = "", threads: int = 1) -> LoadedModel:
    return LoadedModel(describe(check(path)), threads, tier)


def extend(model: LoadedModel, row: int, tokens: list[int], parents: list[int] | None = None) -> Logits:
    """[n, V] after new nodes of one row, a chain by default."""
    parents = list(range(-1, len(tokens) - 1)) if parents is None else parents
    model.extend([row], [len(tokens)], tokens, parents, np.ones(len(tokens), np.uint8))
    return np.stack([model.logits(slot) for slot in range(len(tokens))])


def text(count: int, vocabulary: int = 96, seed: int = 1) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
    return found


def bits(logits: Logits) -> list[list[int]]:
    found: list[list[int]] = logits.view(np.uint32).tolist()
    return found


def divergence(expected: Array, found: Logits) -> float:
    """KL (nats) from the expected distributions, their mean."""
    p, q = (x - x.max(-1, keepdims=True) for x in (expected, found.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_computes_the_described_model(name: str, tmp_path: Path) -> None:
    path = write_gguf(stock_model(name), tmp_path / "model.gguf")
    model = load(path)
    found = extend(model, model.open(), text(100))
    expected = Reference(path, describe(check(path)), rounded=True).logits(text(100))
    assert divergence(expected, found) < 1e-6
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("weights", FORMAT_NAMES)
def test_a_pass_reads_weights_of_every_format(weights: str, tmp_path: Path) -> None:
    """Near the exact model, and much nearer to one whose activations are rounded in the same way."""
    path = tiny_gguf.write(tmp_path / "model.gguf", layers=1, hidden=256, heads=8, weights=weights)
    model, tokens = load(path), text(60)
    found = extend(model, model.open(), tokens)
    exact, rounded = (Reference(path, describe(check(path)), rounded=each).logits(tokens) for each in (False, True))
    assert divergence(exact, found) < 0.1
    assert divergence(rounded, found) < 2e-3
    assert (found.argmax(-1) == rounded.argmax(-1)).mean() > 0.95


@dataclass
class Groups:
    """Weights of a matrix in groups of 32: scale * code + minimum."""

    scale: NDArray[np.float32]
    codes: NDArray[np.int32]
    minimum: NDArray[np.float32] | None


def half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32)[..., 0]


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int32]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int32)


def groups_of(kind: str, packed: NDArray[np.uint8]) -> Groups:
    """Of [rows, bytes]."""
    blocks = packed.reshape(len(packed), -1, gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    if kind == "Q4_0":
        return Groups(half(blocks, 0), nibbles(blocks[..., 2:]) - 8, None)
    if kind == "Q4_1":
        return Groups(half(blocks, 0), nibbles(blocks[..., 4:]), half(blocks, 2))
    if kind == "Q8_0":
        return Groups(half(blocks, 0), blocks[..., 2:].view(np.int8).astype(np.int32), None)
    assert kind == "Q4_K"
    scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    scales, minima = (x.reshape(*blocks.shape[:2], 8).astype(np.float32) for x in (scales, minima))
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2).astype(np.int32)
    flat = len(packed), -1
    return Groups(
        (half(blocks, 0)[..., None] * scales).reshape(flat),
        codes.reshape(*flat, 32),
        (-half(blocks, 2)[..., None] * minima).reshape(flat),
    )


def fused(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """a * b + c, rounded once."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def product(weights: Groups, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows] of [columns] activations: integers inside a group, then fused multiply-adds in the order of groups."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(-1)
    values = np.rint(groups * (np.float32(127) / largest)[:, None]).astype(np.int32)
    scales = largest / np.float32(127)
    sums = np.zeros(len(weights.scale), np.float32)
    for group, (scale, column) in enumerate(zip(scales, values, strict=True)):
        inner = (weights.codes[:, group] @ column).astype(np.float32)
        sums = fused(weights.scale[:, group] * scale, inner, sums)
        if weights.minimum is not None:
            sums = fused(weights.minimum[:, group], np.full_like(sums, scale * np.float32(column.sum())), sums)
    return sums


@pytest.mark.parametrize("tier", tiers())
@pytest.mark.parametrize("weights", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_a_linear_layer_is_the_written_order_of_operations(weights: str, tier: str, tmp_path: Path) -> None:
    """The output layer, whose input is the final hidden state: equal to the last bit."""
    path = tiny_gguf.write(tmp_path / "model.gguf", hidden=256, heads=8, weights=weights)
    model = load(path, tier)
    model.track([-1])
    found = extend(model, model.open(), text(5))
    place = describe(check(path)).model_tensors[2]
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[weights]]
    rows, width = int(place["rows"]), int(place["columns"]) // size[0] * size[1]
    packed = np.fromfile(path, np.uint8, rows * width, offset=int(place["offset"])).reshape(rows, width)
    expected = np.stack([product(groups_of(weights, packed), x) for x in model.states(0, 0, 5, 1)[:, 0]])
    assert bits(found) == bits(expected)


@pytest.fixture(scope="module", params=["Q4_1", *(name for name in DENSE if name not in STOCK or name == "gemma3")])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dense: Mapping[str, Dense]) -> Path:
    """Of a model with weights in groups, and of every architecture, some with windows."""
    at = tmp_path_factory.mktemp("model") / "model.gguf"
    if request.param in dense:
        return quantized(dense[request.param].path, GGMLQuantizationType.Q8_0, at)
    return tiny_gguf.write(at, weights="Q4_1", layers=3, heads=6, kv_heads=3, hidden=192)


def one_by_one(model: LoadedModel, tokens: list[int]) -> Logits:
    row, found = model.open(), []
    for token in tokens:
        found.append(extend(model, row, [token])[0])
        model.commit(row, [0])
    model.close(row)
    return np.stack(found)


@cache
def ar_bits(path: Path, tokens: tuple[int, ...]) -> list[list[int]]:
    """Bits of the logits after each token of a text, read one by one by one thread in portable C."""
    return bits(one_by_one(load(path, "base"), list(tokens)))


def random_tree(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Tokens, and parents in any order that has them before their children."""
    random = np.random.default_rng(seed)
    return text(count, seed=seed), [int(random.integers(-1, min(i, 12)) if i else -1) for i in range(count)]


def path_of(node: int, parents: list[int]) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@pytest.mark.parametrize(("tier", "threads"), [("base", 2), *pairs(tiers()[1:], (1, 2, 3))])
def test_the_nodes_of_a_tree_have_the_bits_of_their_paths_alone(path: Path, tier: str, threads: int) -> None:
    """Below texts of several lengths, of which one ends inside a page of the cache."""
    model = load(path, tier, threads)
    for length, count in ((1, 5), (37, 20), (70, 200)):
        prompt, row = text(length), model.open()
        extend(model, row, prompt)
        model.commit(row, range(length))
        tokens, parents = random_tree(count, seed=length)
        found = extend(model, row, tokens, parents)
        for node in {0, count // 2, count - 1}:
            branch = path_of(node, parents)
            assert bits(found[branch]) == ar_bits(path, (*prompt, *(tokens[each] for each in branch)))[length:]


def test_a_text_has_the_same_bits_however_it_is_cut(path: Path) -> None:
    model, tokens = load(path), text(200)
    expected = bits(one_by_one(model, tokens))
    for sizes in ([200], [1, 199], [15, 1, 16, 168], [128, 72], [129, 71]):
        row, found = model.open(), []
        at = 0
        for size in sizes:
            found.append(extend(model, row, tokens[at : at + size]))
            model.commit(row, range(size))
            at += size
        assert bits(np.concatenate(found)) == expected


def test_rows_of_one_pass_have_the_bits_of_each_alone(path: Path) -> None:
    model = load(path)
    rows, lengths = [model.open() for _ in range(4)], [3, 90, 1, 17]
    texts = [text(n, seed=n) for n in lengths]
    tokens = [token for each in texts for token in each]
    parents = [parent for n in lengths for parent in range(-1, n - 1)]
    model.extend(rows, lengths, tokens, parents, np.ones(len(tokens), np.uint8))
    found = np.stack([model.logits(slot) for slot in range(len(tokens))])
    assert bits(found) == [row for each in texts for row in bits(one_by_one(model, each))]


def test_a_row_goes_on_from_the_path_that_was_kept(path: Path) -> None:
    model, prompt, row = load(path), text(30), 0
    row = model.open()
    extend(model, row, prompt)
    model.commit(row, range(30))
    said = prompt
    for step in range(6):
        tokens, parents = random_tree(12, seed=step)
        extend(model, row, tokens, parents)
        kept = path_of(11 - step, parents)
        model.commit(row, kept)
        said = said + [tokens[node] for node in kept]
    assert bits(extend(model, row, [5])) == bits(one_by_one(model, [*said, 5])[-1:])


def test_nodes_can_be_added_below_uncommitted_ones(path: Path) -> None:
    model, row = load(path), 0
    row = model.open()
    extend(model, row, [1, 2, 3], [-1, 0, 0])
    found = extend(model, row, [4, 5], [2, 3])
    assert bits(found) == bits(one_by_one(model, [1, 3, 4, 5])[2:])


def test_several_paths_live_on_after_a_prune(path: Path) -> None:
    model, prompt = load(path), text(20)
    row = model.open()
    extend(model, row, prompt)
    model.commit(row, range(20))
    #        0 (trunk)
    #      /   \
    #     1     2
    #     |    / \
    #     3   4   5
    extend(model, row, [10, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 2])
    model.prune(row, [0, 1, 2, 3, 5], 1)
    found = extend(model, row, [20, 21], [2, 3])  # below what were 3 and 5
    for logits, branch in zip(found, ([10, 11, 13, 20], [10, 12, 15, 21]), strict=True):
        assert bits(logits[None]) == bits(one_by_one(model, prompt + branch)[-1:])


def test_a_fork_shares_the_prefix_until_one_of_the_two_writes(path: Path) -> None:
    model, prompt = load(path), text(50)
    row = model.open()
    extend(model, row, prompt)
    model.commit(row, range(50))
    before = model.cache_bytes()
    forks = [model.fork(row, length) for length in (50, 33, 32, 0)]
    records = describe(check(path)).record_bytes  # which recurrent layers keep until the next pass
    assert (50 + 33 + 32) * records <= model.cache_bytes() - before <= 2 * (50 + 33 + 32) * records
    for fork, length in zip(forks, (50, 33, 32, 0), strict=True):
        tokens = text(20, seed=length)
        found = extend(model, fork, tokens)
        model.commit(fork, range(20))
        assert bits(found) == bits(one_by_one(model, prompt[:length] + tokens)[length:])
    assert bits(extend(model, row, [7])) == bits(one_by_one(model, [*prompt, 7])[-1:])


def test_closed_rows_give_their_memory_back(path: Path) -> None:
    model = load(path)

    def fill() -> int:
        rows = [model.open() for _ in range(5)]
        for row in rows:
            extend(model, row, text(100))
        taken = model.cache_bytes()
        for row in rows:
            model.close(row)
        return taken

    first = fill()
    assert first > 0
    assert all(fill() <= first for _ in range(5))


def test_only_wanted_nodes_have_scores(path: Path) -> None:
    model, tokens = load(path), text(10)
    row = model.open()
    model.extend([row], [10], tokens, range(-1, 9), np.array([0, 0, 1, 0, 0, 0, 0, 1, 0, 1], np.uint8))
    found = np.stack([model.logits(slot) for slot in range(3)])
    assert bits(found) == bits(one_by_one(model, tokens)[[2, 7, 9]])


def test_hidden_states_are_those_that_layers_read(path: Path) -> None:
    model, tokens = load(path), text(40)
    reference = Reference(path, describe(check(path)), rounded=True)
    layers = sorted({0, 2 * len(reference.layers) // 3, len(reference.layers)})
    model.track([*layers, -1])
    extend(model, model.open(), tokens)
    states = reference.hidden(tokens)
    expected = [states[layer] for layer in layers]
    found = list(model.states(0, 0, 40, len(layers) + 1).swapaxes(0, 1))
    for theirs, ours in zip(expected, found, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02 * np.abs(theirs).max())
    np.testing.assert_array_equal(model.states(0, 7, 2, len(found)), np.stack(found, axis=1)[7:9])


def test_a_tree_at_the_end_of_the_context_may_have_more_nodes_than_positions_are_left(tmp_path: Path) -> None:
    """Cells were counted once, and a row of 60 tokens of 64 had no tree of five nodes."""
    model = load(tiny_gguf.write(tmp_path / "model.gguf", context=64))
    row, prompt = model.open(), text(62)
    extend(model, row, prompt)
    model.commit(row, range(62))
    found = extend(model, row, list(range(20)), [-1] * 10 + list(range(10)))
    assert bits(found[[9, 19]]) == bits(one_by_one(model, [*prompt, 9, 19])[62:])
    with pytest.raises(CacheError):
        extend(model, row, [1], [19])
