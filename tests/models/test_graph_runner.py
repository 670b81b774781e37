"""Passes of few shapes: the same results as passes of any shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random

import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError, DraftreeWarning
from draftree.models.base import FeatureSpec, Nodes, prefill
from draftree.models.huggingface import cache, runner
from draftree.models.huggingface.cache import TreeCache, feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.pass_inputs import Placement, Shape
from draftree.models.huggingface.runner import GraphRunner, PassOutput, StockRunner, chosen_runner

from ..pairs import drafter, policy
from ..references import extended, prefilled
from ..tiny import FAMILIES, MAX_LENGTH, tiny
from .trees import assert_cached, assert_close, expected, random_ids, random_tree


def graphs(kind: str = "llama", attention: str = "sdpa") -> HFModel:
    return HFModel(tiny(kind, attention=attention), runner="graph", self_test=False)


def shapes(model: HFModel) -> list[Shape]:
    assert isinstance(model._runner, GraphRunner)
    return [*model._runner._inputs]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_of_different_widths_are_those_of_the_causal_forward(kind: str, attention: str) -> None:
    rng, model = Random(0), graphs(kind, attention)
    prompts = [random_ids(rng, n) for n in (9, 4, 17)]
    rows, first = zip(*(prefilled(model, prompt) for prompt in prompts), strict=True)
    for logits, prompt in zip(first, prompts, strict=True):
        assert_close(logits, expected(kind, prompt[:-1], Nodes.chain(prompt[-1:]))[0])
    for sizes in ((40, 1, 12), (3, 3, 3), (1, 1, 1), (6, 2, 5)):
        trees = [random_tree(rng, n) for n in sizes]
        logits = extended(model, rows, trees)
        for line, row, prompt, tree in zip(logits, rows, prompts, trees, strict=True):
            assert_close(line[: tree.scored], expected(kind, prompt, tree))
            model.commit(row, [])
    assert_close(extended(model, rows[2:], trees[2:])[0], expected(kind, prompts[2], trees[2]))


def test_a_pass_of_a_full_bucket_is_bit_equal() -> None:
    rng, model = Random(1), HFModel(tiny(), self_test=False)
    row, tree = prefill(model, random_ids(rng, 64 - 8)), random_tree(rng, 8)
    wanted = extended(model, [row], [tree])
    model.commit(row, [])
    model._runner = GraphRunner(StockRunner(model.model))
    assert torch.equal(extended(model, [row], [tree]), wanted)


def test_sequences_that_outgrow_their_bucket_stay_exact() -> None:
    """What fills up a pass lies in a slot that tokens get later."""
    rng, model = Random(2), graphs()
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
    rng, model = Random(3), graphs()
    row = prefill(model, random_ids(rng, 20))
    before = len(shapes(model))
    for size in range(1, 33):
        model.extend([row], [random_tree(rng, size)])
        model.commit(row, [])
    assert len(shapes(model)) - before == 6, "1, 2, 4, 8, 16 and 32 tokens"


def test_hidden_states_and_wanted_logits_are_cut_to_what_is_there() -> None:
    model, prompt = graphs(), [3, 1, 4, 1, 5]
    model.track_features()
    row = model.open()
    assert extended(model, [row], [Nodes.chain(prompt, wanted=0)]).shape[1] == 0
    model.commit(row, range(5))
    assert_close(feature_row(row).last_features(), model.model.base_model(input_ids=torch.tensor([prompt]))[0][0])


def test_the_output_is_that_of_eager_passes() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    want = Engine(HFModel(tiny(), self_test=False)).generate([[1, 2, 3], [5]], params)
    model = graphs()
    found = Engine(model, Speculation(drafter("lookup", model, policy("opt-tree")), 8)).generate(
        [[1, 2, 3], [5]], params
    )
    assert [g.token_ids for g in found] == [g.token_ids for g in want]


def test_a_twin_has_inputs_of_its_own() -> None:
    model = graphs()
    twin = model.twin()
    first, second = prefill(model, [1, 2, 3]), prefill(twin, [4, 5])
    assert_cached(model, "llama", first, [1, 2, 3])
    assert_cached(twin, "llama", second, [4, 5])


def test_another_runner_is_refused() -> None:
    with pytest.raises(ConfigError, match="static.*eager, graph"):
        HFModel(tiny(), runner="static", self_test=False)


class Frozen:
    """Stands for CUDA's capture: a pass is made again where it was placed when it was captured, into the same memory.

    Attributes:
        tried, made, replayed: captures that were begun, passes that were captured, and how often they were made again.

    Args:
        cache: where they write.
        refused: why it captures nothing.
    """

    def __init__(self, cache: Callable[[], TreeCache], refused: str = "") -> None:
        self._cache, self._refused, self.tried, self.made, self.replayed = cache, refused, 0, 0, 0
        self._given = list[PassOutput]()

    def __call__(self, make: Callable[[], PassOutput]) -> Callable[[], PassOutput]:
        self.tried += 1
        if self._refused:
            raise RuntimeError(self._refused)
        at = replace(self._cache().placement)
        storage, made = self._storage(), make()
        self.made += 1
        self._given.append(made)

        def again() -> PassOutput:
            assert all(a is b for a, b in zip(storage, self._storage(), strict=True)), "the storage has moved"
            self.replayed += 1
            now = self._cache().placement
            wanted = replace(now)
            _set(now, at)
            try:
                fresh = make()
            finally:
                _set(now, wanted)
            for former in self._given:  # graphs share memory: a replay may write over what any of them has made
                for tensor in _tensors(former):
                    tensor.fill_(7)
            for tensor, new in zip(_tensors(made), _tensors(fresh), strict=True):
                tensor.copy_(new)
            return made

        return again

    def _storage(self) -> list[Tensor]:
        return [*self._cache().blocks]


def _tensors(made: PassOutput) -> list[Tensor]:
    """What it has computed; ids that are the head's own vocabulary stay where they are."""
    ids = None if made.ids is None or made.ids._is_view() else made.ids
    return [tensor for tensor in (made.states, made.logits, ids, made.best) if tensor is not None]


