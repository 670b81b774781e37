"""TreeCache on bare tensors: allotment, placement, compaction, copies. Every written state is a number of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.models.huggingface.cache import TreeCache, packed, padded
from draftree.models.huggingface.pass_inputs import COLUMN, GRAIN, ROW, SEEN, DeviceInputs, PassInputs, Shape

from ..references import nbytes

LAYERS, HEADS, DIM = 2, 3, 4


def states(tokens: int, first: int = 1) -> Tensor:
    """[1, HEADS, tokens, DIM] numbers from ``first`` on, all different and none of them zero."""
    return torch.arange(first, first + HEADS * tokens * DIM).reshape(1, HEADS, tokens, DIM).float()


def write(
    cache: TreeCache, first: int, starts: Sequence[int], width: int | Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """One pass: write states at ``starts`` of rows ``first``.. of each layer; values are the keys' negatives."""
    counts = [width] * len(starts) if isinstance(width, int) else list(width)
    place(cache, first, starts, counts)
    given = [states(sum(counts), 1 + 1000 * i) for i in range(LAYERS)]
    return [cache.update(keys, -keys, i) for i, keys in enumerate(given)]


def place(
    cache: TreeCache, first: int, starts: Sequence[int], counts: Sequence[int], order: Sequence[int] | None = None
) -> None:
    """Place a pass, and bring what its placement needs to the device."""
    places, at = cache.place(first, starts, counts, order or range(len(starts))), cache.placement
    table = np.zeros((SEEN + 1, places.shape[1]), np.int64)
    table[ROW : COLUMN + 1] = places
    shape = Shape(places.shape[1], at.count, at.width, at.end, 0, 1)
    inputs = DeviceInputs(torch.from_numpy(PassInputs(table, np.zeros(0, np.int64)).filled(shape)), shape)
    at.index, at.sources = inputs.index, inputs.sources


def snapshot(cache: TreeCache) -> list[tuple[Tensor, Tensor]]:
    return [(keys.clone(), values.clone()) for keys, values in storage(cache)]


def storage(cache: TreeCache) -> list[tuple[Tensor, Tensor]]:
    return [cache.of(layer) for layer in range(LAYERS)]


def test_reserve_is_exact_to_the_grain_at_first() -> None:
    cache = TreeCache()
    cache.reserve(3, 5 * GRAIN + 1)
    write(cache, 0, [0], 2)
    assert storage(cache)[0][0].shape == (3, HEADS, 6 * GRAIN, DIM)


def test_reserve_is_exact_again_as_long_as_nothing_is_written() -> None:
    cache = TreeCache()
    cache.reserve(3, 5 * GRAIN)
    cache.reserve(4, 5 * GRAIN + 1)
    write(cache, 0, [0], 2)
    assert storage(cache)[0][0].shape == (4, HEADS, 6 * GRAIN, DIM)


def test_nothing_is_allotted_before_the_first_pass() -> None:
    cache = TreeCache()
    cache.reserve(8, 1000)
    assert nbytes(cache) == 0


def test_slots_double_when_one_more_is_needed() -> None:
    cache = TreeCache()
    cache.reserve(1, 3 * GRAIN)
    write(cache, 0, [0], 2)
    cache.reserve(1, 3 * GRAIN + 1)
    assert storage(cache)[0][0].shape == (1, HEADS, 6 * GRAIN, DIM)


def test_rows_double_when_one_more_is_needed() -> None:
    cache = TreeCache()
    cache.reserve(3, GRAIN)
    write(cache, 0, [0], 2)
    cache.reserve(4, GRAIN)
    assert storage(cache)[0][0].shape == (6, HEADS, GRAIN, DIM)


@pytest.mark.parametrize(
    ("rows", "slots", "most", "allotted"),
    [
        (4, GRAIN, 6, (6, 1)),
        (4, GRAIN, 5, (4, 1)),
        (3, GRAIN + 1, 6, (3, 2)),
        (3, 3 * GRAIN, 9, (3, 3)),
        (4, 3 * GRAIN, 17, (4, 3)),
    ],
)
def test_it_does_not_double_beyond_what_its_model_may_take(
    rows: int, slots: int, most: int, allotted: tuple[int, int]
) -> None:
    """A fifth request of 9,000 tokens was admitted on a GPU, and eight rows of them did not fit beside the four."""
    cache = TreeCache(most=lambda: most * GRAIN)
    cache.reserve(3, GRAIN)
    write(cache, 0, [0], 2)
    cache.reserve(rows, slots)
    assert storage(cache)[0][0].shape == (allotted[0], HEADS, allotted[1] * GRAIN, DIM)


def test_a_demand_beyond_double_is_met_to_the_grain() -> None:
    cache = TreeCache()
    write(cache, 0, [0], 2)
    cache.reserve(5, 7 * GRAIN + 1)
    assert storage(cache)[0][0].shape == (5, HEADS, 8 * GRAIN, DIM)


def test_reserving_less_changes_nothing() -> None:
    cache = TreeCache()
    cache.reserve(4, 4 * GRAIN)
    write(cache, 0, [0], 2)
    keys = storage(cache)[0][0]
    cache.reserve(2, GRAIN)
    assert storage(cache)[0][0].data_ptr() == keys.data_ptr()


