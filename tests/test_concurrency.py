"""Requests that run together: whatever comes, goes or fails beside it, each one gives what it gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter, DraftSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine, Handle
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError, QueueFullError, RunError, UnknownNameError
from draftree.models.base import LanguageModel, Nodes, Row
from draftree.papers.cascade import CascadeSource
from draftree.policies.methods import METHODS
from draftree.scores import Scores
from draftree.verify.schemes import find_scheme

from .toy import ToyModel

VOCAB, LONGEST = 7, 96
WAYS = ("none", "lookup", "model", "other", "ensemble", "sure", "cascade")
METHODS_TRIED = ("chain", "static", "opt-tree", "hsddw", "dynamic-width", "eagle2")


class BrokenError(Exception):
    """What a callback raises."""


def toy(seed: int = 0) -> ToyModel:
    return ToyModel(VOCAB, seed, max_length=LONGEST, eos_ids=frozenset({6}))


def made_speculation(way: str, method: str = "chain", scheme: str = "match") -> Speculation:
    """With drafters of its own."""
    if way == "none":
        return Speculation()
    sources: dict[str, Callable[[], DraftSource]] = {
        "lookup": partial(NgramSource, shortest=1),
        "model": lambda: ModelSource(toy(), VOCAB),
        "other": lambda: ModelSource(toy(3), VOCAB),
        "ensemble": lambda: EnsembleSource((NgramSource(shortest=1), ModelSource(toy(3), VOCAB))),
        "sure": lambda: EnsembleSource((NgramSource(shortest=1), ModelSource(toy(), VOCAB))),
        "cascade": lambda: CascadeSource(NgramSource(shortest=1), ModelSource(toy(), VOCAB), METHODS["chain"].policy()),
    }
    drafter: Drafter = TreeDrafter(METHODS[method].policy(), sources[way]())
    return Speculation(drafter, 6, find_scheme(scheme))


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What AR decoding gives one prompt alone."""
    return Engine(toy()).generate([prompt], params)[0].token_ids


def run(engine: Engine, handles: Sequence[Handle]) -> None:
    engine.wait(lambda: all(handle.done for handle in handles))


