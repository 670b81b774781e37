"""One pass for rows that differ in width: a chunk of a prompt beside trees, each as it is alone."""

from __future__ import annotations

from random import Random

import pytest
import torch

from draftree.models.base import Nodes, Row, prefill
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel

from ..references import extended
from ..tiny import FAMILIES, VOCAB, tiny
from .trees import assert_close, expected, random_ids, random_tree

LENGTHS = (9, 4, 17, 6)


@pytest.mark.parametrize(("size", "wanted"), [(40, None), (60, 1), (60, 0)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_chunk_beside_trees_is_read_as_alone(kind: str, attention: str, size: int, wanted: int | None) -> None:
    rng, model = Random(0), HFModel(tiny(kind, attention=attention), self_test=False)
    prompts = [random_ids(rng, n) for n in LENGTHS]
    rows = [prefill(model, prompt) for prompt in prompts]
    nodes = [Nodes.chain(random_ids(rng, size), wanted), *(random_tree(rng, n) for n in (1, 3, 12))]
    order = [2, 0, 3, 1]
    passes = list[int]()
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    together = extended(model, [rows[i] for i in order], [nodes[i] for i in order])
    assert len(passes) == 1 + (size == 60), "the larger chunk has a pass of its own"
    hook.remove()
    for line, i in zip(together, order, strict=True):
        alone = extended(model, [prefill(model, prompts[i])], [nodes[i]])[0]
        assert alone.shape == (nodes[i].scored, VOCAB)
        assert_close(line[: nodes[i].scored], alone)
    model.commit(rows[0], range(size))
    model.commit(rows[3], [])
    then, read = random_tree(rng, 5), [*prompts[0], *nodes[0].tokens]
    after = extended(model, [rows[3], rows[0]], [Nodes.chain([7]), then])
    assert_close(after[0, :1], expected(kind, prompts[3], Nodes.chain([7])))
    assert_close(after[1], expected(kind, read, then))


def test_empty_rows_read_their_prompts_beside_others() -> None:
    """Two nodes of an empty row need not have an ancestor in common."""
    rng, model = Random(1), HFModel(tiny(), self_test=False)
    prompt, text, roots = (
        random_ids(rng, 8),
        random_ids(rng, 20),
        Nodes([5, 6, 7], [-1, -1, 1]),
    )
    rows = [prefill(model, prompt), model.open(), model.open()]
    logits = extended(model, rows, [Nodes.chain([3]), Nodes.chain(text, wanted=1), roots])
    assert_close(logits[0, :1], expected("llama", prompt, Nodes.chain([3])))
    assert_close(logits[1, :1], expected("llama", text[:-1], Nodes.chain(text[-1:])))
    assert_close(logits[2, 2:3], expected("llama", [6], Nodes.chain([7])))


def test_hidden_states_are_those_of_each_row() -> None:
    rng, model = Random(2), HFModel(tiny(), self_test=False)
    model.track_features()
    texts = [random_ids(rng, n) for n in (30, 2, 7)]
    rows: list[Row] = [model.open() for _ in texts]
    model.extend(rows, [Nodes.chain(text, wanted=0) for text in texts])
    for row, text in zip(rows, texts, strict=True):
        model.commit(row, range(len(text)))
        assert_close(feature_row(row).last_features(), model.model.base_model(input_ids=torch.tensor([text]))[0][0])


def test_committed_hidden_states_do_not_keep_those_of_the_pass() -> None:
    model = HFModel(tiny(), self_test=False)
    model.track_features()
    rows = [model.open(), model.open()]
    model.extend(rows, [Nodes.chain([1, 2]), Nodes.chain([3] * 50)])
    model.commit(rows[0], [0, 1])
    states = feature_row(rows[0]).last_features()
    assert states.untyped_storage().nbytes() == states.nbytes


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_of_a_model_with_an_attention_of_its_own_are_read_one_by_one(kind: str) -> None:
    rng, model = Random(3), HFModel(tiny(kind), self_test=False)
    model.model.set_attn_implementation("eager")
    prompts, trees = [random_ids(rng, n) for n in (5, 9)], [random_tree(rng, n) for n in (7, 2)]
    logits = extended(model, [prefill(model, prompt) for prompt in prompts], trees)
    for line, prompt, tree in zip(logits, prompts, trees, strict=True):
        assert_close(line[: tree.scored], expected(kind, prompt, tree))