def test_growing_keeps_what_is_there() -> None:
    cache = TreeCache()
    write(cache, 0, [0, 0], 5)
    before = snapshot(cache)
    cache.reserve(9, 9 * GRAIN)
    for (keys, values), (old_keys, old_values) in zip(storage(cache), before, strict=True):
        assert torch.equal(keys[:2, :, :GRAIN], old_keys)
        assert torch.equal(values[:2, :, :GRAIN], old_values)


@pytest.mark.parametrize(
    ("rows", "slots", "most", "size"),
    [
        (2, 4, 4, (2, 6)),  # twice the slots
        (2, 5, 2, (2, 5)),  # as many as are wanted
        (3, 4, 2, (3, 4)),  # more than there may be
        (1, 6, 1, (1, 6)),  # without the other row
        (3, 1, 3, (3, 1)),  # without what lies behind the slots that are wanted
        (3, 2, 6, (4, 3)),
        (1, 2, 1, (2, 3)),  # it need not grow
    ],
)
def test_what_is_allotted_beyond_demand_keeps_within_a_bound(
    rows: int, slots: int, most: int, size: tuple[int, int]
) -> None:
    """A row of 22,000 slots doubled for one of 1,000 beside it, in a cache that had room for 24,000."""
    cache = TreeCache(most=lambda: most * slots * GRAIN)
    cache.reserve(2, 3 * GRAIN)
    write(cache, 0, [0, 0], 5)
    before = snapshot(cache)
    cache.reserve(rows, slots * GRAIN, gives_up=True)
    assert storage(cache)[0][0].shape == (size[0], HEADS, size[1] * GRAIN, DIM)
    for (keys, _), (old_keys, _) in zip(storage(cache), before, strict=True):
        assert torch.equal(keys[: min(2, rows), :, :GRAIN], old_keys[: min(2, rows), :, :GRAIN])


def test_storage_is_keys_and_values_of_all_layers() -> None:
    cache = TreeCache()
    cache.reserve(3, 2 * GRAIN)
    write(cache, 0, [0], 1)
    assert nbytes(cache) == 2 * LAYERS * 3 * HEADS * 2 * GRAIN * DIM * 4


@pytest.mark.parametrize("width", [1, 7, 33])
def test_a_cache_that_grows_holds_at_most_twice_what_its_tokens_need(width: int) -> None:
    cache = TreeCache()
    token = 2 * LAYERS * HEADS * DIM * 4
    for start in range(0, 1500, width):
        write(cache, 0, [start], width)
        if start + width >= 64:
            assert nbytes(cache) <= 2 * token * (start + width)


def test_growing_token_by_token_reallocates_a_logarithmic_number_of_times() -> None:
    cache = TreeCache()
    seen = set()
    for start in range(1500):
        write(cache, 0, [start], 1)
        seen.add(cache.placement.slots)
    assert sorted(seen) == [64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 4, 2], [4, 0, 3]], ids=["even", "uneven", "one gets none"])
@pytest.mark.parametrize("starts", [[3, 3, 3], [0, 7, 2]], ids=["uniform", "ragged"])
def test_a_pass_writes_each_row_at_its_own_start_and_nowhere_else(starts: list[int], counts: list[int]) -> None:
    cache, first = TreeCache(), 1
    cache.reserve(6, GRAIN)
    write(cache, first, starts, counts)
    for i, (keys, values) in enumerate(storage(cache)):
        given = states(sum(counts), 1 + 1000 * i)[0].split(counts, dim=1)
        wanted = torch.zeros_like(keys)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            wanted[first + b, :, start : start + count] = given[b]
        assert torch.equal(keys, wanted)
        assert torch.equal(values, -wanted)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 0]], ids=["as they lie", "another", "some"])
@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 3, 2]], ids=["even", "uneven"])
def test_what_is_padded_is_packed_again(order: list[int], counts: list[int]) -> None:
    cache, counts = TreeCache(), [n if b in order else 0 for b, n in enumerate(counts)]
    place(cache, 0, [5, 5, 5], counts, order)
    at, given = cache.placement, states(sum(counts))
    lines = padded(given, at.count, at.sources)
    for b, own in zip(order, given.split([counts[b] for b in order], dim=2), strict=True):
        assert torch.equal(lines[b, :, : counts[b]], own[0])
    assert torch.equal(packed(lines.transpose(1, 2), at.index), given.transpose(1, 2))


@pytest.mark.parametrize("starts", [[3, 3], [0, 7]], ids=["uniform", "ragged"])
def test_a_pass_sees_its_rows_up_to_the_last_new_slot(starts: list[int]) -> None:
    cache = TreeCache()
    cache.reserve(5, GRAIN)
    seen = write(cache, 2, starts, 4)
    for (keys, values), (all_keys, all_values) in zip(seen, storage(cache), strict=True):
        assert torch.equal(keys, all_keys[2:4, :, : max(starts) + 4])
        assert torch.equal(values, all_values[2:4, :, : max(starts) + 4])