def _set(placement: Placement, to: Placement) -> None:
    for one in fields(Placement):
        setattr(placement, one.name, getattr(to, one.name))


def frozen(kind: str = "llama", refused: str = "") -> tuple[HFModel, Frozen]:
    model = graphs(kind)
    capture = Frozen(lambda: model.cache, refused)
    model._runner = GraphRunner(StockRunner(model.model), lambda: capture)
    return model, capture


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_was_captured_is_right_wherever_it_is_replayed(kind: str) -> None:
    """Rows open, close and grow; each pass that is replayed was frozen at another time, for other rows and trees."""
    rng = Random(5)
    model, capture = frozen(kind)
    texts = [random_ids(rng, n) for n in (5, 9, 3)]
    rows = [prefill(model, text) for text in texts]
    for step in range(36):
        some = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        trees = [random_tree(rng, rng.choice((2, 3, 4))) for _ in some]
        logits = extended(model, [rows[i] for i in some], trees)
        for line, i, tree in zip(logits, some, trees, strict=True):
            assert_close(line[: tree.scored], expected(kind, texts[i], tree))
            kept = [0] if len(texts[i]) < MAX_LENGTH - 8 else []
            model.commit(rows[i], kept)
            texts[i] += [tree.tokens[node] for node in kept]
        if step % 9 == 8:
            at = rng.randrange(len(rows))
            model.close(rows[at])
            texts[at] = random_ids(rng, rng.randint(1, 70))
            rows[at] = prefill(model, texts[at])
    assert capture.replayed > 2 * capture.made > 0


def test_what_was_captured_is_bit_equal_to_the_same_passes_without() -> None:
    """Rows outgrow their storage on the way, and what was captured before is not replayed then."""
    rng, (model, capture), plain = Random(8), frozen(), graphs()
    texts = [random_ids(rng, n) for n in (40, 5)]
    rows = [[prefill(each, text) for text in texts] for each in (model, plain)]
    slots = set[int]()
    for _ in range(40):
        some = sorted(rng.sample(range(2), rng.randint(1, 2)))
        trees = [random_tree(rng, rng.choice((2, 3, 4))) for _ in some]
        found, want = (extended(m, [own[i] for i in some], trees) for m, own in zip((model, plain), rows, strict=True))
        assert torch.equal(found.nan_to_num(), want.nan_to_num())
        for i in some:
            for each, own in zip((model, plain), rows, strict=True):
                each.commit(own[i], [0])
        slots.add(model.cache.placement.slots)
    assert len(slots) > 1 and capture.replayed > capture.made > 0


