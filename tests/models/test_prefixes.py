"""Rows that are kept for texts that begin as they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from draftree import Engine, SamplingParams, SchedulerParams
from draftree.errors import CacheError, UnsupportedModelError
from draftree.models.base import FINAL_STATE, Nodes, prefill
from draftree.models.native.native_model import NativeModel
from draftree.models.prefixes import PrefixCache, common_prefix

from .. import tiny_gguf
from ..toy import ToyModel


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 4], 2), ([2], [1], 0), ([1, 2], [1, 2], 2)],
)
def test_the_common_prefix_is_counted(one: list[int], other: list[int], shared: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == shared


def test_of_a_row_that_holds_more_than_its_text_only_the_text_is_used() -> None:
    """Ctrl-C between the target's commit and the request's tokens left a row that holds more than the text it was kept
    for: the next turn of a chat would have gone on behind tokens that nobody had seen."""
    model, text = ToyModel(), [i % 5 for i in range(20)]
    cache, row = PrefixCache(model, 2), prefill(model, [*text, 1])
    cache.keep(text, row)
    found = cache.find([*text, 1, 3])
    assert found.length == 20
    assert row.number == -1 and cache.lengths == []
    cache.keep([*text, 2], found)
    assert cache.lengths == [20]
    assert cache.find([*text, 3]).length == 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0")


def chat(file: Path, folder: Path, *, load: bool, states: bool = False) -> tuple[list[int], int]:
    """Ids of the second turn of a chat, and how many tokens of it are read; rows come from a folder and go there."""
    model = NativeModel(file)
    if states:
        model.track_features(FINAL_STATE)
    engine = Engine(model, scheduling=SchedulerParams(prefixes=4))
    kept, params = engine.stepper.prefixes, SamplingParams(max_tokens=8)
    if load:
        kept.load(folder)
    else:
        engine.generate([TEXT], params)
    (first,) = Engine(model).generate([TEXT], params)
    turn = [*TEXT, *first.token_ids, 5, 6, 7]
    (second,) = engine.generate([turn], params)
    kept.save(folder)
    return second.token_ids, len(turn) - second.stats.reused


TEXT = [5 + i % 11 for i in range(150)]


@pytest.mark.parametrize("states", [False, True])
def test_rows_outlive_their_process(file: Path, tmp_path: Path, states: bool) -> None:
    found, read = chat(file, tmp_path, load=False, states=states)
    assert read <= 5
    assert chat(file, tmp_path, load=True, states=states) == (found, 1)
    files = list(tmp_path.iterdir())
    assert files
    assert chat(file, tmp_path, load=True, states=not states)[1] > 5, "a row without states served one with them"
    assert set(files) <= set(tmp_path.iterdir()), "rows of another model were deleted"


def test_a_restored_row_holds_what_the_saved_one_held(file: Path) -> None:
    model, other = NativeModel(file), NativeModel(file, threads=1, tier="base")
    row = prefill(model, TEXT)
    again = other.restored(row.length, model.saved(row))
    nodes = Nodes.chain([3, 4, 5, 6], 4)
    expected = model.extend([row], [nodes]).logits(range(4))
    assert (other.extend([again], [nodes]).logits(range(4)) == expected).all()
    other.commit(again, [0, 1, 2, 3])
    assert again.length == row.length + 4
    for length, content in (
        (3, other.saved(again)),
        (again.length, other.saved(again)[:-1]),
        (-1, np.empty(0, np.uint8)),
    ):
        with pytest.raises(CacheError, match="are no row of"):
            other.restored(length, content)
    with pytest.raises(CacheError, match="a node lies beyond the longest sequence"):
        other.restored(10**6, other.saved(again))


def test_rows_that_are_kept_no_more_are_deleted(file: Path, tmp_path: Path) -> None:
    engine = Engine(NativeModel(file), scheduling=SchedulerParams(prefixes=1))
    for start in (5, 6):
        engine.generate([[start, *TEXT]], SamplingParams(max_tokens=2))
        engine.stepper.prefixes.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("how", ["empty", "torn", "flipped", "text", "tokens"])
def test_damaged_rows_are_left_out_with_a_line(
    file: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = chat(file, tmp_path, load=False)
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        if how == "flipped":
            content[-100] ^= 1
        elif how == "tokens":
            with safe_open(path, framework="numpy") as row:
                about, tokens, pages = row.metadata(), row.get_tensor("tokens")[:-1], row.get_tensor("content")
            content = bytearray(save({"tokens": tokens, "content": pages}, about))
        others = {"empty": b"", "torn": bytes(content[: len(content) // 2]), "text": b"no row" * 99}
        path.write_bytes(others.get(how, bytes(content)))
    assert chat(file, tmp_path, load=True) == (found, len(TEXT) + 8 + 3)
    lines = [record.message for record in caplog.records if "is damaged and was left out" in record.message]
    assert lines


def test_other_backends_say_that_they_keep_no_rows(tmp_path: Path) -> None:
    engine = Engine(ToyModel(40, spread=12.0, max_length=128), scheduling=SchedulerParams(prefixes=1))
    for call in (engine.stepper.prefixes.save, engine.stepper.prefixes.load):
        with pytest.raises(UnsupportedModelError, match="rows of .* cannot be written: use backend 'native'"):
            call(tmp_path)


def test_a_row_that_holds_more_than_its_text_is_written_as_its_text(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that ends inside an accepted path leaves such a row: its file held another page than its tokens need."""
    model = NativeModel(file)
    kept = PrefixCache(model, 2)
    kept.keep(TEXT[:64], prefill(model, TEXT[:70]))
    kept.save(tmp_path)
    loaded = PrefixCache(NativeModel(file), 2)
    loaded.load(tmp_path)
    assert loaded.lengths == [64] and not caplog.records