def test_a_pass_gets_views_and_no_copies() -> None:
    cache = TreeCache()
    (keys, values), _ = write(cache, 0, [0, 5], 3)
    assert keys.data_ptr() == storage(cache)[0][0].data_ptr()
    assert values.data_ptr() == storage(cache)[0][1].data_ptr()


def test_each_token_has_a_row_a_slot_and_a_column() -> None:
    cache = TreeCache()
    place(cache, 0, [4, 6], [3, 2])
    assert cache.placement.index is not None
    assert cache.placement.index.tolist() == [[0, 0, 0, 1, 1], [4, 5, 6, 6, 7], [0, 1, 2, 0, 1]]


def test_place_makes_room_for_the_pass() -> None:
    cache = TreeCache()
    cache.place(2, [GRAIN - 1, 0], [2, 2], [0, 1])
    assert (cache.placement.rows, cache.placement.slots) == (4, 2 * GRAIN)


def test_the_mask_covers_all_slots_that_the_pass_sees() -> None:
    cache = TreeCache()
    cache.place(0, [2, 9], [4, 4], [0, 1])
    assert cache.get_mask_sizes(4, 0) == (13, 0)
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize(
    "path",
    [[1, 3, 4], [0, 2, 5], [0, 1, 2], [5], []],
    ids=["all move", "some move", "none moves", "one", "nothing"],
)
def test_compact_moves_the_accepted_slots_to_the_front(path: list[int]) -> None:
    cache, start = TreeCache(), 10
    write(cache, 0, [0, 0], start + 6)
    before = snapshot(cache)
    cache.compact(1, start, path)
    for now, old in zip(_flat(storage(cache)), _flat(before), strict=True):
        for i, p in enumerate(path):
            assert torch.equal(now[1, :, start + i], old[1, :, start + p])


def _flat(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [states for pair in pairs for states in pair]


def test_a_cache_that_follows_another_keeps_states_of_a_kind_together() -> None:
    """Compaction, growth and copies are then one operation for all layers, and give what those layer by layer give."""
    caches, sizes = [TreeCache()], [GRAIN, 2 * GRAIN]
    write(caches[0], 0, [0, 0], 3)
    caches += [TreeCache(caches[0]), TreeCache(TreeCache(caches[0]))]
    for cache in caches[1:]:
        write(cache, 0, [0, 0], 3)
    assert [len(cache.blocks) for cache in caches] == [2 * LAYERS, 1, 1]
    for cache in caches:
        cache.compact(1, 0, [0, 2])
        cache.copy_row(1, 2, 2)
        cache.reserve(3, sizes[1])
    assert len({nbytes(cache) for cache in caches}) == 1
    for cache in caches[1:]:
        for now, old in zip(_flat(storage(cache)), _flat(storage(caches[0])), strict=True):
            assert torch.equal(now, old)


def test_layers_of_other_sizes_take_no_more_than_they_need() -> None:
    wide = torch.ones(1, HEADS, 2, 2 * DIM)

    def written(former: TreeCache | None) -> TreeCache:
        cache = TreeCache(former)
        place(cache, 0, [0], [2])
        for layer, (keys, values) in enumerate(((states(2), states(2)), (states(2), wide), (wide, wide))):
            found = cache.update(keys, layer + values, layer)
            assert torch.equal(found[0], keys) and torch.equal(found[1], layer + values)
        return cache

    first = written(None)
    again = written(first)
    assert (len(first.blocks), len(again.blocks)) == (6, 2)
    assert nbytes(first) == nbytes(again)


def test_compact_touches_only_the_slots_that_the_path_fills() -> None:
    cache, start, path = TreeCache(), 10, [0, 3, 5]
    write(cache, 0, [0, 0, 0], start + 6)
    before = snapshot(cache)
    cache.compact(1, start, path)
    for now, old in zip(_flat(storage(cache)), _flat(before), strict=True):
        changed = (now != old).any(3).any(1).nonzero().tolist()
        assert changed == [[1, start + 1], [1, start + 2]]


def test_copy_row_copies_the_first_slots_and_no_more() -> None:
    cache = TreeCache()
    write(cache, 0, [0, 0, 0], 9)
    before = snapshot(cache)
    cache.copy_row(2, 0, 5)
    for now, old in zip(_flat(storage(cache)), _flat(before), strict=True):
        assert torch.equal(now[0, :, :5], old[2, :, :5])
        assert torch.equal(now[0, :, 5:], old[0, :, 5:])
        assert torch.equal(now[1:], old[1:])


def test_copy_row_makes_room_for_a_new_row() -> None:
    cache = TreeCache()
    write(cache, 0, [0], 9)
    cache.copy_row(0, 1, 9)
    for held in _flat(storage(cache)):
        assert torch.equal(held[1, :, :9], held[0, :, :9])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written yet reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
def test_storage_never_contains_nan() -> None:
    """Masked slots take part in 0 x value, and 0 x NaN is NaN."""
    cache = TreeCache()
    write(cache, 0, [0, 6], 3)
    cache.reserve(5, 3 * GRAIN)
    cache.copy_row(1, 4, 9)
    assert not any(held.isnan().any() for held in _flat(storage(cache)))