class Counting:
    """A toy that counts the tokens that it is fed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.fed, self.widest = toy(), 0, 0
        extend = self.model.extend

        def counting(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
            self.fed += sum(len(new.tokens) for new in nodes)
            self.widest = max(self.widest, *(len(new.tokens) for new in nodes))
            return extend(rows, nodes)

        monkeypatch.setattr(self.model, "extend", counting)


def rows_of(model: LanguageModel) -> int:
    """Open rows of a toy."""
    return len(model._rows)  # type: ignore[attr-defined]


def test_requests_with_drafters_schemes_and_seeds_of_their_own_each_equal_themselves_alone() -> None:
    model = toy()
    engine = Engine(model, scheduling=SchedulerParams(rows=8, chunk=9))
    handles, wanted = [], []
    for i, (way, method) in enumerate((w, m) for w in WAYS for m in METHODS_TRIED):
        prompt = tuple((3 * i + j * j) % 6 for j in range(1 + i % 11))
        params = SamplingParams(max_tokens=3 + i % 20, temperature=(0.0, 0.8)[i % 2], seed=i)
        handles.append(engine.submit(prompt, params, made_speculation(way, method)))
        wanted.append(alone(prompt, params))
    run(engine, handles)
    assert [handle.result().token_ids for handle in handles] == wanted
    assert rows_of(model) == 0
    assert sum(sum(handle.request.stats.accepted) for handle in handles) > 50, "hardly anything was drafted"


def test_schemes_verify_beside_one_another() -> None:
    """A lossless scheme draws otherwise than match: its text is its own, the same beside others as alone."""
    prompts = [(1, 2, 3), (4, 5), (1, 1, 2), (3,)]
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=i, ignore_eos=True) for i in range(4)]
    schemes = ["multi-round", "match", "multi-round", "match"]

    def one(i: int) -> Speculation:
        return made_speculation("other", "static", schemes[i])

    apart = [Engine(toy()).generate([prompts[i]], params[i], one(i))[0].token_ids for i in range(4)]
    engine = Engine(toy())
    handles = [engine.submit(prompts[i], params[i], one(i)) for i in range(4)]
    run(engine, handles)
    assert [handle.result().token_ids for handle in handles] == apart


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompt_read_in_chunks_beside_others_gives_what_it_gives_read_whole(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    engine = Engine(counting.model, scheduling=SchedulerParams(chunk=chunk))
    long, params = tuple(i % 6 for i in range(60)), SamplingParams(max_tokens=20, ignore_eos=True)
    first = engine.submit((1, 2), SamplingParams(max_tokens=80, ignore_eos=True))
    engine.wait(lambda: len(first.request.chunks) > 1)
    counting.widest = 0
    second = engine.submit(long, params, made_speculation("model"))
    run(engine, [first, second])
    assert second.result().token_ids == alone(long, params)
    assert first.result().token_ids[:20] == alone((1, 2), params)
    if chunk < 64:
        assert counting.widest <= max(chunk, 7)
    gaps = second.request.stats.seconds.prefill
    assert gaps > 0


def test_those_that_stream_get_a_token_in_every_step_while_a_prompt_is_read() -> None:
    engine = Engine(toy(), scheduling=SchedulerParams(chunk=4))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    first = engine.submit((1, 2), params)
    engine.wait(lambda: len(first.request.chunks) >= 2)
    second = engine.submit(tuple(i % 6 for i in range(40)), SamplingParams(max_tokens=3))
    steps = 0
    while not second.request.decodes:
        before = len(first.request.chunks)
        engine.advance()
        steps += 1
        assert len(first.request.chunks) == before + 1
    assert steps == 10
    run(engine, [first, second])


def test_the_second_turn_of_a_chat_reads_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    engine = Engine(counting.model, scheduling=SchedulerParams(prefixes=2))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = engine.generate([[i % 6 for i in range(30)]], params)[0]
    counting.fed = 0
    turn = (*(i % 6 for i in range(30)), *first.token_ids, 1, 2, 3)
    second = engine.generate([turn], params)[0]
    assert second.token_ids == alone(turn, params)
    # the last token of the first turn was never fed, then come three new ones, and five of the answer
    assert counting.fed == 1 + 3 + 5
    assert rows_of(counting.model) == 1, "its row was taken over"


def test_a_common_preamble_is_forked_and_the_least_recently_used_row_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Counting(monkeypatch)
    engine = Engine(counting.model, scheduling=SchedulerParams(prefixes=2))
    params, common = SamplingParams(max_tokens=1), tuple(i % 5 for i in range(40))
    for end in (5, 4):
        prompt = (*common, end, 1)
        assert engine.generate([prompt], params)[0].token_ids == alone(prompt, params)
    assert counting.fed == 42 + 2
    assert rows_of(counting.model) == 2
    other = tuple((i * i) % 6 for i in range(50))
    assert engine.generate([other], params)[0].token_ids == alone(other, params)
    assert rows_of(counting.model) == 2
    counting.fed = 0
    engine.generate([(*common, 4, 1, 2)], params)
    assert counting.fed == 1, "the row that was used last is still there"


def test_a_draft_model_reads_what_is_new_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    drafter = TreeDrafter(METHODS["chain"].policy(), ModelSource(counting.model, VOCAB))
    engine = Engine(toy(), Speculation(drafter), scheduling=SchedulerParams(prefixes=1))
    params, text = SamplingParams(max_tokens=6, ignore_eos=True), [i % 6 for i in range(40)]
    fed = []
    for _ in range(2):
        answer = engine.generate([text], params)[0].token_ids
        assert answer == alone(tuple(text), params)
        fed.append(counting.fed)
        counting.fed, text = 0, [*text, *answer, 2]
    assert fed[0] >= 40
    assert fed[1] <= 16


def failing(ids: NDArray[np.int64], logits: NDArray[np.float32], *, at: int) -> NDArray[np.float32]:
    if len(ids) >= at:
        raise BrokenError
    return logits


def criterion(ids: NDArray[np.int64], *, at: int) -> bool:
    if len(ids) >= at:
        raise BrokenError
    return False


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["processors", "criteria"])
def test_a_callback_that_raises_ends_its_own_request_alone(kind: str, way: str) -> None:
    model = toy()
    engine, params = Engine(model), SamplingParams(max_tokens=25, ignore_eos=True)
    callback: Any = partial(failing if kind == "processors" else criterion, at=12)
    options: dict[str, Any] = {kind: (callback,)}
    bad = SamplingParams(max_tokens=25, ignore_eos=True, **options)
    speculation = made_speculation(way, "static")
    prompts = [(1, 2, 3), (2, 2), (5, 4, 3, 2, 1)]
    handles = [engine.submit(p, bad if i == 1 else params, speculation) for i, p in enumerate(prompts)]
    run(engine, handles)
    assert handles[1].request.finish_reason == "error"
    with pytest.raises(BrokenError):
        handles[1].result()
    with pytest.raises(BrokenError):
        list(handles[1])
    assert 8 <= len(handles[1].generation.token_ids) <= 10
    for i in (0, 2):
        assert handles[i].result().token_ids == alone(prompts[i], params)
    assert rows_of(model) == 0


def test_the_error_of_a_request_holds_nothing_of_its_step() -> None:
    """Frames of its traceback, and their callers', held the pass: megabytes a failed request, while it was kept."""
    engine = Engine(toy())
    handle = engine.submit((1, 2, 3), SamplingParams(max_tokens=9, processors=(partial(failing, at=4),)))
    run(engine, [handle, engine.submit((2, 2), SamplingParams(max_tokens=9))])
    assert handle.request.error is not None
    assert handle.request.error.__context__ is None
    assert handle.request.error.__traceback__ is None
    assert "in failing" in handle.request.error.__notes__[-1]


