"""Models whose rows cannot branch: whatever rows do, the logits are one-token decoding's, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from draftree.errors import CacheError, NoTreesError
from draftree.models.base import LanguageModel, Nodes, decoded, prefill
from draftree.models.llama import linear_model
from draftree.models.llama.context import Context
from draftree.models.llama.linear_model import LinearModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.loading import load_llama
from draftree.models.measuring import Grid, measure
from draftree.models.prefixes import WORTHWHILE, PrefixCache
from draftree.tree import ROOT, Floats

from ... import tiny_gguf
from ..linear_walk import walk

VOCAB = 256
ROUNDING = 1e-3
"""Of logits, whose standard deviation is above 3; other tokens move them by 1 and more."""
KINDS = ("mamba", "lfm2")
Loader = Callable[[], LinearModel]


@pytest.fixture(scope="module", params=KINDS)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    path = tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", architecture=request.param)

    def made() -> LinearModel:
        model = load_llama(str(path), threads=1)
        assert isinstance(model, LinearModel)
        return model

    return made


@pytest.fixture(scope="module")
def reference(load: Loader) -> LinearModel:
    """Decodes one token at a time, one row at a time."""
    return load()


def by_one_token(reference: LinearModel, ids: Sequence[int]) -> Floats:
    """[V] logits after ``ids``, fed one by one."""
    row = reference.open()
    logits: Floats = decoded(reference, row, ids)[-1]
    reference.close(row)
    return logits


def text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_it_is_a_model_that_cannot_branch(load: Loader) -> None:
    model = load()
    can = model.capabilities
    assert isinstance(model, LanguageModel)
    assert "recurrent state" in can.no_trees and can.row_bytes > 0
    assert (can.slot_bytes > 0) == (can.architecture == "lfm2")
    with pytest.raises(NoTreesError, match="draft trees"):
        LlamaModel(model.weights)


@pytest.mark.parametrize("context", [2, 3, 7])
def test_a_model_of_short_texts_decodes(tmp_path: Path, context: int) -> None:
    """What it takes was measured over eight tokens: one that takes fewer ended in an error."""
    model = load_llama(str(tiny_gguf.write(tmp_path / "tiny.gguf", architecture="lfm2", context=context)), threads=1)
    assert isinstance(model, LinearModel) and model.capabilities.slot_bytes > 0
    prefill(model, [5] * context)


def test_whatever_rows_do_logits_are_those_of_one_token_decoding(
    load: Loader, reference: LinearModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts grow."""
    monkeypatch.setattr(linear_model, "FIRST_CELLS", 256)
    model, grown = load(), set[tuple[int, int]]()
    checked = walk(
        model,
        lambda ids: by_one_token(reference, ids),
        steps=70,
        prompts=(60, 150),
        rounding=ROUNDING,
        after=lambda: grown.add((model._context.cells, model._context.sequences)),
    )
    assert checked > 15 and len({cells for cells, _ in grown}) > 1
    assert max(sequences for _, sequences in grown) > 2


def test_a_pass_that_fails_loses_nothing(load: Loader, reference: LinearModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed the states of some rows: all of them are read anew."""
    model, ids = load(), text(3, 20)
    row, decode = prefill(model, ids), Context.decode

    def failing(context: Context, *given: object) -> None:
        decode(context, *given)  # type: ignore[arg-type]
        raise CacheError("it fails")

    with monkeypatch.context() as broken:
        broken.setattr(Context, "decode", failing)
        with pytest.raises(CacheError, match="it fails"):
            model.extend([row], [Nodes.chain([7])])
    found = model.extend([row], [Nodes.chain([9])]).logits([0])[0]
    assert np.abs(found - by_one_token(reference, [*ids, 9])).max() < ROUNDING


def test_trees_are_refused_and_change_nothing(load: Loader, reference: LinearModel) -> None:
    model = load()
    row = prefill(model, [1, 2])
    for parents in ([ROOT, ROOT], [0, 1], [ROOT, 0, 0]):
        with pytest.raises(CacheError, match="no trees"):
            model.extend([row], [Nodes([*range(len(parents))], parents)])
    with pytest.raises(CacheError, match="longest"):
        model.extend([row], [Nodes.chain([5] * model.capabilities.max_length)])
    found = model.extend([row], [Nodes.chain([9])]).logits([0])[0]
    assert np.abs(found - by_one_token(reference, [1, 2, 9])).max() < ROUNDING
    model.close(row)
    with pytest.raises(CacheError, match="closed"):
        model.extend([row], [Nodes.chain([1])])


def test_states_count_as_memory(load: Loader) -> None:
    model = load()
    model.cache_bytes = 2 * model.capabilities.row_bytes + 768 * model.capabilities.slot_bytes
    assert model.holds([300, 300]) and not model.holds([300, 300, 300])
    if model.capabilities.slot_bytes:
        assert not model.holds([300, 500])
        row = prefill(model, text(1, 700))
        with pytest.raises(CacheError, match=f" {model.cache_bytes} "):
            model.extend([row], [Nodes.chain(text(2, 700))])


def test_a_row_behind_closed_ones_gets_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context has a state for each id up to the highest: what is left over of closed rows keeps nothing from it."""
    path = str(tiny_gguf.write(tmp_path / "tiny.gguf", architecture="lfm2"))
    reference = load_llama(path, threads=1)
    monkeypatch.setattr(linear_model, "FIRST_CELLS", 256)
    model = load_llama(path, threads=1)
    assert isinstance(model, LinearModel) and isinstance(reference, LinearModel)
    model.cache_bytes = 2 * model.capabilities.row_bytes + 768 * model.capabilities.slot_bytes
    assert model.holds([100, 100, 100]) and model.holds([768])
    *closed, row = [prefill(model, text(seed, 100)) for seed in range(3)]
    for other in closed:
        model.close(other)
    found = model.extend([row], [Nodes.chain(text(9, 668), wanted=1)]).logits([0])[0]
    assert np.abs(found - by_one_token(reference, text(2, 100) + text(9, 668))).max() < ROUNDING
    assert (model._context.cells, model._context.sequences) == (768, 1)
    model.close(row)


def test_kept_rows_are_used_whole_or_not(load: Loader) -> None:
    model, ids = load(), text(5, 3 * WORTHWHILE)
    prefixes = PrefixCache(model, 2)
    prefixes.keep(ids, prefill(model, ids))
    for other in (ids[:-2], [*ids[:-1], 300], ids):  # its last token is read for what follows it
        row = prefixes.find(other)
        assert row.length == 0
        model.close(row)
    assert prefixes.find([*ids, 1, 2]).length == len(ids)
    assert prefixes.lengths == []
    live = prefill(model, ids)
    assert prefixes.find([*ids, 3], [(ids, live)]).length == len(ids)


def test_passes_over_one_token_are_measured(load: Loader) -> None:
    model = load()
    profile = measure(model, Grid((1, 2, 4), (4, 4000), (1, 2), 2))
    assert [(point.batch, point.sizes) for point in profile.points] == [(b, (1,)) for b in (1, 1, 2, 2)]
    assert model.rows == 0
