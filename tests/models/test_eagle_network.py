"""Published heads compute what their formats say, and what they draft is what they compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftree.models.base import Nodes, prefill
from draftree.models.heads.eagle_model import HeadModel, HeadRow
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel

from ..published import FLAGS, KINDS, ROPES, Recipe, eagle_head, reference, saved
from ..references import extended
from ..tiny import VOCAB, tiny

PROMPT = [3, 1, 41, 59, 26, 5, 35, 8, 9, 7, 9, 32]
FURTHER = [38, 4, 6]


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


def fed(head: HeadModel, target: HFModel, prompt: list[int]) -> tuple[HeadRow, Tensor]:
    """A row with all of a prompt, and the logits after it."""
    row, new = prefill(target, prompt), head.open()
    logits = head.advance([new], [prompt[1:]], [feature_row(row).last_features(wanted=head.features)[:-1]]).tensor[0]
    target.close(row)
    return new, logits


def expected(recipe: Recipe, head: HeadModel, target: HFModel, prompt: list[int], further: list[int]) -> Tensor:
    row, weights = prefill(target, prompt), target.model
    features = feature_row(row).last_features(wanted=head.features)[:-1]
    target.close(row)
    matrices = (weights.get_input_embeddings().weight, weights.get_output_embeddings().weight)
    embeddings, output = (m.detach() for m in matrices if isinstance(m, Tensor))
    return reference(recipe, embeddings, output, prompt[1:], features, further)


def check(recipe: Recipe, folder: Path, target: HFModel) -> None:
    """Step 0 and three further steps equal the reference."""
    head = eagle_head(folder, target)
    row, first = fed(head, target, PROMPT)
    found = [first]
    for i, token in enumerate(FURTHER):
        found.append(extended(head, [row], [Nodes([token], [i - 1])])[0, 0])
    want = expected(recipe, head, target, PROMPT, FURTHER)
    got = torch.stack(found)
    assert got[:, want.shape[1] :].eq(float("-inf")).all()
    torch.testing.assert_close(got[:, : want.shape[1]], want, atol=1e-5, rtol=1e-5)
    drafted = recipe.drafted or range(VOCAB)
    assert head.vocabulary_of(row).tolist() == list(drafted)


@pytest.mark.parametrize("style", ["speculators", "midlayer"])
@pytest.mark.parametrize("size", [32, 48, 64])
@pytest.mark.parametrize("rope", ROPES)
def test_step_0_and_three_further_steps_are_those_of_the_format(
    rope: str, size: int, style: str, target: HFModel, tmp_path: Path
) -> None:
    recipe = Recipe(rope=ROPES[rope], size=size)
    check(recipe, recipe.save(tmp_path, style), target)


@pytest.mark.parametrize("style", ["speculators", "midlayer"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag_is_honoured(flags: str, style: str, target: HFModel, tmp_path: Path) -> None:
    recipe = Recipe(flags=FLAGS[flags])
    check(recipe, recipe.save(tmp_path, style), target)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(embeddings=True),
        Recipe(qk_norm=True),
        Recipe(drafted=None),
        Recipe(drafted=tuple(range(60, 0, -3))),
        Recipe(ids=(2, 2, 0, 1), states=4),
        Recipe(ids=(1,), states=1),
        Recipe(kind="eagle", drafted=None),
        Recipe(kind="eagle", drafted=None, fc_bias=True, flags={"num_hidden_layers": 2}),
        Recipe(kind="eagle", drafted=None, embeddings=True, rope=ROPES["llama3"]),
        KINDS["draftree's own"],
    ],
    ids=lambda recipe: repr(recipe)[:80],
)
def test_so_are_other_parts(recipe: Recipe, target: HFModel, tmp_path: Path) -> None:
    check(recipe, saved(recipe, tmp_path), target)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_equal_chains_and_batches_equal_single_rows(kind: str, target: HFModel, tmp_path: Path) -> None:
    head = eagle_head(saved(KINDS[kind], tmp_path), target)
    prompts, tree = [PROMPT, PROMPT[:5], PROMPT[3:]], Nodes([2, 8, 4], [-1, -1, -1])
    below = Nodes([6, 10, 12], [0, 2, 1])
    opened = [prefill(target, prompt) for prompt in prompts]
    rows = [head.open() for _ in prompts]
    features = [feature_row(row).last_features(wanted=head.features)[:-1] for row in opened]
    after = head.advance(rows, [prompt[1:] for prompt in prompts], features).tensor
    logits = torch.cat([extended(head, rows, [tree] * 3), extended(head, rows, [below] * 3)], dim=1)
    paths = {0: [2], 1: [8], 2: [4], 3: [2, 6], 4: [4, 10], 5: [8, 12]}
    for b, prompt in enumerate(prompts):
        target.close(opened[b])
        for node, tokens in paths.items():
            want = expected(KINDS[kind], head, target, prompt, tokens)
            torch.testing.assert_close(after[b, : want.shape[1]], want[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(logits[b, node, : want.shape[1]], want[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_pieces_equal_tokens_at_once(kind: str, target: HFModel, tmp_path: Path) -> None:
    head = eagle_head(saved(KINDS[kind], tmp_path), target)
    row, new = prefill(target, PROMPT), head.open()
    features, tokens = feature_row(row).last_features(wanted=head.features)[:-1], PROMPT[1:]
    target.close(row)
    head.advance([new], [tokens[:4]], [features[:4]])
    head.extend([new], [Nodes.chain([9])])  # what was drafted is forgotten
    logits = head.advance([new], [tokens[4:]], [features[4:]]).tensor[0]
    torch.testing.assert_close(logits, fed(head, target, PROMPT)[1], atol=1e-4, rtol=1e-4)
    again = head.advance([new], [[]], [features[:0]]).tensor[0]
    assert torch.equal(again, logits)


def test_rotations_stay_precise_in_half_precision(tmp_path: Path) -> None:
    head = eagle_head(Recipe().save(tmp_path), HFModel(tiny().bfloat16(), self_test=False))
    turns = head.network.turns(torch.arange(200))
    assert turns.dtype == torch.float32
    angle = 150 * 5000.0**-0.25
    torch.testing.assert_close(
        turns[150, 0, :, 1], torch.tensor([angle, angle - torch.pi / 2]).cos(), atol=1e-4, rtol=0
    )


def test_its_own_embeddings_are_dropped_where_they_are_the_targets(target: HFModel, tmp_path: Path) -> None:
    recipe = Recipe(embeddings=True)
    assert eagle_head(recipe.save(tmp_path), target).network.embed_tokens is not None
    embeddings = target.model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)

    class Same(Recipe):
        def tensors(self) -> dict[str, Tensor]:
            return Recipe.tensors(self) | {"embed_tokens.weight": embeddings.detach().clone()}

    head = eagle_head(Same(embeddings=True).save(tmp_path), target)
    assert head.network.embed_tokens is None


def test_only_its_own_tokens_are_drafted_whatever_the_text_has(target: HFModel, tmp_path: Path) -> None:
    head = eagle_head(Recipe().save(tmp_path), target)
    row, _ = fed(head, target, PROMPT)
    assert head.vocabulary_of(row).tolist() == list(range(0, 61, 2))


def test_what_it_takes_in_a_cache_is_that_of_all_its_layers(target: HFModel, tmp_path: Path) -> None:
    one = eagle_head(Recipe().save(tmp_path / "one"), target).capabilities.slot_bytes
    two = eagle_head(replace(Recipe(), flags={"num_hidden_layers": 2}).save(tmp_path / "two"), target)
    assert two.capabilities.slot_bytes == 2 * one == 2 * 2 * 2 * 8 * 4
    assert (
        json.loads((tmp_path / "two" / "config.json").read_text())["transformer_layer_config"]["num_hidden_layers"] == 2
    )
