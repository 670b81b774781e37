"""Decoding with draft heads in the native engine: ids are AR decoding's, and no other request changes a draft."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftree import Engine, Generation, SamplingParams, SchedulerParams, Speculation
from draftree.config import Budget
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.replay import Replay
from draftree.models.cost_profile import profile_of
from draftree.models.heads.head_folder import load_head
from draftree.models.measuring import Grid, measure
from draftree.models.native.native_head import NativeHead
from draftree.models.native.native_model import NativeModel
from draftree.papers.opt_tree import OptTree
from draftree.policies.base import Plan
from draftree.policies.methods import METHODS
from draftree.request import Request
from draftree.verify.schemes import SCHEMES

from .. import tiny_gguf
from ..pairs import begun, policy
from ..published import Recipe

SIZES = Recipe(vocab=274, target_size=64, size=64, width=16, wide=64, drafted=tuple(range(0, 274, 2)))
KINDS = {
    "eagle3": SIZES,
    "own": replace(SIZES, kind="eagle", fc_bias=True, input_norm=True, flags={"embedding_scale": 1.7}),
}
PROMPTS = [[11, 7, 5, 3, 7, 5], [2, 4], [9], list(range(40, 90))]
TOKENS = 20
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head of each kind."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.write(folder / "target.gguf", layers=3, hidden=64, heads=2, kv_heads=1, weights="Q8_0")
    for kind, recipe in KINDS.items():
        recipe.save(folder / kind, "speculators" if kind == "eagle3" else "midlayer")
    return folder


def engine(folder: Path, method: str, kind: str, prefixes: int = 0, **more: Any) -> Engine:
    target = NativeModel(folder / "target.gguf", threads=2)
    head = load_head(folder / kind, target)
    assert isinstance(head, NativeHead)
    drafter = TreeDrafter(policy(method), EagleSource(head, 274))
    scheduling = SchedulerParams(chunk=64, prefixes=prefixes)
    return Engine(target, Speculation(drafter, 8, **more), scheduling=scheduling)


@functools.cache
def ar(folder: Path, params: SamplingParams) -> list[Sequence[int]]:
    plain = Engine(NativeModel(folder / "target.gguf"))
    return [plain.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "kind"), [*zip(METHODS, itertools.cycle(KINDS), strict=False)])
def test_ids_are_those_of_ar_decoding(method: str, kind: str, params: SamplingParams, folder: Path) -> None:
    made = engine(folder, method, kind).generate(PROMPTS, params)
    assert [g.token_ids for g in made] == ar(folder, params)
    assert any(g.stats.drafted for g in made) or method in ("auto", "dynamic-width-depth")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_each_request_alone(params: SamplingParams, kind: str, folder: Path) -> None:
    """Whatever others have read, and after a kept prefix."""

    def counts(found: Sequence[Generation]) -> list[tuple[list[int], list[int]]]:
        return [(g.stats.drafted, g.stats.accepted) for g in found]

    together, alone = engine(folder, "eagle2", kind), engine(folder, "eagle2", kind)
    expected = counts([alone.generate([prompt], params)[0] for prompt in PROMPTS])
    assert counts(together.generate(PROMPTS, params)) == expected
    assert counts(together.generate(PROMPTS, params)) == expected, "a prefix is kept of the long one"


@pytest.mark.parametrize("grown_by_c", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_read_once_and_drafted_for_as_one_read_anew(
    kind: str, grown_by_c: bool, folder: Path
) -> None:
    """At each turn a head read all of it: thousands of tokens, which a policy left it off for."""
    text, found = [*range(40, 90), *range(100, 150)], list[list[tuple[object, ...]]]()
    for prefixes in (0, 4):
        made, turn, turns = engine(folder, "eagle2", kind, prefixes), text, list[tuple[object, ...]]()
        drafter = made.speculation.drafter
        assert isinstance(drafter, TreeDrafter) and isinstance(source := drafter.source, EagleSource)
        if not grown_by_c:
            drafter._native = None
        for cut in (120, 105, 105):  # the last two part from it inside the answer
            handle = made.submit(turn, GREEDY)
            while not handle.request.decodes:
                made.advance()
            ((model, unread),) = source.unread(handle.request)
            assert unread < 20 if prefixes and turns else unread == len(turn)
            answer = handle.result()
            turns.append((answer.token_ids, answer.stats.drafted, answer.stats.accepted))
            turn = [*[*turn, *answer.token_ids][:cut], 7 + len(turns), 5, 3]
        found.append(turns)
        assert isinstance(model, NativeHead) and model.rows == len(source._prefixes.lengths) == bool(prefixes) * 2
        assert not source._prefixes.has([9, *turn[1:]]), "hidden states are those of another text"
        source.give_up([])
        assert model.rows == model.loaded.cache_bytes() == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("parts", ["head", "model", "lookup+head", "lookup+model"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_that_c_grows_are_those_of_the_loop(params: SamplingParams, parts: str, folder: Path) -> None:
    """Rows go on from step to step, and a constraint of one request rules tokens out of its drafts alone."""
    grown = []
    allowed = replace(params, allowed_token_ids=tuple(range(0, 274, 3)))
    for native in (True, False):
        model = NativeModel(folder / "target.gguf", threads=2)
        head = load_head(folder / "own", model)
        assert isinstance(head, NativeHead)
        source = ModelSource(model.twin(), 274) if "model" in parts else EagleSource(head, 274)
        drafter = TreeDrafter(OptTree(0.05), EnsembleSource((NgramSource(1), source)) if "lookup" in parts else source)
        if not native:
            drafter._native = None
        made = Engine(model, Speculation(drafter, 8)).generate(PROMPTS, [params, allowed, params, params])
        grown.append([(g.token_ids, g.stats.drafted, g.stats.accepted, g.stats.draft_passes) for g in made])
    assert grown[0] == grown[1]
    assert any(drafted for _, drafted, _, _ in grown[0])


class LeavesOut(OptTree):
    """The second part drafts for no request with an even number of prompt tokens."""

    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        plan = super().plan(requests, budgets, other_tokens)
        plan.enabled, plan.left_out = (True, True), ((), [r for r in requests if r.prompt_length % 2 == 0])
        return plan


@pytest.mark.parametrize("grown_by_c", [True, False])
@pytest.mark.parametrize("part", ["head", "model"])
def test_a_part_drafts_for_no_request_that_it_leaves_out(part: str, grown_by_c: bool, folder: Path) -> None:
    model = NativeModel(folder / "target.gguf", threads=2)
    head = load_head(folder / "own", model)
    assert isinstance(head, NativeHead)
    source = ModelSource(model.twin(), 274) if part == "model" else EagleSource(head, 274)
    drafter = TreeDrafter(LeavesOut(0.05), EnsembleSource((NgramSource(9), source)))
    assert drafter._native is not None
    if not grown_by_c:
        drafter._native = None
    made = Engine(model, Speculation(drafter, 8)).generate(PROMPTS, GREEDY)
    assert [g.token_ids for g in made] == ar(folder, GREEDY)
    drafts = [source.name in g.stats.drafters for g in made]
    assert drafts == [len(prompt) % 2 == 1 for prompt in PROMPTS]


@pytest.mark.parametrize("grown_by_c", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_read_in_portions_is_drafted_from_as_one_read_whole(
    kind: str, grown_by_c: bool, folder: Path
) -> None:
    """A head read any text in one pass, and other requests waited for that."""
    trees = []
    for reading in (None, 1):
        model = NativeModel(folder / "target.gguf", threads=2)
        head = load_head(folder / kind, model)
        assert isinstance(head, NativeHead)
        drafter = TreeDrafter(OptTree(0.05), EagleSource(head, 274))
        assert drafter._native is not None
        if not grown_by_c:
            drafter._native = None
        made = Engine(model, Speculation(drafter, 8))
        request = begun(made.stepper, made.request(PROMPTS[3], GREEDY))
        proposed = drafter.propose([request], [Budget(8)], reading=reading)
        while not len(proposed[-1]):
            proposed += drafter.propose([request], [Budget(8)], reading=reading)
        made.stepper.close(request)
        trees.append(proposed)
    (whole,), (*portions, last) = trees
    assert len(portions) > 3 and (last.tokens, last.parents) == (whole.tokens, whole.parents)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_children_can_be_drawn_of_a_heads_distribution(scheme: str, folder: Path) -> None:
    made = engine(folder, "static", "own", scheme=SCHEMES[scheme]).generate(PROMPTS, SAMPLED)
    assert all(g.stats.drafted and len(g.token_ids) == TOKENS for g in made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_answer_is_drafted_along_as_in_decoding(kind: str, folder: Path) -> None:
    """The target makes its passes: its hidden states stay in its rows."""
    live = engine(folder, "eagle2", kind)
    made = live.generate(PROMPTS[:1], GREEDY)[0]
    drafter = live.speculation.drafter
    with Replay(drafter, PROMPTS[0], list(made.token_ids), GREEDY, target=live.target) as known:
        while known.left:
            known.step(8)
        stats = known.request.stats
    assert sum(stats.accepted) == sum(made.stats.accepted)


def test_a_heads_passes_are_measured_as_a_models(folder: Path) -> None:
    head = load_head(folder / "own", NativeModel(folder / "target.gguf"))
    found = measure(head, Grid((1, 2, 4), (8, 32), (1, 2), 1))
    assert [(p.batch, p.context, p.sizes) for p in found.points] == [(b, c, (1, 2, 4)) for b in (1, 2) for c in (8, 32)]
    assert profile_of(head).seconds(4, 16) > 0
