"""Heads in folders: what is saved is what is loaded, and what is not for this target is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.drafters.registry import load_drafter
from draftree.errors import ConfigError, ModelFileError, RunError, UnknownNameError
from draftree.models.heads.eagle_file import SHIPPED, is_head, load_head, read_head, save_head, shipped_head
from draftree.models.heads.eagle_head import HeadConfig, HeadNetwork
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.methods import find_policy

from ..heads import DRAFTED, random_network
from ..tiny import VOCAB, tiny


@pytest.fixture
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


@pytest.fixture
def folder(target: HFModel, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", random_network(target), DRAFTED, target)
    return tmp_path / "head"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_saved_and_loaded_heads_are_equal(target: HFModel, folder: Path) -> None:
    made_for, network, vocabulary, _ = read_head(folder)
    saved = random_network(target)
    assert made_for == "tiny"
    assert network.config == saved.config
    assert torch.equal(vocabulary, DRAFTED)
    for (name, one), (other, two) in zip(saved.state_dict().items(), network.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(one.half().float(), two)  # half precision on disk
    again = folder.parent / "again"
    save_head(again, network, vocabulary, target)
    assert (again / "head.safetensors").read_bytes() == (folder / "head.safetensors").read_bytes()


def test_a_folder_is_a_drafter_by_its_path(target: HFModel, folder: Path) -> None:
    assert is_head(folder)
    drafter = load_drafter(str(folder), target, find_policy("chain", None))
    assert drafter.policy is not None
    assert load_head(folder, target).capabilities.vocab_size == target.capabilities.vocab_size


def test_a_head_in_another_precision_of_its_target_is_taken(folder: Path) -> None:
    target = HFModel(tiny().bfloat16(), self_test=False)
    assert load_head(folder, target).capabilities.dtype == "bfloat16"


def test_a_head_of_other_weights_is_refused(folder: Path) -> None:
    other = HFModel(tiny(seed=1), name="stranger", self_test=False)
    with pytest.raises(ConfigError, match="trained for tiny, and stranger's embeddings are others: train one for it"):
        load_head(folder, other)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_is_read(tied: bool) -> None:
    weights = tiny("llama")
    if tied:
        weights.lm_head.weight = weights.get_input_embeddings().weight
    ids = torch.tensor([7, 3, 7])
    found, bias = HFModel(weights, self_test=False).output_rows(ids)
    assert torch.equal(found, weights.lm_head.weight[ids])
    assert bias is None


def test_an_output_layers_bias_is_read_too() -> None:
    weights = tiny("llama")
    weights.lm_head = nn.Linear(32, VOCAB)
    bias, ids = weights.lm_head.bias.detach().clone(), torch.tensor([7, 3, 7])
    _, found = HFModel(weights, self_test=False).output_rows(ids)
    assert found is not None
    assert torch.equal(found, bias[ids])


@pytest.mark.parametrize(("what", "field"), [("hidden size", "hidden_size"), ("vocabulary size", "vocab_size")])
def test_a_head_of_another_size_is_refused(what: str, field: str, target: HFModel, tmp_path: Path) -> None:
    config = asdict(HeadConfig.like(target, 1.0)) | {field: 64}
    network = HeadNetwork(HeadConfig(**config))
    save_head(tmp_path / "head", network, DRAFTED, target)
    with pytest.raises(ConfigError, match=f"trained for tiny, {what} 64, but tiny has"):
        load_head(tmp_path / "head", target)


def _cut(folder: Path) -> None:
    path = folder / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "head.safetensors")
    del tensors[name]
    save_file(tensors, folder / "head.safetensors")


def _put(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(folder / "head.safetensors")
    save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / "head.safetensors")


def swap(folder: Path, file: str, content: bytes | None) -> None:
    """Put something else into a file's place; None: a folder."""
    (folder / file).unlink()
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_bytes(content)


def infinite(folder: Path, field: str) -> None:
    """A number that is finite only as text."""
    edit(folder, **{field: "NUMBER"})
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"NUMBER"', "1e999"))


