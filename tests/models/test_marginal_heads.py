"""Medusa, DFlash and P-EAGLE heads compute what their formats say, and what is wrong with their files is one line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftree.cli.main import run
from draftree.errors import ConfigError, DraftreeWarning, ModelFileError
from draftree.models.abilities import MarginalHead
from draftree.models.base import FINAL, FINAL_STATE, FeatureSpec, LanguageModel, Row
from draftree.models.heads.dflash import DFlashModel
from draftree.models.heads.head_formats import describe, is_head, load_head
from draftree.models.huggingface.hf_model import HFModel

from ..marginal_heads import (
    KINDS,
    VOCAB,
    DFlashRecipe,
    MedusaRecipe,
    ParallelRecipe,
    features_of,
    weights_of,
)
from ..tiny import save_tiny, tiny

PROMPT = [3, 1, 41, 59, 26, 5, 35, 8, 9, 7, 9, 32]
SLIDING = (
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("use_sliding_window", True),
    ("sliding_window", 3),
)


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


def loaded(folder: Path, target: LanguageModel) -> MarginalHead:
    head = load_head(folder, target)
    assert isinstance(head, MarginalHead)
    return head


def feed(head: MarginalHead, target: HFModel, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> Tensor:
    """[B, depth, D] logits of rows that read the rest of their texts."""
    new, given = [], []
    for row, text in zip(rows, texts, strict=True):
        given.append(features_of(target, text, head.features)[row.length :])
        new.append(torch.tensor(text[row.length + 1 :]))
    return head.marginals(rows, new, given)


def check(head: MarginalHead, target: HFModel, reference: Callable[[Sequence[int]], Tensor]) -> None:
    """A text in pieces, alone and beside another row, is predicted as it is at once."""
    rows = [head.open() for _ in range(3)]
    for ends in ([6, 2, 3], [7, 5, 9], [12, 6, 12]):
        texts = [PROMPT[:end] for end in ends]
        found = feed(head, target, rows, texts)
        for own, text in zip(found, texts, strict=True):
            torch.testing.assert_close(own, reference(text), atol=1e-4, rtol=1e-4)
    head.close(rows[0])
    texts = [[*PROMPT[:6], 8], [*PROMPT, 4, 2]]
    for row, text in zip(rows[1:], texts, strict=True):
        torch.testing.assert_close(feed(head, target, [row], [text])[0], reference(text), atol=1e-4, rtol=1e-4)
    longer = [[*text, 11] for text in texts]
    found = feed(head, target, [rows[2], rows[1]], longer[::-1])  # in another order than they lie
    torch.testing.assert_close(found[0], reference(longer[1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "recipe",
    [
        MedusaRecipe(),
        MedusaRecipe(heads=2, layers=2),
        MedusaRecipe(style="vllm", layers=0),
        MedusaRecipe(style="vllm", drafted=(5, 3, 60)),
        MedusaRecipe(style="vllm", drafted=(5, 3, 60), is_shared=True),
    ],
    ids=repr,
)
def test_medusa_is_that_of_the_paper(recipe: MedusaRecipe, target: HFModel, tmp_path: Path) -> None:
    head = loaded(recipe.save(tmp_path), target)
    assert head.features == FINAL_STATE
    check(head, target, lambda text: recipe.reference(features_of(target, text, FINAL_STATE)[-1]))
    assert (None if head.vocabulary is None else tuple(head.vocabulary.tolist())) == recipe.drafted


@pytest.mark.parametrize(
    "recipe",
    [
        DFlashRecipe(),
        DFlashRecipe(block=2, layers=3, ids=(1, 0, 1)),
        DFlashRecipe(extra=SLIDING),
        DFlashRecipe(extra=(*SLIDING, ("is_causal", False))),
        DFlashRecipe(extra=(("is_causal", True),)),
        DFlashRecipe(
            extra=(("input_embedding_scale", 2.5), ("output_multiplier", 0.5), ("final_logit_softcapping", 1.5))
        ),
    ],
    ids=repr,
)
def test_a_dflash_block_behind_a_cache_is_that_without_one(
    recipe: DFlashRecipe, target: HFModel, tmp_path: Path
) -> None:
    head, (embeddings, output) = loaded(recipe.save(tmp_path), target), weights_of(target)
    wanted = FeatureSpec(tuple(FINAL if i == 1 else i + 1 for i in recipe.ids))  # the target has two layers
    assert head.features == wanted
    assert head.depth == recipe.block - 1
    check(head, target, lambda text: recipe.reference(embeddings, output, features_of(target, text, wanted), text[-1]))


@pytest.mark.parametrize(
    "recipe", [ParallelRecipe(), ParallelRecipe(size=48, depth=1), ParallelRecipe(embeddings=True)]
)
def test_p_eagle_is_eagle_3_with_masks(recipe: ParallelRecipe, target: HFModel, tmp_path: Path) -> None:
    head, (embeddings, _) = loaded(recipe.save(tmp_path), target), weights_of(target)
    assert head.depth == recipe.depth

    def reference(text: Sequence[int]) -> Tensor:
        return recipe.reference(embeddings, text[1:], features_of(target, text, head.features))

    check(head, target, reference)
    long = [(7 * i) % VOCAB for i in range(90)]  # all but the last token are read by a pass of their own
    torch.testing.assert_close(feed(head, target, [head.open()], [long])[0], reference(long), atol=1e-4, rtol=1e-4)


def test_a_pickle_of_medusa_heads_is_read_without_trust(target: HFModel, tmp_path: Path) -> None:
    pickled = loaded(MedusaRecipe().save(tmp_path / "pickled", pickled=True), target)
    assert (
        pickled.capabilities.fingerprint
        == loaded(MedusaRecipe().save(tmp_path / "safe"), target).capabilities.fingerprint
    )


def test_weights_of_a_model_beside_medusa_heads_are_not_read(target: HFModel, tmp_path: Path) -> None:
    folder = MedusaRecipe().save(tmp_path)
    save_file({"model.embed_tokens.weight": torch.ones(3, 3)}, folder / "model.safetensors")
    assert loaded(folder, target).depth == 3


def test_heads_beyond_those_of_the_config_cost_a_warning(target: HFModel, tmp_path: Path) -> None:
    folder = MedusaRecipe().save(tmp_path)
    edit(folder, medusa_num_heads=2)
    with pytest.warns(DraftreeWarning, match="has 3 tensors .* more than its kind uses"):
        assert loaded(folder, target).depth == 2


def test_settings_of_dflash_lie_at_the_top_or_inside(target: HFModel, tmp_path: Path) -> None:
    folder = DFlashRecipe().save(tmp_path)
    inside = json.loads((folder / "config.json").read_text())["dflash_config"] | {"block_size": 7}
    edit(folder, block_size=None, dflash_config=inside)
    head = loaded(folder, target)
    assert isinstance(head, DFlashModel)
    assert head.depth == 6


def test_a_p_eagle_head_that_names_no_number_predicts_eight(target: HFModel, tmp_path: Path) -> None:
    folder = ParallelRecipe().save(tmp_path)
    edit(folder, speculators_config={"algorithm": "peagle"})
    assert loaded(folder, target).depth == 8


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of a config; None leaves one out."""
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def put(folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change a tensor; None leaves it out."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    old = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(old).contiguous()}, path)


def cut(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._place),)


