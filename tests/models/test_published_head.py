"""Folders of published heads: what they are, for which target, and what is wrong with them, in one line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.cli.main import run
from draftree.errors import ConfigError, DraftreeWarning, ModelFileError, UnsupportedModelError
from draftree.models.base import FINAL_STATE
from draftree.models.heads.head_folder import find_head
from draftree.models.huggingface.hf_model import HFModel

from ..published import KINDS, Recipe, eagle_head, saved
from ..tiny import tiny
from ..toy import ToyFeatureModel, ToyModel

Captured = pytest.CaptureFixture[str]
MIDLAYER = "midlayer"


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of a config; None leaves one out."""
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def put(folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change a tensor; None leaves it out."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    old = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(old).contiguous()}, path)


def described(folder: Path) -> dict[str, str]:
    head = find_head(folder)
    assert head is not None
    return head.describe()


def deep(layers: int) -> HFModel:
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4
    )
    return HFModel(LlamaForCausalLM(config), name="deep", self_test=False)


@pytest.mark.parametrize(
    ("style", "ids", "wanted"),
    [
        (MIDLAYER, (1, 3, 6), (2, 4, 7)),  # what layers give
        (MIDLAYER, (2, 4, 5), (2, 4, 5)),  # what layers read
        (MIDLAYER, (4, 6, 8), (4, 6, 8)),  # with what the last one gives
        (MIDLAYER, None, (2, 4, 5)),
        ("speculators", (1, 3, 6), (1, 3, 6)),
        ("speculators", None, (2, 4, 5)),
    ],
)
def test_layers_are_counted_as_the_file_counts_them(
    style: str, ids: tuple[int, ...] | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    head = eagle_head(Recipe(ids=ids).save(tmp_path, style), deep(8))
    assert head.features.layers == wanted


def test_ids_at_the_top_of_a_config_count_too(tmp_path: Path) -> None:
    folder = Recipe(ids=None).save(tmp_path, MIDLAYER)
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 1, 2])
    assert eagle_head(folder, deep(8)).features.layers == (2, 2, 3)


def test_a_head_that_reads_no_layers_reads_the_final_state(target: HFModel, tmp_path: Path) -> None:
    folder = Recipe(ids=None, states=1).save(tmp_path, MIDLAYER)
    edit(folder, eagle_config={"use_aux_hidden_state": False})
    assert eagle_head(folder, target).features == FINAL_STATE
    put(folder, "fc.weight", None)
    head = eagle_head(folder, target)
    states = torch.randn(3, 32)
    assert torch.equal(head.fused(states), states)


def test_a_norm_of_each_state_has_two_names(target: HFModel, tmp_path: Path) -> None:
    folder = Recipe(flags={"fc_norm": True}).save(tmp_path)
    named = eagle_head(folder, target).capabilities.fingerprint
    edit(folder, fc_norm=None, use_aux_norm=True)
    assert eagle_head(folder, target).capabilities.fingerprint == named


@pytest.mark.parametrize("d2t", [True, False])
@pytest.mark.parametrize("t2d", [True, False])
def test_one_map_of_the_vocabulary_is_enough(d2t: bool, t2d: bool, target: HFModel, tmp_path: Path) -> None:
    folder = Recipe(drafted=(3, 4, 9, 60)).save(tmp_path)
    for name, there in (("d2t", d2t), ("t2d", t2d)):
        if not there:
            put(folder, name, None)
    if d2t or t2d:
        assert eagle_head(folder, target).vocabulary.tolist() == [3, 4, 9, 60]
    else:
        with pytest.raises(ModelFileError, match="4 of 61 tokens .*d2t"):
            eagle_head(folder, target)


