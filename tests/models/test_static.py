"""Passes of few shapes: the same results as passes of any shape."""

from __future__ import annotations

from random import Random

import pytest
import torch

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.errors import ConfigError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface import HFModel
from draftree.models.runner import StaticRunner

from ..pairs import drafter, policy
from ..tiny import FAMILIES, MAX_LENGTH, tiny
from .trees import assert_cached, assert_close, expected, random_ids, random_tree


def static(kind: str = "llama", attention: str = "sdpa") -> HFModel:
    return HFModel(tiny(kind, attention=attention), runner="static", self_test=False)


def shapes(model: HFModel) -> list[tuple[int, ...]]:
    assert isinstance(model._stock, StaticRunner)
    return model._stock.shapes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_of_different_widths_are_those_of_the_causal_forward(kind: str, attention: str) -> None:
    rng, model = Random(0), static(kind, attention)
    prompts = [random_ids(rng, n) for n in (9, 4, 17)]
    rows = [prefill(model, prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        assert_close(row.logits, expected(kind, prompt[:-1], Nodes.chain(prompt[-1:]))[0])
    for sizes in ((40, 1, 12), (3, 3, 3), (1, 1, 1), (6, 2, 5)):
        trees = [random_tree(rng, n) for n in sizes]
        logits = model.extend(rows, trees)
        for line, row, prompt, tree in zip(logits, rows, prompts, trees, strict=True):
            assert_close(line[: tree.logits], expected(kind, prompt, tree))
            model.commit(row, [])
    assert_close(model.extend(rows[2:], trees[2:])[0], expected(kind, prompts[2], trees[2]))


def test_a_pass_of_a_full_bucket_is_bit_equal() -> None:
    rng, model = Random(1), HFModel(tiny(), self_test=False)
    row, tree = prefill(model, random_ids(rng, 64 - 8)), random_tree(rng, 8)
    wanted = model.extend([row], [tree])
    model.commit(row, [])
    model._stock = StaticRunner(model.model)
    assert torch.equal(model.extend([row], [tree]), wanted)


def test_sequences_that_outgrow_their_bucket_stay_exact() -> None:
    """What fills up a pass lies in a slot that tokens get later."""
    rng, model = Random(2), static()
    texts = [random_ids(rng, 60), random_ids(rng, 3)]
    rows = [prefill(model, text) for text in texts]
    while rows[0].length < MAX_LENGTH - 4:
        fed = [random_ids(rng, 3), random_ids(rng, 1)]
        model.extend(rows, [Nodes.chain(tokens) for tokens in fed])
        for row, text, tokens in zip(rows, texts, fed, strict=True):
            model.commit(row, range(len(tokens)))
            text += tokens
    for row, text in zip(rows, texts, strict=True):
        assert_cached(model, "llama", row, text)


def test_passes_have_few_shapes() -> None:
    rng, model = Random(3), static()
    row = prefill(model, random_ids(rng, 20))
    before = len(shapes(model))
    for size in range(1, 33):
        model.extend([row], [random_tree(rng, size)])
        model.commit(row, [])
    assert len(shapes(model)) - before == 6, "1, 2, 4, 8, 16 and 32 tokens"


def test_hidden_states_and_wanted_logits_are_cut_to_what_is_there() -> None:
    model, prompt = static(), [3, 1, 4, 1, 5]
    model.track_features()
    row = model.open()
    assert model.extend([row], [Nodes.chain(prompt, wanted=0)]).shape[1] == 0
    model.commit(row, range(5))
    assert_close(row.waiting_features(), model.model.base_model(input_ids=torch.tensor([prompt]))[0][0])


def test_rows_are_fed_in_step() -> None:
    rng, model = Random(4), static()
    model.reserve(3, 70)
    text = [random_ids(rng, 5) for _ in range(3)]
    for at in range(5):
        logits, _ = model.feed(torch.tensor([line[at] for line in text]), torch.full((3,), at), 64)
    for found, line in zip(logits, text, strict=True):
        assert_close(found, expected("llama", line[:-1], Nodes.chain(line[-1:]))[0])


def test_the_output_is_that_of_eager_passes() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    want = Engine(HFModel(tiny(), self_test=False)).generate([[1, 2, 3], [5]], params)
    model = static()
    found = Engine(model, drafter("lookup", model, policy("opt-tree")), nodes=8).generate([[1, 2, 3], [5]], params)
    assert [g.token_ids for g in found] == [g.token_ids for g in want]


def test_a_twin_has_inputs_of_its_own() -> None:
    model = static()
    twin = model.twin()
    first, second = prefill(model, [1, 2, 3]), prefill(twin, [4, 5])
    assert_cached(model, "llama", first, [1, 2, 3])
    assert_cached(twin, "llama", second, [4, 5])


def test_another_runner_is_refused() -> None:
    with pytest.raises(ConfigError):
        HFModel(tiny(), runner="graph", self_test=False)
