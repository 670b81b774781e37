"""Cells of llama.cpp's contexts: never more than the cache may take, and as many as before where memory ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from draftree.errors import CacheFullError
from draftree.models.base import Nodes, Row, prefill, prefill_scored
from draftree.models.llama import linear_model, llama_model
from draftree.models.llama.linear_model import LinearModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.loading import load_llama

from ... import tiny_gguf

VOCAB, FIRST = 256, 256
ROUNDING = 1e-3
Model = LlamaModel | LinearModel


@pytest.fixture(scope="module", params=["llama", "lfm2", "mamba"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = "Q8_0" if request.param == "llama" else "F32"
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", architecture=request.param, weights=weights)


@pytest.fixture(scope="module")
def reference(path: Path) -> Model:
    return load_llama(str(path), threads=1)


@pytest.fixture
def model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Its contexts begin small."""
    for module in (linear_model, llama_model):
        monkeypatch.setattr(module, "FIRST_CELLS", FIRST)
    return load_llama(str(path), threads=1)


def text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def check(model: Model, reference: Model, row: Row, ids: list[int]) -> None:
    """A row holds these tokens: what follows another one is what the reference finds."""
    found = model.extend([row], [Nodes.chain([9])]).logits([0])
    model.commit(row, [])
    other, scores = prefill_scored(reference, [*ids, 9])
    assert np.abs(found - scores.logits([0])).max() < ROUNDING
    reference.close(other)


def test_what_is_allotted_never_exceeds_the_cache(model: Model, reference: Model) -> None:
    """Rows open, grow, fork and close at random, as far as ``holds`` allows: all of them find room."""
    can, rng, sizes = model.capabilities, Random(3), list[tuple[int, int]]()
    model.cache_bytes = 3 * can.row_bytes + (1280 if can.row_bytes else 1380) * can.slot_bytes
    rows = list[tuple[Row, list[int]]]()
    for _ in range(120):
        act, more = rng.choice(["open", "reserve", "extend", "extend", "fork", "close"]), rng.randint(1, 400)
        lengths, at = [row.length for row, _ in rows], rng.randrange(len(rows) or 1)
        if act == "open" and model.holds([*lengths, more]):
            ids = text(rng.randrange(99), more)
            rows.append((prefill(model, ids), ids))
        elif act == "reserve" and model.holds([*lengths, 1]):
            model.reserve(len(rows) + 1, more)
        elif rows and act == "extend" and lengths[at] + more < can.max_length:
            row, ids = rows[at]
            if not model.holds([*lengths[:at], lengths[at] + more, *lengths[at + 1 :]]):
                continue
            new = text(rng.randrange(99), more)
            model.extend([row], [Nodes.chain(new, wanted=1)])
            model.commit(row, range(more))
            ids += new
        elif rows and act == "fork" and model.holds([*lengths, lengths[at]]):
            row, ids = rows[at]
            rows.append((model.fork(row), [*ids]))
        elif rows and act == "close":
            model.close(rows.pop(at)[0])
        context = model._context
        assert context.cells * can.slot_bytes + context.sequences * can.row_bytes <= model.cache_bytes
        sizes.append((context.cells, context.sequences))
    assert max(cells for cells, _ in sizes) > 2 * FIRST
    if can.row_bytes:
        assert {sequences for _, sequences in sizes} >= {2, 3}
    if can.row_bytes and can.slot_bytes:
        cells = [cells for cells, _ in sizes]
        assert any(now < before for before, now in zip(cells[:-1], cells[1:], strict=True)), "states take its place"
    model.cache_bytes *= 2
    for row, ids in rows:
        check(model, reference, row, ids)


def grown(model: Model, row: Row) -> None:
    model.extend([row], [Nodes.chain(text(2, 100))])


def opened(model: Model, row: Row) -> None:
    prefill(model, text(2, 200))


@pytest.mark.parametrize("act", [grown, opened])
def test_where_memory_ends_the_cache_is_full_and_nothing_is_lost(
    model: Model, reference: Model, act: Callable[[Model, Row], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former context was gone by then: each call that followed ended in an AttributeError, ``close`` included."""
    ids, library, refused = text(1, 200), model.weights.library, list[bool]()
    row, make = prefill(model, ids), library.init_from_model
    size = model._context.cells, model._context.sequences

    def failing_once(*given: object) -> object:
        if refused:
            return make(*given)
        refused.append(True)
        return None

    with monkeypatch.context() as patch, pytest.raises(CacheFullError):
        patch.setattr(library, "init_from_model", failing_once)
        act(model, row)
    assert refused and (model._context.cells, model._context.sequences) == size
    assert model.rows == 1 and not row.parents
    check(model, reference, row, ids)
    act(model, row)
    assert model._context.cells > size[0]
    model.close(row)


def test_rows_that_the_cache_has_no_room_for_are_not_reserved(model: Model, reference: Model) -> None:
    """A request that takes over a row was counted twice, and ended in an error."""
    can, ids = model.capabilities, text(1, 200)
    row, context = prefill(model, ids), model._context
    model.cache_bytes = size = context.cells * can.slot_bytes + context.sequences * can.row_bytes
    model.reserve(9, 100)
    assert model._context.cells * can.slot_bytes + model._context.sequences * can.row_bytes <= size
    check(model, reference, row, ids)
