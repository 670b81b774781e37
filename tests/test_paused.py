"""Texts that outgrow the cache: one of them waits, is read again in its turn, and comes out the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine, Handle
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import EngineRequest, Observer, Speculation
from draftree.engine.step import Stepper
from draftree.errors import CacheFullError, FieldError
from draftree.models.base import LanguageModel, Nodes, Row
from draftree.papers.cascade import CascadeSource
from draftree.papers.opt_tree import OptTree
from draftree.policies.fixed import StaticTree
from draftree.request import Outcome, Request
from draftree.scores import Scores

from .toy import ToyModel


class Cached(ToyModel):
    """A toy whose passes fail where rows hold more than its cache."""

    longest = 0

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        held = sum(row.length + len(row.parents) for row in self._ids) + sum(len(new.tokens) for new in nodes)
        if self.most_tokens is not None and held > self.most_tokens:
            raise CacheFullError(f"{held} tokens")
        self.longest = max(self.longest, held)
        return super().extend(rows, nodes)


class Noted(Observer):
    """What an engine tells of requests."""

    def __init__(self) -> None:
        self.seen = list[tuple[str, EngineRequest]]()
        self.texts: dict[Request, list[int]] = {}
        self.handles, self.done = list[Handle](), False

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.texts[outcome.request] += outcome.tokens[: outcome.taken]

    def opened(self, request: EngineRequest) -> None:
        self.seen.append(("opened", request))
        self.texts[request] = request.output_ids

    def closed(self, request: EngineRequest) -> None:
        self.seen.append(("closed", request))
        self.done |= any(handle.done for handle in self.handles if handle.request is request)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("prefixes", [0, 4])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_texts_that_wait_for_cache_half_way_are_the_same(
    drafts: bool, prefixes: int, prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.engine.scheduler._AHEAD", 16)
    common: dict[str, Any] = {"prompt_logprobs": prompt_logprobs, "logprobs": 1, "ignore_eos": True}
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40 + i, **common) for i in range(5)]
    prompts = [[i % 6] * (3 + 20 * (i % 2)) for i in range(5)]

    def texts(most: int | None) -> tuple[list[tuple[object, ...]], Cached, Noted]:
        model, noted = Cached(7, max_length=200), Noted()
        model.most_tokens = most
        drafter = TreeDrafter(OptTree(), ModelSource(ToyModel(7, 1, max_length=200), 7)) if drafts else None
        engine = Engine(
            model, Speculation(drafter, 6), observers=[noted], scheduling=SchedulerParams(rows=4, prefixes=prefixes)
        )
        handles = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
        answers = [handle.result() for handle in handles]
        for answer, asked in zip(answers, params, strict=True):
            assert answer.finish_reason == "length" and answer.stats.tokens == asked.max_tokens
            assert drafts or answer.stats.steps == answer.stats.tokens - 1
        requests = [handle.request for handle in handles]
        assert all(noted.texts[request] == request.output_ids for request in requests)
        scored = [([chunk.logprobs for chunk in r.chunks], r.prompt_logprobs, r.stats.reused) for r in requests]
        return [*zip([answer.token_ids for answer in answers], scored, strict=True)], model, noted

    wanted, _, _ = texts(None)
    found, model, noted = texts(120)
    assert found == wanted
    assert 80 < model.longest <= 120
    for what in ("opened", "closed"):
        assert len({request for kind, request in noted.seen if kind == what}) == len(noted.seen) // 2 == 5


def test_one_that_waits_again_can_be_cancelled_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.engine.scheduler._AHEAD", 16)
    model, noted = Cached(7, max_length=200), Noted()
    model.most_tokens = 100
    engine = Engine(model, Speculation(nodes=1), observers=[noted])
    first, second = (engine.submit((1, 2 + i), SamplingParams(max_tokens=90, ignore_eos=True)) for i in range(2))
    noted.handles += first, second
    engine.wait(lambda: bool(second.request.chunks) and second.request.row is None)
    gained = second.request.output_ids
    second.cancel()
    assert second.result().finish_reason == "cancelled" and second.request.output_ids == gained
    first.result()
    assert [kind for kind, request in noted.seen if request is second.request] == ["opened", "closed"]
    assert not any(model._ids) and not noted.done, "one is done when its observers know"


def test_where_there_is_no_room_for_drafts_a_step_makes_none() -> None:
    """A cache whose room texts take up had none for large trees: all requests ended by an error."""
    model = Cached(7, max_length=200)
    drafter = TreeDrafter(OptTree(), ModelSource(ToyModel(7, 1, max_length=200), 7))
    engine, params = Engine(model, Speculation(drafter, 600)), SamplingParams(max_tokens=90, ignore_eos=True)
    wanted = Engine(ToyModel(7, max_length=200)).generate([(1, 2), (1, 3)], params)
    model.most_tokens = 700
    found = engine.generate([(1, 2), (1, 3)], params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    assert any(answer.stats.drafted for answer in found)


def test_kept_rows_yield_before_drafts_do() -> None:
    """Where a tree had no room beside them, the step was made without drafts."""
    drafted = list[list[int]]()
    for prefixes in (0, 4):
        model = Cached(7, max_length=600)
        drafter = TreeDrafter(StaticTree(7, 3), ModelSource(ToyModel(7, 1, max_length=600), 7))
        engine = Engine(model, Speculation(drafter, 600), scheduling=SchedulerParams(prefixes=prefixes))
        engine.generate([[i % 6 for i in range(400)]], SamplingParams(max_tokens=1))
        model.most_tokens = 700
        (answer,) = engine.generate([(1, 2)], SamplingParams(max_tokens=30, ignore_eos=True))
        drafted.append(answer.stats.drafted)
    assert drafted[0] == drafted[1] and sum(drafted[0]) > 300


@pytest.mark.parametrize("length", [50, 200])
def test_without_max_tokens_an_answer_is_as_long_as_context_and_cache_allow(length: int) -> None:
    """The whole context was reserved: where the cache had less, each request without max_tokens was refused."""
    model = Cached(7, max_length=length)
    model.most_tokens = 100
    engine, endless = Engine(model), SamplingParams(ignore_eos=True)
    answers = engine.generate([(1, 2), (1, 3), (1, 4)], endless)
    assert {len(answer.token_ids) for answer in answers} == {min(length, 99 - engine.speculation.nodes) - 2}
    with pytest.raises(FieldError, match="max_tokens"):
        engine.generate([(1, 2)], SamplingParams(max_tokens=99 if length > 100 else 49))


def test_figures_of_stages_count_what_came_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """They began anew where a text was read again."""
    pause, before = Stepper.pause, list[int]()

    def noting(stepper: Stepper, request: EngineRequest) -> None:
        before.append(sum(request.stats.drafted))
        pause(stepper, request)

    monkeypatch.setattr("draftree.engine.scheduler._AHEAD", 16)
    monkeypatch.setattr(Stepper, "pause", noting)
    model = Cached(7, max_length=200)
    model.most_tokens = 120
    lower, upper = (ModelSource(ToyModel(7, seed, max_length=200), 7) for seed in (1, 2))
    drafter = TreeDrafter(StaticTree(1, 3), CascadeSource(lower, upper, StaticTree(1, 2)))
    params = SamplingParams(max_tokens=45, ignore_eos=True)
    answers = Engine(model, Speculation(drafter, 6)).generate([(1, first) for first in range(4)], params)
    assert any(before)
    for answer in answers:
        first, last = answer.stats.figures["stages"]
        assert (last.proposed, last.accepted) == (sum(answer.stats.drafted), sum(answer.stats.accepted))
        assert first.emitted + last.emitted == sum(chunk.drafted for chunk in answer.chunks) > 0


@pytest.mark.parametrize("known", [0, 20])
def test_tokens_that_a_request_has_read_itself_before_a_pause_are_not_reused(
    known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found its own kept row when it was opened again, and counted what it had read of its prompt."""
    pause, read = Stepper.pause, list[int]()

    def noting(stepper: Stepper, request: EngineRequest) -> None:
        assert request.row is not None
        read.append(request.row.length)
        pause(stepper, request)

    monkeypatch.setattr("draftree.engine.scheduler._AHEAD", 16)
    monkeypatch.setattr(Stepper, "pause", noting)
    model, prompt = Cached(7, max_length=200), [i % 6 for i in range(150)]
    model.most_tokens = 200
    engine = Engine(model, Speculation(nodes=1), scheduling=SchedulerParams(chunk=1, prefixes=4))
    if known:
        engine.generate([prompt[:known]], SamplingParams(max_tokens=1))
    first = engine.submit((1, 2, 3), SamplingParams(max_tokens=48, ignore_eos=True))
    engine.wait(lambda: first.request.decodes)
    second = engine.submit(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    first.result()
    assert len(second.result().token_ids) == 4
    assert len(read) == 1 and known + 16 <= read[0] < 150, "it was not paused in mid-prompt"
    assert second.request.stats.reused == known


class Taking(Drafter):
    """Takes half of the target's cache as it is loaded."""

    def prepare(self, target: LanguageModel, prefixes: int = 0) -> None:
        assert isinstance(target, ToyModel)
        target.most_tokens = 50


def test_where_a_drafter_takes_the_cache_what_does_not_fit_any_more_ends_and_others_go_on() -> None:
    """The engine span for ever: nothing ran, and the first that waited never fitted."""
    model = Cached(7, max_length=200)
    model.most_tokens = 100
    engine = Engine(model, Speculation(nodes=1))
    large, small = (engine.submit((1, 2), SamplingParams(max_tokens=n, ignore_eos=True)) for n in (80, 20))
    engine.prepared(Speculation(Taking()))
    for _ in range(3):
        engine.advance()
    assert large.done and isinstance(large.request.error, FieldError)
    assert len(small.result().token_ids) == 20
