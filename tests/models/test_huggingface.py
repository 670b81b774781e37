"""HFModel against plain causal forwards: nodes (oracle 2), committed caches (oracle 7), ragged batches, contracts."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.errors import CacheError, PromptError, UnsupportedModelError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface import inspection, runner
from draftree.models.huggingface.cache import TreeCache
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.runner import DevicePass, StockRunner

from ..references import extended, prefilled
from ..tiny import FAMILIES, MAX_LENGTH, VOCAB, causal_logits, tiny
from .trees import (
    ATOL,
    SHAPES,
    assert_cached,
    assert_close,
    deepest,
    expected,
    fresh,
    path_to,
    random_ids,
    random_tree,
    reference,
    shallow_tree,
    storage,
)

families = pytest.mark.parametrize("kind", FAMILIES)
shapes = pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)


@families
def test_open_gives_the_logits_of_the_last_prompt_token(kind: str) -> None:
    prompt = random_ids(Random(0), 9)
    assert_close(prefilled(fresh(kind), prompt)[1], causal_logits(reference(kind), prompt)[-1])


@families
def test_open_computes_the_logits_of_the_last_prompt_token_only(kind: str) -> None:
    model, shapes = fresh(kind), []
    model.model.register_forward_hook(lambda _module, _args, out: shapes.append(out.logits.shape))
    prefill(model, [1, 2, 3, 4])
    assert shapes == [(1, 1, VOCAB)]


def test_open_takes_the_last_logits_of_a_model_that_computes_them_all() -> None:
    model, prompt = fresh("llama"), [1, 2, 3, 4]
    assert isinstance(model._runner, StockRunner)
    model._runner._selects = False
    assert_close(prefilled(model, prompt)[1], causal_logits(reference("llama"), prompt)[-1])


@families
@shapes
def test_logits_at_each_node_equal_the_causal_forward_on_its_path(kind: str, parents: list[int]) -> None:
    rng = Random(1)
    model, prompt, tree = fresh(kind), random_ids(rng, 8), Nodes(random_ids(rng, len(parents)), parents)
    assert_close(extended(model, [prefill(model, prompt)], [tree])[0], expected(kind, prompt, tree))


@families
def test_logits_of_random_trees_equal_the_causal_forwards(kind: str) -> None:
    rng, model = Random(2), fresh(kind)
    for size in (1, 5, 13, 24):
        prompt, tree = random_ids(rng, rng.randint(1, 30)), random_tree(rng, size)
        assert_close(extended(model, [prefill(model, prompt)], [tree])[0], expected(kind, prompt, tree))


@families
@shapes
def test_nodes_may_arrive_in_several_calls(kind: str, parents: list[int]) -> None:
    rng = Random(3)
    model, prompt, tree = fresh(kind), random_ids(rng, 6), Nodes(random_ids(rng, len(parents)), parents)
    row, parts = prefill(model, prompt), []
    for part in (slice(0, 1), slice(1, 4), slice(4, None)):
        parts.append(extended(model, [row], [Nodes(tree.tokens[part], tree.parents[part])])[0])
    assert_close(torch.cat(parts), expected(kind, prompt, tree))


@given(data=st.data(), size=st.integers(1, 16))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_tree_in_any_parts_commits_any_path(data: st.DataObject, size: int) -> None:
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
    cut, leaf = data.draw(st.integers(0, size)), data.draw(st.integers(-1, size - 1))
    tree, prompt = Nodes([(5 * i + 3) % VOCAB for i in range(size)], parents), [9, 2, 31]
    model = _shared()
    row = prefill(model, prompt)
    parts = [extended(model, [row], [Nodes(tree.tokens[s], tree.parents[s])])[0] for s in _parts(cut, size)]
    assert_close(torch.cat(parts), expected("llama", prompt, tree))
    path = path_to(parents, leaf)
    model.commit(row, path)
    assert_cached(model, "llama", row, [*prompt, *(tree.tokens[node] for node in path)])
    model.close(row)


@functools.cache
def _shared() -> HFModel:
    return fresh("llama")


def _parts(cut: int, size: int) -> list[slice]:
    return [s for s in (slice(0, cut), slice(cut, size)) if s.stop > s.start]


@families
def test_the_committed_cache_equals_a_fresh_prefill_after_many_commits_and_growths(kind: str) -> None:
    rng, model = Random(9), fresh(kind)
    ids = random_ids(rng, 5)
    row = prefill(model, ids)
    assert model.cache.placement.slots == 64
    while row.length < MAX_LENGTH - 1:
        tree = shallow_tree(rng, 14, MAX_LENGTH - row.length)
        model.extend([row], [tree])
        path = deepest(tree.parents)[: rng.randint(0, 5)]
        model.commit(row, path)
        ids += [tree.tokens[node] for node in path]
    assert model.cache.placement.slots == 256, "the cache doubled twice"
    assert_cached(model, kind, row, ids)


@families
def test_a_committed_path_out_of_slot_order_answers_as_its_tokens_do(kind: str) -> None:
    rng, model = Random(10), fresh(kind)
    prompt, tree = random_ids(rng, 7), Nodes(random_ids(rng, 12), SHAPES["binary"])
    row = prefill(model, prompt)
    model.extend([row], [tree])
    model.commit(row, [1, 5, 11])
    ids, then = [*prompt, *(tree.tokens[node] for node in (1, 5, 11))], random_tree(rng, 6)
    assert_close(extended(model, [row], [then])[0], expected(kind, ids, then))


@families
def test_committing_nothing_forgets_the_nodes(kind: str) -> None:
    rng, model = Random(11), fresh(kind)
    prompt, tree = random_ids(rng, 7), random_tree(rng, 6)
    row = prefill(model, prompt)
    model.extend([row], [random_tree(rng, 9)])
    model.commit(row, [])
    assert row.length == 7
    assert_close(extended(model, [row], [tree])[0], expected(kind, prompt, tree))


@pytest.mark.parametrize(
    ("path", "culprit"),
    [
        ([1, 2], "node 2 .* 1$"),
        ([2], "node 2 .*-1"),
        ([0, 4], "node 4"),
        ([-1], "node -1"),
    ],
    ids=["other branch", "no child of the root", "no such node", "the root"],
)
def test_commit_of_a_non_path_raises_cache_error(path: list[int], culprit: str) -> None:
    model = fresh("llama")
    row = prefill(model, [1, 2, 3])
    model.extend([row], [Nodes([4, 5, 6, 7], [-1, -1, 0, 1])])
    with pytest.raises(CacheError, match=culprit):
        model.commit(row, path)


def test_a_refused_commit_leaves_the_row_as_it_was() -> None:
    model = fresh("llama")
    row = prefill(model, [1, 2, 3])
    model.extend([row], [Nodes([4, 5, 6, 7], [-1, -1, 0, 1])])
    with pytest.raises(CacheError):
        model.commit(row, [1, 2])
    model.commit(row, [1, 3])
    assert_cached(model, "llama", row, [1, 2, 3, 5, 7])


def test_the_last_position_of_the_context_can_be_used() -> None:
    rng, model = Random(16), fresh("gpt2")
    prompt = random_ids(rng, MAX_LENGTH - 2)
    tree = Nodes([1, 2, 3], [-1, -1, 0])
    assert_close(extended(model, [prefill(model, prompt)], [tree])[0], expected("gpt2", prompt, tree))


def test_a_node_beyond_the_longest_sequence_raises_cache_error() -> None:
    model = fresh("llama")
    row = prefill(model, random_ids(Random(17), MAX_LENGTH - 2))
    with pytest.raises(CacheError, match=f"position {MAX_LENGTH} .*{MAX_LENGTH} tokens .*llama"):
        model.extend([row], [Nodes.chain([1, 2, 3])])


def test_a_refused_extend_leaves_its_rows_as_they_were() -> None:
    """Nodes that were refused once stayed in the row, so that the next tree hung below slots nobody had written."""
    model = fresh("llama")
    prompts = [random_ids(Random(18), n) for n in (6, MAX_LENGTH - 2)]
    rows = [prefill(model, p) for p in prompts]
    with pytest.raises(CacheError):
        model.extend(rows, [Nodes.chain([1, 2, 3]), Nodes.chain([1, 2, 3])])
    logits = extended(model, rows, [Nodes.chain([4, 5]), Nodes.chain([4, 5])])
    for b, prompt in enumerate(prompts):
        assert_close(logits[b], expected("llama", prompt, Nodes.chain([4, 5])))


@pytest.mark.parametrize(
    ("prompt", "culprit"),
    [
        ([], "empty"),
        ([1] * (MAX_LENGTH + 1), f"{MAX_LENGTH + 1} tokens .*llama .*{MAX_LENGTH} "),
        ([1, VOCAB, 2], f"{VOCAB} .*llama .*0 to {VOCAB - 1}"),
        ([1, -3, 2], f"-3 .*llama .*0 to {VOCAB - 1}"),
    ],
    ids=["empty", "too long", "above", "below"],
)
def test_a_prompt_that_cannot_be_read_raises_prompt_error_naming_the_value(prompt: list[int], culprit: str) -> None:
    with pytest.raises(PromptError, match=culprit):
        prefill(fresh("llama"), prompt)


def test_a_refused_prompt_opens_no_row() -> None:
    model = fresh("llama")
    with pytest.raises(PromptError):
        prefill(model, [VOCAB])
    assert prefill(model, [1, 2]).number == 0


def test_a_prompt_that_fills_the_context_is_taken() -> None:
    prompt = random_ids(Random(19), MAX_LENGTH)
    assert_close(prefilled(fresh("opt"), prompt)[1], causal_logits(reference("opt"), prompt)[-1])


def test_reserve_makes_room_so_that_the_cache_need_not_grow() -> None:
    model = fresh("llama")
    model.reserve(2, 100)
    rows = [prefill(model, [1, 2, 3]), prefill(model, [4])]
    keys = storage(model.cache)[0][0]
    for row in rows:
        model.extend([row], [Nodes.chain([5] * 90)])
        model.commit(row, range(90))
    assert storage(model.cache)[0][0].data_ptr() == keys.data_ptr()


def test_it_holds_as_many_rows_as_the_memory_of_its_cache_takes() -> None:
    model = fresh("llama")
    model.cache_bytes = 4 * 64 * model.capabilities.slot_bytes
    assert model.holds([])
    assert model.holds([64, 3, 10, 1])
    assert not model.holds([65, 3, 10]), "all rows are as long as the longest, to the grain"
    assert model.holds([65, 3])


def test_what_graphs_fill_their_passes_up_to_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    monkeypatch.setattr(model._runner, "slots", lambda tokens: 2 * tokens)
    model.cache_bytes = 5 * 64 * model.capabilities.slot_bytes
    assert model.holds([32] * 5) and not model.holds([33] * 5)


def test_its_cache_does_not_double_beyond_its_memory() -> None:
    model = fresh("llama")
    model.cache_bytes = 5 * 64 * model.capabilities.slot_bytes
    for rows in (1, 2, 4, 4, 5):
        prefill(model, [1] * 60)
        assert storage(model.cache)[0][0].shape[::2] == (rows, 64)


def test_passes_are_timed_without_prefills() -> None:
    model = fresh("llama")
    row = prefill(model, [1, 2, 3])
    assert model.pass_seconds == 0.0
    model.extend([row], [Nodes.chain([4])])
    assert model.pass_seconds > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@families
def test_either_attention_gives_the_same_logits(kind: str, attention: str) -> None:
    rng, model = Random(20), HFModel(tiny(kind, attention=attention), name=kind)
    prompts, trees = [random_ids(rng, n) for n in (6, 13)], [random_tree(rng, n) for n in (11, 4)]
    logits = extended(model, [prefill(model, p) for p in prompts], trees)
    for b, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        assert_close(logits[b, : len(tree.tokens)], expected(kind, prompt, tree))


def open_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Every node sees every slot."""
    return torch.zeros(mask.shape)


def depthless_positions(make: Any) -> Any:
    """Positions count slots, as a model does that is given none."""

    def count_slots(self: StockRunner, step: DevicePass, cache: TreeCache) -> Any:
        end = cache.placement.end
        step.inputs.positions = torch.arange(end - len(step.inputs.tokens), end)
        return make(self, step, cache)

    return count_slots


@families
@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_a_model_that_ignores_mask_or_positions_would_be_seen(
    kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with either of them broken, the node logits are wrong and the self-test refuses the model."""
    rng, model = Random(21), fresh(kind)
    if fault == "mask":
        monkeypatch.setattr(runner, "additive", open_mask)
    else:
        monkeypatch.setattr(StockRunner, "make", depthless_positions(StockRunner.make))
    prompt, tree = random_ids(rng, 8), Nodes(random_ids(rng, 6), SHAPES["two branches"])
    logits, wanted = extended(model, [prefill(model, prompt)], [tree])[0], expected(kind, prompt, tree)
    assert (logits - wanted).abs().max() > 1000 * ATOL
    assert not torch.equal(logits.argmax(-1), wanted.argmax(-1))
    with pytest.raises(UnsupportedModelError, match=f"{kind} .*self-test.*attn_implementation"):
        inspection.self_test(model)
