"""The border of C: wrong numbers are errors by name, after which the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftree.errors import CacheError, ConfigError, ModelFileError, NotNativeError
from draftree.models.gguf.gguf_checks import check
from draftree.models.native import binding
from draftree.models.native.architecture import describe
from draftree.models.native.binding import LoadedModel
from tests import tiny_gguf
from tests.models.native.test_passes import bits, extend, load, one_by_one, text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "model.gguf", weights="Q4_0", context=64)


def _extend(rows: list[int], counts: list[int], tokens: list[int], parents: list[int]) -> Callable[[LoadedModel], None]:
    return lambda model: model.extend(rows, counts, tokens, parents, np.ones(len(tokens), np.uint8))


WRONG: dict[str, Callable[[LoadedModel], object]] = {
    "no such row": _extend([7], [1], [1], [-1]),
    "negative row": _extend([-1], [1], [1], [-1]),
    "a row twice": _extend([0, 0], [1, 1], [1, 1], [-1, -1]),
    "a second row that is closed": _extend([0, 3], [1, 1], [1, 1], [-1, -1]),
    "a token past the vocabulary": _extend([0], [1], [10**6], [-1]),
    "a negative token": _extend([0], [1], [-1], [-1]),
    "a parent after its child": _extend([0], [2], [1, 2], [3, -1]),
    "its own parent": _extend([0], [1], [1], [2]),
    "a parent before the last token": _extend([0], [1], [1], [-2]),
    "a node past the context": _extend([0], [60], [1] * 60, [-1, *range(2, 61)]),
    "numbers that do not go together": _extend([0], [2], [1], [-1]),
    "a negative count": _extend([0], [-1], [], []),
    "a path of a node that is not there": lambda model: model.commit(0, [2]),
    "a path that begins below a node": lambda model: model.commit(0, [1]),
    "a path backwards": lambda model: model.commit(0, [1, 0]),
    "a path of a closed row": lambda model: model.commit(5, []),
    "a prune out of order": lambda model: model.prune(0, [1, 0], 0),
    "a prune that leaves a child alone": lambda model: model.prune(0, [1], 0),
    "a trunk that is longer than what is kept": lambda model: model.prune(0, [0], 2),
    "a negative trunk": lambda model: model.prune(0, [0], -1),
    "a fork of more than there is": lambda model: model.fork(0, 11),
    "a fork of less than nothing": lambda model: model.fork(0, -1),
    "a fork of a closed row": lambda model: model.fork(4, 0),
    "a row that is closed twice": lambda model: model.close(1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_changes_nothing(call: Callable[[LoadedModel], object], path: Path) -> None:
    """A row of ten committed tokens and two nodes, a child of the other; row 1 is closed."""
    model = load(path)
    row, other = model.open(), model.open()
    model.close(other)
    extend(model, row, text(10))
    model.commit(row, range(10))
    extend(model, row, [8, 9])
    with pytest.raises((CacheError, RuntimeError)):
        call(model)
    assert bits(extend(model, row, [3], [1])) == bits(one_by_one(model, [*text(10), 8, 9, 3])[-1:])


@pytest.mark.parametrize("call", ["argmax", "top", "log_probabilities", "logits", "states"])
def test_scores_of_slots_that_are_not_there_are_an_error(call: str, path: Path) -> None:
    model = load(path)
    extend(model, model.open(), [1, 2])
    calls: dict[str, Callable[[int], object]] = {
        "argmax": lambda slot: model.argmax([0, slot]),
        "top": lambda slot: model.top([slot], 3),
        "log_probabilities": lambda slot: model.log_probabilities([slot], [1]),
        "logits": model.logits,
        "states": lambda cell: model.states(0, cell, 1, 0),
    }
    for slot in (-1, 2):
        with pytest.raises((CacheError, RuntimeError)):
            calls[call](slot)


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "VERSION", "0")
    binding.open_library.cache_clear()
    with pytest.raises(ConfigError, match="version"):
        binding.open_library()


def test_without_a_library_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "LIBRARY", tmp_path / "none.so")
    binding.open_library.cache_clear()
    with pytest.raises(NotNativeError, match="not built"):
        binding.open_library()


def test_the_header_and_the_binding_are_of_one_version() -> None:
    header = (Path(__file__).parents[3] / "native" / "draftree.h").read_text()
    assert f'#define DRAFTREE_VERSION "{binding.VERSION}"' in header


def test_an_instruction_set_that_the_cpu_lacks_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="avx1024"):
        load(path, tier="avx1024")


def test_a_file_that_ends_early_is_refused(path: Path) -> None:
    description = describe(check(path))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError):
        LoadedModel(description, 1)


def test_loading_reports_progress_and_can_be_stopped(path: Path) -> None:
    seen: list[float] = []
    LoadedModel(describe(check(path)), 1, progress=seen.append)
    assert seen == sorted(seen) and 0 <= seen[0] <= seen[-1] <= 1

    def stop(done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LoadedModel(describe(check(path)), 1, progress=stop)


def test_top_gives_each_token_once_where_a_mask_leaves_fewer(path: Path) -> None:
    """Those that are left out come last, in their order."""
    model = load(path)
    extend(model, model.open(), [1])
    edits, allowed = binding.CEdits(), [200, 3, 77]
    mask = np.zeros((model.vocabulary + 31) // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    edits.set("mask_of", np.zeros(1, np.int32))
    edits.set("masks", mask[None])
    tokens, logprobs, _ = model.top([0], 8, edits)
    assert sorted(tokens[0, :3].tolist()) == sorted(allowed)
    assert tokens[0, 3:].tolist() == [0, 1, 2, 4, 5]
    assert np.isneginf(logprobs[0, 3:]).all() and np.isclose(np.exp(logprobs[0, :3]).sum(), 1)