def test_storage_and_graphs_outlive_requests_that_fit() -> None:
    """It is allotted for a request's last pass when the request begins: graphs write to where it lies."""
    model, capture = frozen()
    engine, params = Engine(model), SamplingParams(max_tokens=70, ignore_eos=True)
    engine.generate([[3, 1, 4, 1, 5]], params)
    storage, made = [held.data_ptr() for held in model.cache.blocks], capture.made
    assert made == 2, "one for passes over up to 64 slots, and one for those over 128"
    engine.generate([[2, 7, 1, 8]], params)
    assert [held.data_ptr() for held in model.cache.blocks] == storage
    assert capture.made == made and capture.replayed > 120


def test_a_device_with_graphs_makes_its_passes_by_them() -> None:
    assert {chosen_runner(None, device) for device in ("cuda", "cuda:1")} == {"graph"}
    assert {chosen_runner(None, device) for device in ("cpu", "mps")} == {"eager"}
    assert [chosen_runner(name, "cuda") for name in ("eager", "graph")] == ["eager", "graph"]
    assert HFModel(tiny(), self_test=False).capabilities.runner == "eager"


def test_a_replay_writes_over_nothing_that_was_given_away() -> None:
    rng = Random(6)
    model, capture = frozen()
    model.track_features()
    model._runner = GraphRunner(StockRunner(model.model, model._hidden), lambda: capture)
    row, other = (prefill(model, random_ids(rng, 5)) for _ in range(2))
    held = list[tuple[Tensor, Tensor]]()
    for _ in range(4):
        for own in (row, other):
            model.extend([own], [random_tree(rng, 4)])
            pending = feature_row(own).pending
            assert pending is not None
            held.append((pending, pending.clone()))
        model.commit(row, [])
        model.commit(other, [])
    assert capture.replayed >= 4
    assert all(torch.equal(states, before) for states, before in held)


def test_two_passes_of_a_call_keep_the_logits_of_both() -> None:
    """A row with far more tokens than the others has a pass of its own, which may write to where theirs did."""
    rng = Random(8)
    model, capture = frozen()
    rows = [prefill(model, random_ids(rng, 5)) for _ in range(3)]
    for _ in range(4):
        ids = [random_ids(rng, count) for count in (1, 1, 40)]
        found = extended(model, rows, [Nodes.chain(own, 1) for own in ids])[:, 0]
        for row in rows:
            model.commit(row, [])
        for row, own, logits in zip(rows, ids, found, strict=True):
            assert_close(logits, extended(model, [row], [Nodes.chain(own, 1)])[0, 0])
            model.commit(row, [])
    assert capture.replayed >= 4


