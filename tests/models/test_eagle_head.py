"""Heads that are trained here, in folders: what is saved is loaded, and what is not for this target is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.drafters.registry import load_drafter
from draftree.errors import ConfigError, ModelFileError, RunError, UnknownNameError
from draftree.models.heads.eagle_network import save_head
from draftree.models.heads.head_folder import SHIPPED, find_head, load_head, load_head_for
from draftree.models.heads.head_format import EagleConfig
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.model_files import shipped
from draftree.policies.methods import find_policy
from draftree.train.head_architectures import new_eagle

from ..heads import DRAFTED, random_network
from ..published import eagle_head
from ..tiny import VOCAB, tiny


@pytest.fixture
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


@pytest.fixture
def folder(target: HFModel, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", random_network(target), DRAFTED, target)
    return tmp_path / "head"


def test_saved_and_loaded_heads_are_equal(target: HFModel, folder: Path) -> None:
    head, saved = find_head(folder), random_network(target)
    assert head is not None
    network, vocabulary = head.network(head.arrays(target.layers))
    assert (head.target, head.kind) == ("tiny", "eagle")
    assert torch.equal(vocabulary, DRAFTED)
    for (name, one), (other, two) in zip(saved.state_dict().items(), network.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(one.half(), two)  # half precision on disk
    again = folder.parent / "again"
    save_head(again, network, vocabulary, target)
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (folder / file).read_bytes()


def test_a_packed_heads_matrices_are_those_of_q4_1(target: HFModel, folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path / "packed", random_network(target), DRAFTED, target, packed=True)
    heads = [find_head(at) for at in (folder, tmp_path / "packed")]
    whole, packed = (head.tensors() for head in heads if head is not None)
    assert whole.keys() == packed.keys()
    small = 0
    for name, values in whole.items():
        is_packed = values.ndim == 2 and values.shape[1] % 32 == 0 and name != "target_sample"
        blocks = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.Q4_1) if is_packed else None
        wanted = values if blocks is None else gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
        assert np.array_equal(packed[name], wanted), name
        small += is_packed
    assert small >= 7


@pytest.mark.parametrize("damage", ["a byte short", "other numbers"])
def test_damaged_packed_matrices_are_one_line(damage: str, target: HFModel, tmp_path: Path) -> None:
    save_head(tmp_path / "head", random_network(target), DRAFTED, target, packed=True)
    tensors = load_file(file := tmp_path / "head" / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".q4_1"))
    tensors[name] = tensors[name][:, :-1].contiguous() if damage == "a byte short" else torch.ones(3, 7)
    save_file(tensors, file)
    with pytest.raises(ModelFileError, match="draft head"):
        load_head(tmp_path / "head", target)


def test_what_it_predicts_is_what_was_trained(target: HFModel, folder: Path) -> None:
    """Embeddings are weighed as in training."""
    read, states = eagle_head(folder, target).network, torch.randn(2, 5, 32)
    assert torch.allclose(read.read(states, states), random_network(target).read(states, states), atol=1e-2)


def test_a_folder_is_a_drafter_by_its_path(target: HFModel, folder: Path) -> None:
    assert find_head(folder)
    drafter = load_drafter(str(folder), target, find_policy("chain", None))
    assert drafter.policy is not None
    assert load_head(folder, target).capabilities.vocab_size == target.capabilities.vocab_size


def test_a_head_in_another_precision_of_its_target_is_taken(folder: Path) -> None:
    target = HFModel(tiny().bfloat16(), self_test=False)
    assert load_head(folder, target).capabilities.dtype == "bfloat16"


def test_a_head_of_other_weights_is_refused(folder: Path) -> None:
    other = HFModel(tiny(seed=1), name="stranger", self_test=False)
    with pytest.raises(ConfigError, match="tiny, .*head stranger"):
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


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _put(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / "model.safetensors")


BAD: dict[str, Callable[[Path], object]] = {
    "complex sample": lambda f: _put(f, "target_sample", lambda x: x.to(torch.complex64)),
    "sample without numbers": lambda f: _put(f, "target_sample", lambda x: x * float("nan")),
    "weights swapped": lambda f: (f / "model.safetensors").write_bytes(b"{}"),
    "no finite weight": lambda f: _put(f, "layers.0.mlp.down_proj.weight", lambda x: x * float("nan")),
    "token beyond": lambda f: _put(f, "d2t", lambda x: x + 60),
    "infinite scale": lambda f: _edit(f, embedding_scale=float("inf")),
    "scale of 0": lambda f: _edit(f, embedding_scale=0.0),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_head_is_one_line(case: str, folder: Path, target: HFModel) -> None:
    BAD[case](folder)
    assert find_head(folder)
    with pytest.raises(ModelFileError, match=f"draft head {folder}: "):
        load_head(folder, target)


def test_a_folder_without_one_is_none(target: HFModel, tmp_path: Path) -> None:
    assert find_head(tmp_path) is None
    with pytest.raises(UnknownNameError, match="head in"):
        load_head(tmp_path, target)


def test_no_shipped_head_fits_another_model(target: HFModel) -> None:
    with pytest.raises(UnknownNameError, match="for tiny"):
        load_head_for(target)


@pytest.mark.parametrize("folder", shipped(SHIPPED), ids=lambda folder: folder.name)
def test_the_card_of_a_shipped_head_is_in_the_docs(folder: Path) -> None:
    card = Path(__file__).parents[2] / "docs" / f"head-{folder.name}.md"
    assert card.read_text() == (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_size < 20e6


def test_a_full_disk_is_one_line(target: HFModel, folder: Path, full_disk: None) -> None:
    with pytest.raises(RunError, match="cannot write"):
        save_head(folder, random_network(target), DRAFTED, target)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_head_of_a_wide_float32_target_can_be_saved(tmp_path: Path) -> None:
    """The sample of its embeddings was a view of some columns, which safetensors refuses, after hours of training; with
    32 columns at most, as the tiny targets have, it was the whole."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    wide = HFModel(LlamaForCausalLM(config), name="wide", self_test=False)
    save_head(tmp_path / "head", new_eagle(EagleConfig.like(wide), 0), torch.arange(9), wide)
    assert eagle_head(tmp_path / "head", wide).vocabulary.tolist() == list(range(9))
