"""Heads in the user's data folder: found by the weights of their target, whatever it is called, and by nothing else."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import DraftreeWarning, RunError, UnknownNameError
from draftree.models.heads import head_folder, own_heads
from draftree.models.heads.eagle_network import save_head
from draftree.models.heads.head_folder import head_for
from draftree.models.heads.head_format import WEIGHTS, EagleConfig
from draftree.models.heads.own_heads import named_head, own_head_for
from draftree.models.native.native_model import NativeModel
from draftree.train.head_architectures import new_eagle

from ..tiny_gguf import write
from ..toy import ToyModel


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(own_heads, "heads_folder", lambda: tmp_path / "heads")
    return tmp_path / "heads"


def model(path: Path, **chosen: Any) -> NativeModel:
    return NativeModel(write(path, layers=1, **chosen), threads=1)


@pytest.fixture
def target(tmp_path: Path) -> NativeModel:
    return model(tmp_path / "a model.gguf")


def save(target: NativeModel, folder: Path) -> Path:
    vocabulary = torch.arange(0, target.capabilities.vocab_size, 2)
    save_head(folder, new_eagle(EagleConfig.like(target), 0), vocabulary, target)
    return folder


def test_a_head_is_for_the_weights_that_it_was_made_for(target: NativeModel, tmp_path: Path) -> None:
    folder = save(target, own_head_for(target))
    assert folder.name == f"a-model-{target.capabilities.fingerprint}"
    copy = shutil.copy(tmp_path / "a model.gguf", tmp_path / "copy.gguf")
    assert head_for(NativeModel(copy, threads=1)) == head_for(target) == folder
    quantized = model(tmp_path / "quantized.gguf", weights="Q8_0")
    assert own_head_for(quantized).name != folder.name and head_for(quantized) == folder
    assert head_for(model(tmp_path / "other.gguf", seed=1)) is head_for(ToyModel(20)) is None


def test_another_model_under_the_same_name_has_another_head(target: NativeModel, tmp_path: Path) -> None:
    folder = save(target, own_head_for(target))
    other = model(tmp_path / "a model.gguf", seed=1)
    assert other.capabilities.name == target.capabilities.name
    assert head_for(other) is None and own_head_for(other) != folder
    assert head_for(target) == folder == save(target, own_head_for(target))


def test_the_head_for_these_very_weights_comes_first_and_that_of_others_last(
    target: NativeModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = model(tmp_path / "a.gguf", weights="Q8_0")
    own, shipped = save(quantized, own_head_for(quantized)), save(target, tmp_path / "shipped")
    monkeypatch.setattr(head_folder, "shipped", lambda pattern: [shipped])
    assert (head_for(target), head_for(quantized)) == (shipped, own)


def test_the_head_for_these_very_weights_is_found_by_any_name_of_their_file(
    target: NativeModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before one that ships, and before one for other weights whose folder comes first in the alphabet."""
    quantized = model(tmp_path / "a.gguf", weights="Q8_0")
    save(target, tmp_path / "shipped")
    monkeypatch.setattr(head_folder, "shipped", lambda pattern: [tmp_path / "shipped"])
    heads = {path: save(model, own_head_for(model)) for path, model in (("a model", target), ("a", quantized))}
    for path, head in heads.items():
        renamed = NativeModel(shutil.copy(tmp_path / f"{path}.gguf", tmp_path / "z.gguf"), threads=1)
        assert head_for(renamed) == own_head_for(renamed) == head
    assert len(own_heads.own_heads()) == 2


def test_a_training_that_was_left_hides_no_head_for_the_same_weights(target: NativeModel, data: Path) -> None:
    (data / f"a-{target.capabilities.fingerprint}" / "work").mkdir(parents=True)
    folder = save(target, data / f"b-{target.capabilities.fingerprint}")
    assert head_for(target) == folder


def test_a_head_without_a_sample_of_its_target_is_for_its_very_weights(target: NativeModel, tmp_path: Path) -> None:
    """Heads of the kind EAGLE-3 have none, and models of one family have equal sizes."""
    folder = save(target, own_head_for(target))
    tensors = load_file(folder / WEIGHTS)
    del tensors["target_sample"]
    save_file(tensors, folder / WEIGHTS)
    assert head_for(target) == folder
    assert head_for(NativeModel(shutil.copy(tmp_path / "a model.gguf", tmp_path / "z.gguf"), threads=1)) == folder
    assert (
        head_for(model(tmp_path / "other.gguf", seed=1)) is head_for(model(tmp_path / "q.gguf", weights="Q8_0")) is None
    )


@pytest.mark.parametrize(("file", "kept", "said"), [("config.json", 9, 0), (WEIGHTS, 1000, 1), ("config.json", 0, 0)])
def test_a_damaged_head_is_left_out_with_a_line(target: NativeModel, file: str, kept: int, said: int) -> None:
    folder = save(target, own_head_for(target))
    (folder / file).write_bytes((folder / file).read_bytes()[:kept])
    head_folder._warn.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert head_for(target) is head_for(target) is None
    lines = [str(each.message) for each in found if each.category is DraftreeWarning]
    assert len(lines) == said and all(folder.name in line and "\n" not in line for line in lines)


def test_a_head_is_replaced_as_a_whole(target: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two files of which both change leaves no head rather than a mixture."""
    folder, replaced = save(target, own_head_for(target)), Path.replace

    def killed(part: Path, path: Path) -> Path:
        if path.name != WEIGHTS:
            raise KeyboardInterrupt
        return replaced(part, path)

    monkeypatch.setattr(Path, "replace", killed)
    network = new_eagle(EagleConfig.like(target, embedding_scale=2.0), 1)
    with pytest.raises(KeyboardInterrupt):
        save_head(folder, network, torch.arange(9), target)
    assert head_for(target) is None


def test_a_full_disk_leaves_the_head_that_is_there(
    target: NativeModel, data: Path, request: pytest.FixtureRequest
) -> None:
    folder = save(target, own_head_for(target))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    request.getfixturevalue("full_disk")
    with pytest.raises(RunError):
        save_head(folder, new_eagle(EagleConfig.like(target, embedding_scale=2.0), 1), torch.arange(9), target)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_drafts_beside_a_model_of_another_vocabulary_and_changes_nothing(
    target: NativeModel, temperature: float
) -> None:
    save(target, own_head_for(target))
    prompts, params = ["the cat in the hat", "a b c"], SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    engine = Engine(target, SpeculationParams(drafter="lookup+head+smollm2", method="static"))
    found, alone = engine.generate(prompts, params), Engine(target).generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert sum(sum(each.stats.drafted) for each in found) > 0


def test_heads_are_named_by_what_tells_them_apart(data: Path) -> None:
    for name in ("ab-1", "ab-12", "b-3"):
        (data / name).mkdir(parents=True)
    assert [named_head(name).name for name in ("b", "ab-1", "ab-12")] == ["b-3", "ab-1", "ab-12"]
    for name in ("a", "c", ""):
        with pytest.raises(UnknownNameError):
            named_head(name)
    assert named_head("x", [data / "xy"]) == data / "xy"