def test_a_callback_cannot_wait_for_its_own_engine() -> None:
    engine, params = Engine(toy()), SamplingParams(max_tokens=3)

    def asking(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        engine.generate([[1, 2]], SamplingParams(max_tokens=1))
        return logits

    with pytest.raises(RunError, match="callback"):
        engine.generate([[1]], SamplingParams(max_tokens=3, processors=(asking,)))
    assert engine.generate([[1]], params)[0].token_ids == alone((1,), params)


def test_what_is_cancelled_keeps_its_tokens_and_frees_its_row() -> None:
    model = toy()
    engine, params = Engine(model), SamplingParams(max_tokens=50, ignore_eos=True)
    first, second = (engine.submit((i, 2), params) for i in (1, 2))
    engine.wait(lambda: len(first.request.chunks) >= 5)
    first.cancel()
    assert first.done
    assert first.request.finish_reason == "cancelled"
    assert first.generation.token_ids == alone((1, 2), params)[: len(first.request.chunks)]
    assert second.result().token_ids == alone((2, 2), params)
    first.cancel()
    assert rows_of(model) == 0


def test_leaving_a_stream_early_cancels_it() -> None:
    model = toy()
    for chunk in Engine(model).stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True)):
        assert chunk.token >= 0
        break
    assert rows_of(model) == 0


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = Engine(toy())
    handle = engine.submit([1, 2], SamplingParams(max_tokens=90, ignore_eos=True), timeout=1e-6)
    assert handle.result().finish_reason == "deadline"


def test_a_full_queue_rejects_and_names_a_time() -> None:
    engine = Engine(toy(), scheduling=SchedulerParams(rows=1, queue=1))
    for _ in range(2):
        engine.submit([1])
    with pytest.raises(QueueFullError):
        engine.submit([2])


@pytest.mark.parametrize(
    "bad", [{"method": "nonsense"}, {"drafter": "lookup", "verification": "nonsense"}, {"nodes": 0}, {"nodes": 10**6}]
)
def test_unknown_names_and_numbers_out_of_range_are_refused_when_the_request_is_made(bad: dict[str, Any]) -> None:
    with pytest.raises((UnknownNameError, ConfigError)):
        Engine(toy()).submit([1, 2], SamplingParams(), SpeculationParams(**bad))


def test_what_is_no_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculation"):
        Engine(toy()).submit([1, 2], SamplingParams(), "lookup")  # type: ignore[arg-type]


