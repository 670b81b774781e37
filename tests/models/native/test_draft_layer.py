"""Draft layers of GGUF files (MTP): they compute what layers of transformers do, and a damaged one costs its drafts."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from numpy.typing import NDArray

from draftree import Engine, Generation, SamplingParams, Speculation
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_drafter
from draftree.errors import DraftreeWarning, ModelFileError, UnknownNameError, UnsupportedModelError
from draftree.models.base import Nodes, Row, prefill
from draftree.models.heads import head_folder, own_heads
from draftree.models.heads.eagle_network import save_head
from draftree.models.heads.head_folder import head_for, load_head_for
from draftree.models.heads.head_format import EagleConfig
from draftree.models.heads.own_heads import own_head_for
from draftree.models.native import draft_layer
from draftree.models.native.binding import tiers
from draftree.models.native.draft_layer import StoredDraftLayer, draft_tokens
from draftree.models.native.native_head import NativeHead
from draftree.models.native.native_model import NativeModel
from draftree.models.native.vocabulary import GGUFTokenizer
from draftree.papers.opt_tree import OptTree
from draftree.policies.methods import find_policy
from draftree.scores import Scores
from draftree.train.head_architectures import new_eagle
from tests.draft_layers import PROMPTS, Predictor, predictor
from tests.heads import check_same_costs
from tests.llama_draft_layer import LlamaDraftLayer
from tests.pairs import policy
from tests.tiny_gguf import SPECIAL, copy_settings

FURTHER = [9, 3, 250, 17]
TOKENS = 30
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.3, seed=11)
BLOCK = "blk.2."
Change = Callable[[dict[str, NDArray[Any]]], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path]:
    return predictor(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def path(trained: tuple[Predictor, Path]) -> Path:
    return trained[1]


@pytest.fixture(scope="module")
def text(trained: tuple[Predictor, Path]) -> list[int]:
    found: list[int] = trained[0].texts[1, :20].tolist()
    return found


@pytest.fixture(autouse=True)
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has trained none before."""
    monkeypatch.setattr(own_heads, "heads_folder", lambda: tmp_path / "heads")


def head_of(target: NativeModel) -> NativeHead:
    head = load_head_for(target)
    assert isinstance(head, NativeHead)
    return head