def poison(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.unlink()
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Harm(folder / "harmed")}))


def _grown(folder: Path) -> None:
    edit(folder, vocab_size=100)
    for i in range(3):
        put(folder, f"lm_heads.{i}.weight", lambda x: x.repeat(2, 1)[:100])


Break = Callable[[Path], object]
BAD: dict[str, tuple[str, Break, type[Exception], str]] = {
    "medusa, cut off": ("medusa", cut, ModelFileError, "cannot read the draft head"),
    "medusa, code": ("medusa", poison, ModelFileError, "may be code: it is not run"),
    "medusa, no layer": (
        "medusa",
        lambda f: put(f, "blocks.1.layers.0.weight", None),
        ModelFileError,
        r"lacks 1 tensor \(blocks.1.layers.0.weight\)",
    ),
    "medusa, no output": ("medusa", lambda f: put(f, "lm_heads.0.weight", None), ModelFileError, "lm_heads.0.weight"),
    "medusa, shape": (
        "medusa",
        lambda f: put(f, "blocks.0.layers.0.weight", lambda x: x[:30]),
        ModelFileError,
        r"blocks.0.layers.0.weight is \[30, 32\], not \[32, 32\]",
    ),
    "medusa, not finite": (
        "medusa",
        lambda f: put(f, "lm_heads.2.weight", lambda x: x * float("inf")),
        ModelFileError,
        "not all finite",
    ),
    "medusa, no map": ("medusa", lambda f: put(f, "token_map", None), ModelFileError, "drafts 31 tokens and lacks"),
    "medusa, map beyond": (
        "medusa",
        lambda f: put(f, "token_map", lambda x: x + 1),
        ModelFileError,
        "token_map leads to token 61, beyond 61 tokens",
    ),
    "medusa, map twice": ("medusa", lambda f: put(f, "token_map", lambda x: x // 4), ModelFileError, "token twice"),
    "medusa, map of numbers": ("medusa", lambda f: put(f, "token_map", Tensor.float), ModelFileError, "token_map is"),
    "medusa, map of others": ("medusa", lambda f: edit(f, truncated_vocab_size=9), ModelFileError, "token_map has 31"),
    "medusa, no vocabulary": ("medusa", lambda f: edit(f, vocab_size=None), ModelFileError, "no vocab_size"),
    "medusa, no heads": ("medusa", lambda f: edit(f, num_heads=0), ModelFileError, "num_heads"),
    "medusa, another target": (
        "medusa",
        _grown,
        ConfigError,
        "made for a model of hidden size 32 and 100 tokens, and tiny has hidden size 32 and 61 tokens",
    ),
    "dflash, cut off": ("dflash", cut, ModelFileError, "cannot read the draft head"),
    "dflash, no norm": (
        "dflash",
        lambda f: put(f, "layers.1.self_attn.q_norm.weight", None),
        ModelFileError,
        r"lacks 1 tensor \(layers.1.self_attn.q_norm.weight\)",
    ),
    "dflash, fc": (
        "dflash",
        lambda f: put(f, "fc.weight", lambda x: x[:, :32]),
        ModelFileError,
        r"fc.weight is \[32, 32\], not \[32, 64\]",
    ),
    "dflash, layer beyond": (
        "dflash",
        lambda f: edit(f, dflash_config={"target_layer_ids": [0, 8], "mask_token_id": 4}),
        ConfigError,
        r"hidden states \[1, 9\] of its target, and the target has 2 layers",
    ),
    "dflash, no layers": (
        "dflash",
        lambda f: edit(f, dflash_config={"mask_token_id": 4}),
        ModelFileError,
        "target_layer",
    ),
    "dflash, no mask": (
        "dflash",
        lambda f: edit(f, dflash_config={"target_layer_ids": [0, 1]}),
        ModelFileError,
        "mask_token_id",
    ),
    "dflash, mask beyond": (
        "dflash",
        lambda f: edit(f, dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 61}),
        ModelFileError,
        "mask token is 61, beyond 61 tokens",
    ),
    "dflash, no block": ("dflash", lambda f: edit(f, block_size=1), ModelFileError, "block_size"),
    "dflash, another target": (
        "dflash",
        lambda f: edit(f, vocab_size=151936),
        ConfigError,
        "hidden size 32 and 151936 tokens",
    ),
    "DFlash2": ("dflash", lambda f: edit(f, architectures=["DFlash2DraftModel"]), ConfigError, "'DFlash2DraftModel'"),
    "DSpark": ("dflash", lambda f: edit(f, architectures=["DSparkDraftModel"]), ConfigError, "'DSparkDraftModel'"),
    "p-eagle, no mask": ("p-eagle", lambda f: edit(f, mask_token_id=None), ModelFileError, "no mask_token_id among 61"),
    "p-eagle, mask beyond": (
        "p-eagle",
        lambda f: edit(f, mask_token_id=61),
        ModelFileError,
        "no mask_token_id among 61",
    ),
    "p-eagle, no masks": (
        "p-eagle",
        lambda f: put(f, "mask_hidden", None),
        ModelFileError,
        r"lacks 1 tensor \(mask_hidden\)",
    ),
    "p-eagle, masks": (
        "p-eagle",
        lambda f: put(f, "mask_hidden", lambda x: x[..., :32]),
        ModelFileError,
        r"mask_hidden is \[1, 1, 32\], not \[1, 1, 96\]",
    ),
    "p-eagle, no tokens": (
        "p-eagle",
        lambda f: edit(f, speculators_config={"proposal_methods": [{"speculative_tokens": 0}]}),
        ModelFileError,
        "proposes 0 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_head_is_one_line(case: str, target: HFModel, tmp_path: Path) -> None:
    kind, break_it, error, message = BAD[case]
    folder = KINDS[kind].save(tmp_path)
    break_it(folder)
    with pytest.raises(error, match=message) as raised:
        load_head(folder, target)
    assert "\n" not in str(raised.value)
    assert not (folder / "harmed").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_info_and_generate_know_them_by_their_config(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = KINDS[kind].save(tmp_path / "head")
    assert is_head(folder)
    assert run(["info", str(folder)]) == 0
    printed = capsys.readouterr().out
    words = {"medusa": ("Medusa", "31 of", "3 a pass"), "dflash": ("DFlash", "after layers 0, 1", "4 a pass")}
    for word in ("hidden size 32, 61 tokens", *words.get(kind, ("P-EAGLE", "31 of", "4 a pass"))):
        assert word in printed
    model = str(save_tiny(tmp_path / "model"))
    options = ["--target", model, "--drafter", str(folder), "--max-tokens", "4", "--method", "opt-tree", "--raw"]
    assert run(["generate", "the cat", *options]) == 0
    assert describe(folder)["target"].startswith("org/tiny" if kind == "p-eagle" else "not named")