def test_names_of_other_writers_are_the_same_tensors(target: HFModel, tmp_path: Path) -> None:
    folder = Recipe(flags={"fc_norm": True}).save(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"model.{k}" if k != "lm_head.weight" else k: v for k, v in tensors.items()}
    renamed["draft_id_to_target_id"] = renamed.pop("model.d2t")
    renamed |= {"verifier_norm.weight": torch.ones(32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(renamed, folder / "model.safetensors")
    assert eagle_head(folder, target).vocabulary.tolist() == list(range(0, 61, 2))


def test_tensors_that_it_does_not_use_cost_a_warning(target: HFModel, tmp_path: Path) -> None:
    folder = Recipe().save(tmp_path)
    save_file(load_file(folder / "model.safetensors") | {"mask_hidden": torch.ones(1)}, folder / "model.safetensors")
    with pytest.warns(DraftreeWarning, match=r"1 tensor \(mask_hidden\)"):
        eagle_head(folder, target)


def test_weights_may_lie_in_several_files(target: HFModel, tmp_path: Path) -> None:
    folder = Recipe().save(tmp_path)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    save_file(dict(tensors[:5]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[5:]), folder / "model-00002-of-00002.safetensors")
    assert eagle_head(folder, target).capabilities.parameters > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_of_tensors_is_read_without_trust(kind: str, target: HFModel, tmp_path: Path) -> None:
    recipe = KINDS[kind]
    style = "speculators" if recipe.kind == "eagle3" else MIDLAYER
    assert find_head(recipe.save(tmp_path, style, pickled=True))
    safe = eagle_head(saved(recipe, tmp_path / "safe"), target).capabilities.fingerprint
    assert eagle_head(tmp_path, target).capabilities.fingerprint == safe


def test_eagle_1_is_told_from_a_model_by_its_tensors(tmp_path: Path, model: str) -> None:
    head = find_head(KINDS["eagle"].save(tmp_path / "head", MIDLAYER))
    assert head is not None
    assert head.kind == "eagle"
    assert find_head(Path(model)) is None
    named = Recipe().save(tmp_path / "named", MIDLAYER)
    edit(named, architectures=["LlamaForCausalLM"], draft_vocab_size=None, eagle_config=None)
    head = find_head(named)
    assert head is not None
    assert head.kind == "eagle3"


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3ForCausalLMEagle3", "Eagle3Speculator"]
)
def test_kinds_are_known_by_their_architecture(architecture: str, tmp_path: Path) -> None:
    folder = Recipe().save(tmp_path, MIDLAYER)
    edit(folder, architectures=[architecture], draft_vocab_size=None)
    assert find_head(folder)


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._place),)


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Harm(folder / "harmed")}))


def _saved_with_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.ones(3), "more": Harm(folder / "harmed")}, folder / "pytorch_model.bin")


def _without(folder: Path, *names: str) -> None:
    for name in names:
        put(folder, name, None)


def _without_distances(folder: Path) -> None:
    put(folder, "d2t", None)
    put(folder, "t2d", lambda x: ~x)


def _layers(folder: Path, **changes: Any) -> None:
    edit(
        folder,
        transformer_layer_config=json.loads((folder / "config.json").read_text())["transformer_layer_config"] | changes,
    )