def changed(path: Path, folder: Path, change: Change, kind: Format = Format.F32) -> Path:
    """A copy of the file whose draft layer has other tensors, by their names in it, and matrices of this format."""
    reader, written = gguf.GGUFReader(path), folder / "changed.gguf"
    writer = gguf.GGUFWriter(written, "qwen35")
    copy_settings(reader, writer)
    own = {t.name.removeprefix(BLOCK): np.array(t.data) for t in reader.tensors if t.name.startswith(BLOCK)}
    change(own)
    for tensor in reader.tensors:
        if not tensor.name.startswith(BLOCK):
            writer.add_tensor(tensor.name, tensor.data)
    for name, data in own.items():
        of = kind if data.ndim > 1 else Format.F32
        writer.add_tensor(BLOCK + name, gguf.quants.quantize(data, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def predicted(path: Path, text: Sequence[int], further: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """[1 + m, D] logits after a text and after each of m further tokens, and the tokens that they are of."""
    target = NativeModel(path)
    head = head_of(target)
    row, opened = head.open(), prefill(target, text[:-1])
    found = [head.read([row], [text[1:]], [opened]).logits([0])[0]]
    for number, token in enumerate(further):
        found.append(head.extend([row], [Nodes([token], [number - 1])]).logits([0])[0])
    return np.stack(found), head.vocabulary_of(row)


def swap_halves(own: dict[str, NDArray[Any]]) -> None:
    own["nextn.eh_proj.weight"] = np.roll(own["nextn.eh_proj.weight"], 64, axis=1)


def swap_norms(own: dict[str, NDArray[Any]]) -> None:
    own["nextn.enorm.weight"], own["nextn.hnorm.weight"] = own["nextn.hnorm.weight"], own["nextn.enorm.weight"]


def swap_last_norms(own: dict[str, NDArray[Any]]) -> None:
    names = "nextn.shared_head_norm.weight", "attn_norm.weight"
    own[names[0]], own[names[1]] = own[names[1]], own[names[0]]


def far(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_it_computes_what_layers_of_transformers_do(trained: tuple[Predictor, Path], text: list[int]) -> None:
    found, tokens = predicted(trained[1], text, FURTHER)
    expected = trained[0].logits(text, FURTHER).numpy()
    assert sorted(tokens.tolist()) == list(range(expected.shape[1]))
    assert far(found, expected[:, tokens]) < 1e-3


def test_llama_computes_what_layers_of_transformers_do(trained: tuple[Predictor, Path], text: list[int]) -> None:
    """The layers are put together here: transformers has the classes alone."""
    model = LlamaDraftLayer(trained[1], *trained[0].output.shape)
    found = model.logits(text, FURTHER)
    model.close()
    assert far(found, trained[0].logits(text, FURTHER).numpy()) < 1e-4


@pytest.mark.parametrize("change", [swap_halves, swap_norms, swap_last_norms])
def test_what_is_joined_in_another_order_is_noticed(
    change: Change, trained: tuple[Predictor, Path], text: list[int], tmp_path: Path
) -> None:
    found, tokens = predicted(changed(trained[1], tmp_path, change), text, FURTHER)
    assert far(found, trained[0].logits(text, FURTHER).numpy()[:, tokens]) > 0.02


def test_a_pass_of_the_target_costs_nothing_of_the_layer(path: Path) -> None:
    target = NativeModel(path)
    can, layer = target.capabilities, head_of(target).capabilities
    assert can.weights == can.parameters - layer.parameters - can.vocab_size * target.hidden_size
    assert layer.weights == layer.parameters + can.vocab_size * target.hidden_size


def test_it_costs_what_its_own_weights_do(path: Path) -> None:
    dense, experts = NativeModel(path), NativeModel(path)
    experts.capabilities = replace(experts.capabilities, expert_bytes=10**9, expert_share=1 / 8)
    check_same_costs(head_of(dense).capabilities, head_of(experts).capabilities)


def test_quantised_tensors_are_read_as_they_are(path: Path, text: list[int], tmp_path: Path) -> None:
    packed = changed(path, tmp_path, lambda own: None, Format.Q8_0)
    exact, found = predicted(path, text, FURTHER)[0], predicted(packed, text, FURTHER)[0]
    assert 0 < far(found, exact) < 0.05
    sizes = [head_of(NativeModel(each)).capabilities.weight_bytes for each in (path, packed)]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize(
    ("name", "what"), [("nextn.shared_head_head.weight", "output"), ("nextn.embed_tokens.weight", "embeddings")]
)
def test_an_output_layer_and_embeddings_of_its_own_are_read(
    name: str, what: str, trained: tuple[Predictor, Path], text: list[int], tmp_path: Path
) -> None:
    own = np.random.default_rng(0).standard_normal(trained[0].output.shape, dtype=np.float32) * 0.3
    found, tokens = predicted(changed(trained[1], tmp_path, lambda tensors: tensors.update({name: own})), text, FURTHER)
    changes: dict[str, Any] = {what: torch.from_numpy(own)}
    model = replace(trained[0], **changes)
    assert far(found, model.logits(text, FURTHER).numpy()[:, tokens]) < 1e-3


@pytest.mark.parametrize("own_output", [False, True])
def test_it_scores_its_draft_vocabulary_and_with_the_targets_output_layer_the_text(
    own_output: bool, trained: tuple[Predictor, Path], text: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_layer, "MOST_TOKENS", 100)
    output = {"nextn.shared_head_head.weight": trained[0].output.numpy()} if own_output else {}
    found, tokens = predicted(changed(trained[1], tmp_path, lambda tensors: tensors.update(output)), text, FURTHER)
    further = [] if own_output else [token for token in dict.fromkeys(text[1:]) if token >= 100]
    assert tokens.tolist() == [*range(100), *further] and max(text) >= 100
    assert far(found, trained[0].logits(text, FURTHER).numpy()[:, tokens]) < 1e-3


def test_its_draft_vocabulary_is_special_tokens_and_the_lowest_ids(path: Path) -> None:
    target = NativeModel(path)
    assert isinstance(target.tokenizer, GGUFTokenizer) and sorted(target.tokenizer.added_ids) == [*range(len(SPECIAL))]
    assert draft_tokens(target, 2**15).tolist() == [*range(target.capabilities.vocab_size)]
    target.tokenizer._added["<think>"] = 270
    assert draft_tokens(target, 50).tolist() == [*range(49), 270]


@pytest.mark.parametrize("tier", tiers())
def test_bits_depend_on_a_nodes_path_alone(tier: str, path: Path, text: list[int]) -> None:
    """Not on threads, on the instruction set, or on the nodes beside it."""
    expected, _ = predicted(path, text, FURTHER[:2])
    target = NativeModel(path, tier=tier, threads=3)
    head = head_of(target)
    row, opened = head.open(), prefill(target, text[:-1])
    found = [head.read([row], [text[1:]], [opened]).logits([0])[0]]
    found.append(head.extend([row], [Nodes([7, FURTHER[0]], [-1, -1])]).logits([1])[0])
    found.append(head.extend([row], [Nodes([1, 2, FURTHER[1]], [0, 1, 1])]).logits([2])[0])
    assert np.array_equal(np.stack(found), expected)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_ar_decoding_and_most_drafts_are_accepted(params: SamplingParams, path: Path) -> None:
    """Trees grow in C and in Python alike, the second time behind kept prefixes."""
    plain, grown = Engine(NativeModel(path)).generate(PROMPTS, params), list[Sequence[Generation]]()
    for in_c in (True, False):
        target = NativeModel(path)
        drafter = TreeDrafter(OptTree(0.05), EagleSource(head_of(target), target.capabilities.vocab_size))
        drafter._native = drafter._native if in_c else None
        engine = Engine(target, Speculation(drafter, 4))
        grown += [engine.generate(PROMPTS, params) for _ in range(2)]
    for made in grown:
        assert [g.token_ids for g in made] == [g.token_ids for g in plain]
        assert [g.stats.accepted for g in made] == [g.stats.accepted for g in grown[0]]
    right, steps = sum(sum(g.stats.accepted[:1]) for g in grown[0]), sum(g.stats.steps for g in grown[0])
    assert right > (steps / 2 if params is GREEDY else 0)


def lines(target: NativeModel, drafter: str = "auto") -> tuple[str, list[str]]:
    """The drafter that is loaded, and what is said."""
    head_folder._warn.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        name = load_drafter(drafter, target, find_policy("static")).name
    return name, [str(each.message) for each in found if each.category is DraftreeWarning]


def test_auto_drafts_with_it_unless_the_user_has_trained_a_head(path: Path, tmp_path: Path) -> None:
    target = NativeModel(shutil.copy(path, tmp_path / "copy.gguf"))
    assert head_for(target) == tmp_path / "copy.gguf" and lines(target) == ("lookup+head", [])
    assert load_head_for(target).capabilities.name == f"draft layer of {tmp_path / 'copy.gguf'}"
    folder = own_head_for(target)
    save_head(folder, new_eagle(EagleConfig.like(target), 0), torch.arange(9), target)
    assert head_for(target) == folder and load_head_for(target).capabilities.name == f"head {folder.name}"


def test_what_a_layer_that_predicts_nothing_costs_is_found_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``auto`` soon leaves its drafts out, and with the layer that has learned its target it drafts on.

    The target is as slow beside its layer as one of many layers.
    """
    extend = NativeModel.extend

    def slow(self: NativeModel, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        time.sleep(4e-3)
        return extend(self, rows, nodes)

    def noise(own: dict[str, NDArray[Any]]) -> None:
        random = np.random.default_rng(0)
        own |= {name: random.standard_normal(data.shape, dtype=np.float32) for name, data in own.items()}

    monkeypatch.setattr(NativeModel, "extend", slow)
    passes = list[float]()
    for each in (path, changed(path, tmp_path, noise)):
        target = NativeModel(each)
        drafter = TreeDrafter(policy("auto"), EagleSource(head_of(target), target.capabilities.vocab_size))
        engine = Engine(target, Speculation(drafter, 8))
        made = [engine.generate([prompt], GREEDY)[0].stats for prompt in PROMPTS * 4][8:]
        passes.append(sum(stats.draft_passes for stats in made) / sum(stats.steps for stats in made))
    assert passes[1] < 0.3 < 1 < passes[0], passes


def lack(name: str) -> Change:
    return lambda own: own.__delitem__(name)


def cut(name: str) -> Change:
    return lambda own: own.update({name: own[name][..., :-32]})


DAMAGED: dict[str, Change] = {
    "a projection that is missing": lack("nextn.eh_proj.weight"),
    "a norm that is missing": lack("attn_norm.weight"),
    "a projection of one half": cut("nextn.eh_proj.weight"),
    "a matrix of other columns": cut("ffn_down.weight"),
    "a short norm": cut("nextn.hnorm.weight"),
    "a matrix for a norm": lambda own: own.update({"nextn.enorm.weight": np.ones((2, 32), np.float32)}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_layer_is_one_line_and_costs_its_drafts_alone(case: str, path: Path, tmp_path: Path) -> None:
    target = NativeModel(changed(path, tmp_path, DAMAGED[case]))
    name, (line,) = lines(target)
    assert name == "lookup" and "\n" not in line and str(tmp_path / "changed.gguf") in line
    with pytest.raises(ModelFileError):
        StoredDraftLayer(target)
    with pytest.raises(UnknownNameError):
        load_head_for(target)


def test_what_the_engine_does_not_compute_is_one_line(path: Path, tmp_path: Path) -> None:
    bias = {"attn_q.bias": np.ones(128, np.float32)}
    target = NativeModel(changed(path, tmp_path, lambda own: own.update(bias)))
    assert lines(target)[0] == "lookup" and "attn_q.bias" in lines(target)[1][0]


def test_a_target_without_attention_is_drafted_for_without_it(path: Path) -> None:
    target = NativeModel(path)
    target.description = replace(target.description, layer_tensors=target.description.layer_tensors[:1])
    name, (line,) = lines(target)
    assert name == "lookup" and str(path) in line


def test_weights_that_are_no_numbers_are_one_line(path: Path, tmp_path: Path) -> None:
    infinite = changed(path, tmp_path, lambda own: own["ffn_up.weight"].__setitem__((3, 4), np.inf))
    with pytest.raises(UnsupportedModelError):
        load_head_for(NativeModel(infinite))