def test_threads_that_submit_at_once_each_get_their_own() -> None:
    model = toy()
    engine = Engine(model, scheduling=SchedulerParams(rows=3))
    found: dict[int, list[int]] = {}
    asked = {i: ((i % 6, 1, i % 5), SamplingParams(max_tokens=8 + i % 7, seed=i, temperature=0.7)) for i in range(24)}

    def work(first: int) -> None:
        for i in range(first, 24, 4):
            found[i] = engine.generate([asked[i][0]], asked[i][1])[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: alone(*asked[i]) for i in asked}
    assert rows_of(model) == 0


def test_one_thread_can_own_the_models_while_others_submit() -> None:
    model = toy()
    engine = Engine(model)
    ended: list[bool] = []
    owner = threading.Thread(target=lambda: engine.wait(lambda: bool(ended) and not engine.scheduler.jobs))
    owner.start()
    seen: set[int] = set()
    extend = model.extend

    def watched(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        seen.add(threading.get_ident())
        return extend(rows, nodes)

    model.extend = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    handles = [engine.submit((i, 3), params, made_speculation("model")) for i in range(5)]
    assert [[chunk.token for chunk in handle] for handle in handles] == [alone((i, 3), params) for i in range(5)]
    left = engine.submit((1, 2), SamplingParams(max_tokens=90, ignore_eos=True))
    next(iter(left))
    left.cancel()
    ended.append(True)
    engine.wake()
    owner.join()
    assert seen == {owner.ident}
    assert left.done
    assert rows_of(model) == 0


def test_low_priority_is_not_starved() -> None:
    """Whoever waits long enough comes before all others: each step of priority is worth ten seconds."""
    engine = Engine(toy(), scheduling=SchedulerParams(rows=1))
    patient = engine.submit((1, 2), SamplingParams(max_tokens=1), priority=1)
    patient._job.arrival -= 30  # it has waited
    urgent = [engine.submit((2, i), SamplingParams(max_tokens=1)) for i in range(3)]
    engine.wait(lambda: patient.done)
    assert not any(handle.done for handle in urgent)
    run(engine, urgent)


class Service(RuleBasedStateMachine):
    """An engine under random arrivals, steps, cancellations and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.model = toy()
        self.engine = Engine(self.model, scheduling=SchedulerParams(rows=3, chunk=4, prefixes=2))
        self.speculations = [made_speculation(way, "static") for way in WAYS]
        self.handles: list[tuple[Handle, tuple[int, ...], SamplingParams, bool]] = []

    @rule(
        prompt=st.lists(st.integers(0, 5), min_size=1, max_size=40).map(tuple),
        tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.9]),
        seed=st.integers(0, 3),
        way=st.integers(0, len(WAYS) - 1),
        fails=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self, prompt: tuple[int, ...], tokens: int, temperature: float, seed: int, way: int, fails: bool
    ) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
        given = params
        if fails:
            broken = partial(failing, at=len(prompt) + tokens // 2)
            given = SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True, processors=(broken,)
            )
        handle = self.engine.submit(prompt, given, self.speculations[way])
        self.handles.append((handle, prompt, params, fails))

    @rule(steps=st.integers(1, 6))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.advance()

    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        if self.handles:
            self.handles[which % len(self.handles)][0].cancel()

    @invariant()
    def every_token_so_far_is_its_own(self) -> None:
        for handle, prompt, params, _ in self.handles:
            assert handle.request.output_ids == alone(prompt, params)[: len(handle.request.output_ids)]
        assert len(self.engine.scheduler.running) <= 3
        assert rows_of(self.model) <= 3 + 2

    def teardown(self) -> None:
        run(self.engine, [handle for handle, *_ in self.handles])
        for handle, prompt, params, fails in self.handles:
            if handle.request.finish_reason not in ("cancelled", "error"):
                assert handle.result().token_ids == alone(prompt, params)
            assert fails or handle.request.finish_reason != "error", handle.request.error
        self.engine.stepper.prefixes.clear()
        assert rows_of(self.model) == 0


Service.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestService = Service.TestCase
torch.set_num_threads(1)