BAD: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "truncated": (_cut, ModelFileError, "draft head"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ModelFileError, "no weights"),
    "pickle of code": (_pickled, ModelFileError, "may be code"),
    "pickle of tensors and code": (_saved_with_code, ModelFileError, "may be code"),
    "tensors missing": (
        lambda f: _without(f, "norm.weight", "layers.0.self_attn.k_proj.weight"),
        ModelFileError,
        r"lacks 2 tensors \(layers.0.self_attn.k_proj.weight, norm.weight\)",
    ),
    "no fc": (lambda f: put(f, "fc.weight", None), ModelFileError, r"lacks 1 tensor \(fc.weight\)"),
    "no output layer": (lambda f: put(f, "lm_head.weight", None), ModelFileError, r"lacks 1 tensor \(lm_head.weight\)"),
    "wrong shape": (
        lambda f: put(f, "layers.0.mlp.up_proj.weight", lambda x: x[:40]),
        ModelFileError,
        r"layers.0.mlp.up_proj.weight is \[40, 32\], not \[48, 32\]",
    ),
    "fc of another width": (
        lambda f: put(f, "fc.weight", lambda x: x[:, :50]),
        ModelFileError,
        r"fc.weight is \[32, 50\], not \[32, 96\]",
    ),
    "fc of other layers": (
        lambda f: put(f, "fc.weight", lambda x: x[:, :64]),
        ModelFileError,
        r"fc.weight is \[32, 64\], not \[32, 96\]",
    ),
    "token beyond": (lambda f: put(f, "d2t", lambda x: x + 1), ModelFileError, "token 61, .*61 tokens"),
    "token below": (lambda f: put(f, "d2t", lambda x: x - 1), ModelFileError, "beyond 61 tokens"),
    "token twice": (lambda f: put(f, "d2t", lambda x: x - 2 * (x == 30)), ModelFileError, "token twice"),
    "map of other tokens": (_without_distances, ModelFileError, "31 tokens, .* 30"),
    "distances that are no numbers": (lambda f: put(f, "d2t", Tensor.float), ModelFileError, "d2t is"),
    "another vocabulary": (lambda f: edit(f, draft_vocab_size=30), ModelFileError, "30 tokens, .* 31"),
    "no number": (
        lambda f: put(f, "norm.weight", lambda x: x * float("nan")),
        ModelFileError,
        "norm.weight is",
    ),
    "layer beyond": (
        lambda f: edit(f, eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        ConfigError,
        r"\[2, 16, 29\] of org/tiny, .*2 layers",
    ),
    "layer below": (lambda f: edit(f, eagle_aux_hidden_state_layer_ids=[-1, 0, 1]), ModelFileError, "layer_ids"),
    "default layers of a small target": (
        lambda f: edit(f, eagle_aux_hidden_state_layer_ids=None),
        ConfigError,
        r"hidden states \[2, 1, -1\]",
    ),
    "another hidden size": (
        lambda f: edit(f, target_hidden_size=64),
        ConfigError,
        "org/tiny .*size 64 .*tiny .*size 32 ",
    ),
    "another vocabulary of the target": (
        lambda f: _layers(f, vocab_size=128256),
        ConfigError,
        "128256 tokens, .*tiny .*61 tokens",
    ),
    "another kind of speculators": (
        lambda f: edit(f, speculators_model_type="xpress"),
        ConfigError,
        "kind 'xpress': .*EAGLE-1 to 3",
    ),
    "Medusa": (
        lambda f: edit(f, speculators_model_type=None, architectures=None, medusa_num_heads=4),
        ConfigError,
        "kind 'medusa_num_heads'",
    ),
    "DFlash": (
        lambda f: edit(f, speculators_model_type=None, architectures=None, dflash_config={}),
        ConfigError,
        "kind 'dflash_config'",
    ),
    "several positions in one pass": (
        lambda f: edit(f, speculators_model_type="peagle"),
        ConfigError,
        "kind 'peagle'",
    ),
    "another architecture": (
        lambda f: edit(f, speculators_model_type=None, architectures=["Eagle3DeepseekV2ForCausalLM"]),
        ConfigError,
        "kind 'Eagle3DeepseekV2ForCausalLM': .*EAGLE-1 to 3",
    ),
    "text for a size": (lambda f: _layers(f, num_attention_heads="4"), ModelFileError, "num_attention_heads"),
    "no size": (lambda f: _layers(f, hidden_size=0), ModelFileError, "hidden_size"),
    "heads that cannot be shared": (lambda f: _layers(f, num_key_value_heads=3), ModelFileError, "3 key heads"),
    "unknown activation": (lambda f: _layers(f, hidden_act="swoosh"), ModelFileError, "'swoosh'"),
    "unknown rotary positions": (
        lambda f: _layers(f, rope_scaling={"rope_type": "longrope"}),
        ModelFileError,
        "'longrope': .*llama3",
    ),
    "rotary positions that lack a number": (
        lambda f: _layers(f, rope_scaling={"rope_type": "llama3"}),
        ModelFileError,
        "draft head",
    ),
    "partly rotated": (
        lambda f: _layers(f, rope_parameters={"partial_rotary_factor": 0.5}),
        ModelFileError,
        "partial_rotary_factor",
    ),
    "two norms": (lambda f: edit(f, fc_norm=True, norm_before_fc=True), ModelFileError, "normed twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_head_is_one_line(case: str, target: HFModel, model: str, tmp_path: Path, capsys: Captured) -> None:
    break_it, kind, message = BAD[case]
    folder = Recipe(drafted=tuple(range(0, 61, 2))).save(tmp_path)
    break_it(folder)
    with pytest.raises(kind, match=message):
        eagle_head(folder, target)
    assert run(["generate", "the cat", "--target", model, "--drafter", str(folder), "--max-tokens", "3"]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert not (folder / "harmed").exists()


def test_an_eagle_1_folder_with_code_in_its_pickle_runs_nothing(model: str, tmp_path: Path, capsys: Captured) -> None:
    """Its config is that of a model, so that its tensors would have to tell what it is."""
    folder = KINDS["eagle"].save(tmp_path, MIDLAYER)
    _pickled(folder)
    assert run(["generate", "the cat", "--target", model, "--drafter", str(folder), "--max-tokens", "3"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (folder / "harmed").exists()


def test_a_target_that_gives_only_its_final_state_is_refused(tmp_path: Path) -> None:
    toy = ToyFeatureModel(61)
    folder = Recipe(target_size=61, ids=(0, 0, 0)).save(tmp_path)
    with pytest.raises(AssertionError):
        eagle_head(folder, toy)
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        eagle_head(folder, ToyModel(61))


def test_info_prints_what_it_is_and_for_which_target(tmp_path: Path, capsys: Captured) -> None:
    folder = Recipe(ids=(2, 16, 29)).save(tmp_path / "new")
    assert run(["info", str(folder)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "EAGLE-3",
        "org/tiny: hidden size 32, 61 tokens",
        "before layers 2, 16, 29",
        "31 of",
    ):
        assert words in printed
    assert run(["info", str(KINDS["eagle"].save(tmp_path / "old", MIDLAYER))]) == 0
    assert "EAGLE-1, EAGLE-2 or HASS" in capsys.readouterr().out
    assert (
        "before layers 2, half and all but 3"
        in described(replace(Recipe(), ids=None).save(tmp_path / "d"))["hidden states"]
    )
    _cut(folder)
    assert run(["info", str(folder)]) == 2