def _list(folder: Path, tokens: list[int]) -> None:
    tensors = load_file(folder / "head.safetensors") | {"vocabulary": torch.tensor(tokens, dtype=torch.int32)}
    save_file(tensors, folder / "head.safetensors")


BAD: dict[str, Callable[[Path], object]] = {
    "truncated": _cut,
    "no weights": lambda f: (f / "head.safetensors").unlink(),
    "config cut": lambda f: (f / "config.json").write_text('{"format": "draftree-head"'),
    "newer version": lambda f: edit(f, version=2),
    "odd size": lambda f: edit(f, head_dim=7),
    "no size": lambda f: edit(f, heads=0),
    "text for a size": lambda f: edit(f, heads="4"),
    "infinite": lambda f: edit(f, rope_theta=float("inf")),
    "infinite by its exponent": lambda f: infinite(f, "norm_eps"),
    "huge": lambda f: edit(f, rope_theta=10**400),
    "other field": lambda f: edit(f, layers=2),
    "other shape": lambda f: edit(f, intermediate_size=5),
    "no object": lambda f: swap(f, "config.json", b'"draftree-head"'),
    "nested too deep": lambda f: swap(f, "config.json", b"[" * 10**5),
    "weights swapped": lambda f: swap(f, "head.safetensors", b"{}"),
    "weights a folder": lambda f: swap(f, "head.safetensors", None),
    "no finite weight": lambda f: _put(f, "down.weight", lambda x: x * float("nan")),
    "whole numbers for weights": lambda f: _put(f, "down.weight", lambda x: x.int()),
    "complex sample": lambda f: _put(f, "target_sample", lambda x: x.to(torch.complex64)),
    "no sample": lambda f: _drop(f, "target_sample"),
    "truth values for tokens": lambda f: _put(f, "vocabulary", lambda x: x.bool()),
    "table for a vocabulary": lambda f: _put(f, "vocabulary", lambda x: x[:, None]),
    "no matrix": lambda f: _drop(f, "down.weight"),
    "no vocabulary": lambda f: _drop(f, "vocabulary"),
    "empty vocabulary": lambda f: _list(f, []),
    "token twice": lambda f: _list(f, [1, 2, 2]),
    "token beyond": lambda f: _list(f, [1, 61]),
    "negative token": lambda f: _list(f, [-1, 1]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_head_is_one_line(case: str, folder: Path, target: HFModel) -> None:
    BAD[case](folder)
    assert is_head(folder)
    with pytest.raises(ModelFileError, match="cannot read the draft head .*: copy it again, or train another"):
        load_head(folder, target)


def test_a_folder_without_one_is_none(target: HFModel, tmp_path: Path) -> None:
    assert not is_head(tmp_path)
    with pytest.raises(UnknownNameError, match="no draft head in"):
        load_head(tmp_path, target)


def test_no_shipped_head_fits_another_model(target: HFModel) -> None:
    with pytest.raises(UnknownNameError, match="no draft head comes with draftree for tiny: train one"):
        shipped_head(target)


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("*/")), ids=lambda folder: folder.name)
def test_the_card_of_a_shipped_head_is_in_the_docs(folder: Path) -> None:
    card = Path(__file__).parents[2] / "docs" / f"head-{folder.name}.md"
    assert card.read_text() == (folder / "README.md").read_text()
    assert (folder / "head.safetensors").stat().st_size < 20e6


def test_a_full_disk_is_one_line(target: HFModel, folder: Path, full_disk: None) -> None:
    with pytest.raises(RunError, match="cannot write"):
        save_head(folder, random_network(target), DRAFTED, target)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "head.safetensors"]


def test_a_head_of_a_wide_float32_target_can_be_saved(tmp_path: Path) -> None:
    """The sample of its embeddings was a view of some columns, which safetensors refuses, after hours of training; with
    32 columns at most, as the tiny targets have, it was the whole."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    wide = HFModel(LlamaForCausalLM(config), name="wide", self_test=False)
    save_head(tmp_path / "head", HeadNetwork(HeadConfig.like(wide, 1.0)), torch.arange(9), wide)
    assert load_head(tmp_path / "head", wide).vocabulary.tolist() == list(range(9))
