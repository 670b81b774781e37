"""MTP layers over rows and trees: what transformers' own MTP model computes along each path; what cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from draftree.cli.main import run
from draftree.errors import ModelFileError, UnsupportedModelError
from draftree.models.abilities import HeadRow
from draftree.models.base import Nodes, prefill
from draftree.models.heads.mtp import MtpHead, load_mtp, mtp_layers
from draftree.models.huggingface.features import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.tree import ROOT

from ..mtp import KINDS, Oracle, known, read, save_mtp
from ..references import extended
from ..tiny import VOCAB, tiny
from ..toy import ToyModel

Captured = pytest.CaptureFixture[str]
CASES = [("deepseek_v3", 1), ("glm4_moe", 1), ("deepseek_v3", 3)]
TEXT, OTHER = [2, 40, 6, 8, 33, 12, 5], [7, 1]
TREE = Nodes.of([2, 8, 4], [ROOT, ROOT, ROOT])
BELOW = Nodes.of([6, 10, 12, 14], [0, 0, 2, 1])
DEEPER = Nodes.of([16, 18], [4, 6])
DEEPEST = Nodes.of([20, 21], [7, 7])
PATHS = {0: [2], 1: [8], 4: [2, 10], 5: [4, 12], 7: [2, 10, 16], 8: [8, 14, 18], 10: [2, 10, 16, 21]}
"""Node -> tokens down to it."""


@pytest.fixture(scope="module", autouse=True)
def known_layers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        known(patch)
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, layers = request.param
    return save_mtp(tmp_path_factory.mktemp(f"{kind}{layers}"), kind, layers)


@pytest.fixture(scope="module")
def target(folder: Path) -> HFModel:
    return HFModel(read(folder), name="tiny")


@pytest.fixture(scope="module")
def head(target: HFModel) -> MtpHead:
    return load_mtp(target)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def features_of(target: HFModel, text: list[int]) -> Tensor:
    row = prefill(target, text)
    found = feature_row(row).waiting_features()
    target.close(row)
    return found


def fed(head: MtpHead, target: HFModel, *texts: list[int]) -> tuple[list[HeadRow], Tensor]:
    """Rows with all of the texts, and [B, V] logits after them."""
    rows = [head.open() for _ in texts]
    features = [features_of(target, text)[:-1] for text in texts]
    return rows, head.advance(rows, [torch.tensor(text[1:]) for text in texts], features)[:, :VOCAB]


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found[..., :VOCAB], wanted, rtol=1e-5, atol=1e-5)


def test_step_0_and_three_more_equal_transformers(head: MtpHead, target: HFModel, oracle: Oracle) -> None:
    drafts = [17, 4, 59]
    wanted = oracle.drafted(TEXT, drafts)
    (row,), logits = fed(head, target, TEXT)
    assert same(logits[0], wanted[0])
    for i, token in enumerate(drafts):
        logits = extended(head, [row], [Nodes.of([token], [i - 1])])[0]
        assert same(logits[0], wanted[i + 1]), i
    head.close(row)


def test_trees_equal_chains_beside_a_row_that_is_a_layer_behind(head: MtpHead, target: HFModel, oracle: Oracle) -> None:
    rows, _ = fed(head, target, TEXT, OTHER)
    found, other = [extended(head, rows[:1], [TREE])[0]], list[Tensor]()
    for mine, tokens in ((BELOW, [30]), (DEEPER, [31]), (DEEPEST, [32])):
        beside = Nodes.of(tokens, [len(other) - 1])
        logits = extended(head, rows, [mine, beside])
        found.append(logits[0, : len(mine.tokens)])
        other.append(logits[1, 0])
    for node, path in PATHS.items():
        assert same(torch.cat(found)[node], oracle.drafted(TEXT, path)[-1]), node
    assert same(torch.stack(other), oracle.drafted(OTHER, [30, 31, 32])[1:])
    for row in rows:
        head.close(row)


def test_tokens_in_pieces_equal_tokens_at_once(head: MtpHead, target: HFModel, oracle: Oracle) -> None:
    features, row = features_of(target, TEXT), head.open()
    for start, end in ((1, 2), (2, 5), (5, len(TEXT))):
        head.advance([row], [torch.tensor(TEXT[start:end])], [features[start - 1 : end - 1]])
        logits = extended(head, [row], [TREE])[0]  # what was drafted is forgotten
    assert same(logits[1], oracle.drafted(TEXT, [8])[1])
    fork = head.fork(row)
    head.close(row)
    head.extend([fork], [Nodes.chain([8])])
    assert same(extended(head, [fork], [Nodes.of([9], [0])])[0, 0], oracle.drafted(TEXT, [8, 9])[2])
    head.close(fork)


def test_where_the_target_has_read_the_last_token_the_first_layer_reads_the_next(
    head: MtpHead, target: HFModel, oracle: Oracle
) -> None:
    features, (rows, _) = features_of(target, [*TEXT, 8]), fed(head, target, TEXT)
    for _ in range(2):  # of beams, each proposal begins so
        head.know(rows[0], features[-2:-1])
    assert same(extended(head, rows, [TREE])[0, 1], oracle.drafted([*TEXT, 8], [])[0])
    head.advance(rows, [torch.tensor([8])], [features[-2:-1]])
    head.extend(rows, [TREE])
    assert same(extended(head, rows, [BELOW])[0, 2], oracle.drafted([*TEXT, 8], [4, 12])[2])
    head.close(rows[0])


def test_a_token_takes_as_much_of_the_cache_as_it_says(head: MtpHead, target: HFModel) -> None:
    fed(head, target, TEXT)
    for cache, can in ((target.cache, target.capabilities), (head._rows.cache, head.capabilities)):
        assert cache.nbytes == can.slot_bytes * cache.placement.rows * cache.placement.slots


def test_the_output_layer_is_the_targets_and_still_trainable(head: MtpHead, target: HFModel) -> None:
    layers: Any = target.model.get_output_embeddings(), head.layers["output"]
    own, shared = (layer.weight for layer in layers)
    assert shared.data_ptr() == own.data_ptr()
    assert own.requires_grad and not shared.requires_grad


def test_info_counts_them(folder: Path, target: HFModel, capsys: Captured) -> None:
    assert run(["info", str(folder)]) == 0
    assert f"MTP layers        {mtp_layers(target)}, for drafter mtp" in capsys.readouterr().out


@pytest.mark.parametrize("model", [HFModel(tiny(), name="plain", self_test=False), ToyModel()])
def test_a_target_without_them_is_one_line(model: HFModel | ToyModel) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_mtp(model)
    assert "\n" not in str(caught.value)
    if isinstance(model, HFModel):
        assert "plain" in str(caught.value) and "num_nextn_predict_layers" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_checkpoint_lacks_is_named(kind: str, tmp_path: Path) -> None:
    broken = HFModel(read(save_mtp(tmp_path, kind, lacking=["eh_proj.weight"])), name="tiny", self_test=False)
    with pytest.raises(ModelFileError, match=r"tiny: .*promises 1, .*lacks 1 tensors .*eh_proj\.weight"):
        load_mtp(broken)


def test_qwen_targets_are_refused_before_their_layers_matter() -> None:
    """What the guide says: no checkpoint of these has attention alone, and transformers counts none as such."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, layer_types=["full_attention"] * 2
    )
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        HFModel(Qwen3_5ForCausalLM(config), name="qwen")


def test_tensors_of_other_sizes_are_refused(tmp_path: Path) -> None:
    weights = save_mtp(tmp_path, "glm4_moe") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.2.enorm.weight"] = torch.ones(5)
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelFileError, match="promises 1, .*other shapes"):
        load_mtp(HFModel(read(tmp_path), name="tiny", self_test=False))
