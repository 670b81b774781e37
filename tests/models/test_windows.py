"""Sliding windows beyond their length: logits and ids are transformers' own, whatever is drafted.

A window is of positions along the path of a tree, not of the slots that its nodes lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Speculation
from draftree.errors import PromptError, UnsupportedModelError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface import masks
from draftree.models.huggingface.cache import TreeCache
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.opt_tree import OptTree

from ..heads import random_head
from ..pairs import drafter, policy
from ..references import extended, generate_greedily, prefilled
from ..tiny import MAX_LENGTH, VOCAB, WINDOW, WINDOWED, causal_logits, tiny
from .trees import (
    SHAPES,
    assert_cached,
    assert_close,
    deepest,
    expected,
    fresh,
    random_ids,
    random_tree,
    reference,
    shallow_tree,
)

LONG = 5 * WINDOW
PROMPTS = [random_ids(Random(n), n) for n in (LONG, 11, 3)]
ON_SDPA = [kind for kind in WINDOWED if kind != "gpt_oss_window"]
every = pytest.mark.parametrize("kind", WINDOWED)
with_attentions = pytest.mark.parametrize(
    ("kind", "attention"), [("gpt_oss_window", "eager"), *product(ON_SDPA, ("sdpa", "eager"))]
)
"""gpt-oss adds sinks to scores, which SDPA does not know."""


@pytest.mark.parametrize("chunk", [None, 5])
@with_attentions
def test_greedy_ids_are_those_of_generate(kind: str, attention: str, chunk: int | None) -> None:
    """Beside one another, with prompts in one piece and in several."""
    engine = Engine(HFModel(tiny(kind, attention=attention)), scheduling=SchedulerParams(rows=3, chunk=chunk))
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=LONG, ignore_eos=True))
    stock = tiny(kind, attention=attention)
    assert [each.token_ids for each in found] == [generate_greedily(stock, prompt, LONG) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("method", "source", "runner", "temperature"),
    [
        ("opt-tree", "relative", "eager", 0.0),
        ("eagle2", "relative", "graph", 1.0),
        ("static", "lookup+relative", "eager", 1.0),
        ("opt-tree", "lookup", "graph", 0.0),
    ],
)
@every
def test_drafted_texts_are_those_of_ar_decoding(
    kind: str, method: str, source: str, runner: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model has windows, too; accepted nodes are moved to other slots."""
    moved, compact = list[bool](), TreeCache.compact

    def watched(cache: TreeCache, row: int, start: int, path: Sequence[int]) -> Tensor | None:
        order = compact(cache, row, start, path)
        moved.append(order is not None)
        return order

    monkeypatch.setattr(TreeCache, "compact", watched)
    params = SamplingParams(max_tokens=LONG, temperature=temperature, seed=5, ignore_eos=True)
    target = HFModel(tiny(kind), runner=runner)
    want = [Engine(target).generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    speculation = Speculation(drafter(source, target, policy(method), kind), 8)
    found = Engine(target, speculation).generate(PROMPTS, params)
    assert [each.token_ids for each in found] == want
    if source != "lookup":
        assert any(moved) and sum(sum(each.stats.accepted) for each in found) > 0


@every
def test_a_draft_head_drafts_for_it(kind: str) -> None:
    target, params = HFModel(tiny(kind)), SamplingParams(max_tokens=LONG, ignore_eos=True)
    want = [Engine(target).generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    source = EagleSource(random_head(target), VOCAB)
    found = Engine(target, Speculation(TreeDrafter(OptTree(), source), 8)).generate(PROMPTS, params)
    assert [each.token_ids for each in found] == want
    assert sum(sum(each.stats.drafted) for each in found) > 0


@with_attentions
def test_a_prompt_has_the_logits_of_the_causal_forward(kind: str, attention: str) -> None:
    """In one piece an empty row takes the model's own masks."""
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, LONG):
        prompt = random_ids(Random(length), length)
        model = HFModel(tiny(kind, attention=attention))
        assert_close(prefilled(model, prompt)[1], causal_logits(reference(kind), prompt)[-1])


@pytest.mark.parametrize("parents", [*SHAPES.values(), [-1, *range(2 * WINDOW)]], ids=[*SHAPES, "longer than a window"])
@every
def test_nodes_have_the_logits_of_their_paths(kind: str, parents: list[int]) -> None:
    """In two calls, below a text that the window has left behind, and below one that it has not."""
    for length in (LONG, 3):
        rng, model = Random(length), fresh(kind)
        prompt, tree = random_ids(rng, length), Nodes(random_ids(rng, len(parents)), parents)
        row, cut = prefill(model, prompt), len(parents) // 2
        parts = [Nodes(tree.tokens[part], parents[part]) for part in (slice(0, cut), slice(cut, None))]
        logits = torch.cat([extended(model, [row], [part])[0] for part in parts])
        assert_close(logits, expected(kind, prompt, tree))


@pytest.mark.parametrize("runner", ["eager", "graph"])
@with_attentions
def test_rows_beside_one_another_have_windows_of_their_own(kind: str, attention: str, runner: str) -> None:
    rng, model = Random(1), HFModel(tiny(kind, attention=attention), runner=runner)
    prompts = [random_ids(rng, n) for n in (2, LONG, 2 * WINDOW, WINDOW)]
    rows = [prefill(model, prompt) for prompt in prompts]
    for sizes in ((40, 1, 12, 5), (3, 3, 3, 3), (1, 1, 1, 1)):
        trees = [random_tree(rng, size) for size in sizes]
        logits = extended(model, rows, trees)
        for line, row, prompt, tree in zip(logits, rows, prompts, trees, strict=True):
            assert_close(line[: tree.scored], expected(kind, prompt, tree))
            model.commit(row, [])


@every
def test_a_row_is_exact_after_many_commits_that_move_slots_and_a_fork(kind: str) -> None:
    rng, model = Random(9), fresh(kind)
    ids = random_ids(rng, 5)
    row = prefill(model, ids)
    while row.length < MAX_LENGTH - 1:
        tree = shallow_tree(rng, 14, MAX_LENGTH - row.length)
        model.extend([row], [tree])
        path = deepest(tree.parents)[: rng.randint(0, 5)]
        model.commit(row, path)
        ids += [tree.tokens[node] for node in path]
    assert_cached(model, kind, row, ids)
    fork, tree = model.fork(row, LONG), random_tree(rng, 9)
    assert_close(extended(model, [fork], [tree])[0], expected(kind, ids[:LONG], tree))


def _by_slots(seen: Tensor, window: int) -> Tensor:
    """Of nodes that lie beside others a window of slots has fewer ancestors than one of positions."""
    slots = torch.arange(seen.shape[-1])
    last = (seen * slots).amax(-1, keepdim=True)
    return seen & (slots > last - window)


def _wider(seen: Tensor, window: int) -> Tensor:
    return _within(seen, window + 1)


_within = masks.within


@pytest.mark.parametrize("wrong", [_by_slots, _wider])
@every
def test_another_window_has_other_logits(
    kind: str, wrong: Callable[[Tensor, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other tests here stand on."""
    rng, model = Random(4), fresh(kind)
    prompt, tree = random_ids(rng, LONG), Nodes(random_ids(rng, 12), SHAPES["binary"])
    row, wanted = prefill(model, prompt), expected(kind, prompt, tree)
    assert_close(extended(model, [row], [tree])[0], wanted)
    model.commit(row, [])
    monkeypatch.setattr(masks, "within", wrong)
    assert (extended(model, [row], [tree])[0] - wanted).abs().max() > 0.05


@every
def test_the_self_test_goes_beyond_the_window(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "within", _by_slots)
    model = tiny(kind)
    model.config.get_text_config().sliding_window = MAX_LENGTH
    with pytest.raises(UnsupportedModelError, match="self-test"):
        HFModel(model)
    assert model.config.get_text_config().sliding_window == MAX_LENGTH


@every
def test_a_window_that_the_model_reads_in_another_way_limits_the_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "within", _wider)
    can = HFModel(tiny(kind)).capabilities
    assert can.max_length == WINDOW and "sliding_window" in can.max_length_reason


@pytest.mark.parametrize("layers", [None, ["sliding_attention", "full_attention"]], ids=["no types", "types"])
def test_windows_of_a_model_that_takes_no_masks_for_them_limit_the_length(layers: list[str] | None) -> None:
    """This one makes masks without windows, whatever its config says, and takes one."""
    model = tiny("llama")
    model.config.sliding_window = WINDOW
    if layers:
        model.config.layer_types = layers
    target = HFModel(model)
    assert target.capabilities.max_length == WINDOW
    with pytest.raises(PromptError, match="sliding_window"):
        prefill(target, [1] * (WINDOW + 1))
    assert_close(prefilled(target, [5, 6, 7])[1], causal_logits(reference("llama"), [5, 6, 7])[-1])


def test_a_window_that_no_layer_has_limits_nothing() -> None:
    model = tiny("qwen2")
    model.config.sliding_window = WINDOW
    assert model.config.layer_types == ["full_attention", "full_attention"]
    assert HFModel(model).capabilities.max_length == MAX_LENGTH


@every
def test_the_stock_model_keeps_its_window(kind: str) -> None:
    model, text = tiny(kind), random_ids(Random(3), LONG)
    before = causal_logits(model, text)
    HFModel(model)
    assert model.config.get_text_config().sliding_window == WINDOW
    torch.testing.assert_close(causal_logits(model, text), before, atol=1e-5, rtol=0)