def test_graphs_stay_where_memory_ends_while_storage_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some keys and values had moved, and by its numbers the storage was as large as before."""
    model, capture = frozen()
    row, calls, zeros = prefill(model, [3, 1, 4]), 0, cache._zeros
    for _ in range(3):
        model.extend([row], [Nodes.chain([5])])
        model.commit(row, [])

    def failing(like: Tensor, *sizes: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return zeros(like, *sizes)

    blocks, size = model.cache.blocks, (model.cache.placement.rows, model.cache.placement.slots)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="of memory"):
        patch.setattr(cache, "_zeros", failing)
        model.reserve(1, 400)
    assert calls == 2 and model.cache.blocks is blocks
    assert (model.cache.placement.rows, model.cache.placement.slots) == size
    made, wanted = capture.made, prefilled(HFModel(tiny(), self_test=False), [3, 1, 4, 5])[1]
    for _ in range(3):
        assert_close(extended(model, [row], [Nodes.chain([5])])[0, 0], wanted)
        model.commit(row, [])
    assert capture.made == made


def test_a_pass_that_keeps_other_hidden_states_is_another_graph() -> None:
    model, capture = frozen()
    model.track_features(FeatureSpec((1,)))
    model._runner = GraphRunner(StockRunner(model.model, model._hidden), lambda: capture)
    for wanted in (FeatureSpec((1,)), FeatureSpec((0, 1))):
        model.track_features(wanted)
        row = prefill(model, [3, 1, 4])
        for _ in range(3):
            model.extend([row], [Nodes.chain([5, 9])])
            model.commit(row, [0, 1])
            assert feature_row(row).last_features(1).shape == (1, 32 * len(model.tracked.layers))
        model.close(row)
    assert capture.made == 2
    assert capture.replayed >= 2


def test_what_cannot_be_captured_is_said_and_made_without() -> None:
    """A capture that fails keeps its memory: none is tried for another shape, or when the storage has moved."""
    model, capture = frozen(refused="operation not permitted when stream is capturing")
    row, rng = prefill(model, [1, 2, 3]), Random(7)
    with pytest.warns(DraftreeWarning, match="not permitted") as said:
        for slots in (60, 400):
            model.reserve(1, slots)
            for size in (2, 2, 2, 4, 4, 4):
                tree = random_tree(rng, size)
                assert_close(extended(model, [row], [tree])[0], expected("llama", [1, 2, 3], tree))
                model.commit(row, [])
    assert (len(said), capture.tried) == (1, 1), "said and tried once"
    assert "not permitted" in model.passes and "shape" in model.passes


def test_graphs_that_are_there_are_left_when_a_capture_fails() -> None:
    model, capture = frozen()
    row = prefill(model, [1, 2, 3])

    def passes(count: int) -> None:
        for _ in range(3):
            model.extend([row], [Nodes.chain([5] * count)])
            model.commit(row, [])

    passes(2)
    capture._refused = "operation not permitted"
    with pytest.warns(DraftreeWarning, match="not permitted"):
        passes(8)
    passes(2)
    assert (capture.tried, capture.made, capture.replayed) == (2, 1, 2)


def test_a_pass_that_cannot_be_captured_leaves_the_others_their_graphs() -> None:
    model, capture = frozen()
    row, refused = prefill(model, [1, 2, 3]), capture._refused

    def passes(count: int) -> None:
        for _ in range(3):
            model.extend([row], [Nodes.chain([5] * count)])
            model.commit(row, [])

    capture._refused = "out of memory"
    with pytest.warns(DraftreeWarning, match="of memory"):
        passes(2)
    capture._refused = refused
    passes(4)
    assert (capture.made, capture.replayed) == (1, 2)
    passes(2)
    assert (capture.made, capture.replayed) == (1, 2), "it is not tried again"


def test_the_graph_that_was_replayed_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that had been made first did, though each pass of an answer replayed it."""
    monkeypatch.setattr(runner, "_KEPT", 2)
    model, capture = frozen()
    row, made = prefill(model, [1, 2, 3]), list[int]()
    for count in (1, 2, 1, 8, 1, 2):
        for _ in range(3):
            model.extend([row], [Nodes.chain([5] * count)])
            model.commit(row, [])
        made.append(capture.made)
    assert made == [1, 2, 2, 3, 3, 4]


def test_graphs_of_another_storage_share_no_memory_with_those_that_are_gone() -> None:
    """PyTorch refuses a pool whose graphs are all gone: what the self-test captured, or a shorter context."""
    pools = list[object]()

    class Pool:
        """CUDA's captures of one pool, which is given back with the last of its graphs."""

        def __init__(self) -> None:
            self.given_back = False
            pools.append(self)

        def __call__(self, make: Callable[[], PassOutput]) -> Callable[[], PassOutput]:
            if self.given_back:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            graph = self

            class Graph:
                def __call__(self) -> PassOutput:
                    return make()

                def __del__(self) -> None:
                    graph.given_back = True

            return Graph()

    model = graphs()
    model._runner = GraphRunner(StockRunner(model.model), Pool)
    for length in (5, 70):
        model.reserve(1, length)
        row = prefill(model, [7] * (length - 4))
        for _ in range(3):
            model.extend([row], [Nodes.chain([5])])
            model.commit(row, [])
        model.close(row)
    assert (model.passes, len(pools)) == ("CUDA graphs", 2)


def test_a_processor_says_that_it_captures_nothing() -> None:
    assert graphs().passes == "device cpu has no CUDA graphs"
    assert HFModel(tiny(), self_test=False).passes == "the model's own forward"
