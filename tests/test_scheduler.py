"""The books of the scheduler: order, room, deadlines and the queue; and how long a prompt makes streams wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.scheduler import Job, SchedulerParams
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError, FieldError, QueueFullError
from draftree.models.base import Nodes, Row
from draftree.papers.opt_tree import OptTree
from draftree.request import Outcome
from draftree.scores import Scores

from .jobs import job, scheduler
from .toy import ToyModel


def test_whoever_came_first_runs_first_and_no_more_than_there_are_rows() -> None:
    made, jobs = scheduler(rows=2), [job(arrival=i) for i in range(4)]
    for one in (jobs[2], jobs[0], jobs[3], jobs[1]):
        made.add(one)
    assert made.admit() == jobs[:2]
    assert made.admit() == []
    jobs[0].request.finish_reason = "eos"
    assert made.ended() == [jobs[0]]
    assert made.admit() == [jobs[2]]


def test_priority_is_worth_ten_seconds_of_waiting() -> None:
    made = scheduler(rows=1)
    early, urgent, patient = job(arrival=0.0), job(arrival=5.0, priority=-1), job(arrival=9.0, priority=-1)
    late = job(arrival=30.0, priority=-2)
    for one in (late, patient, early, urgent):
        made.add(one)
    order = []
    while found := made.admit():
        order += found
        found[0].request.finish_reason = "eos"
        made.ended()
    assert order == [urgent, patient, early, late]


def test_a_large_request_waits_for_room_and_nobody_overtakes_it() -> None:
    made = scheduler(room=100)
    first, large, small = job(60, arrival=0), job(90, arrival=1), job(10, arrival=2)
    for one in (first, large, small):
        made.add(one)
    assert made.admit() == [first]
    first.request.finish_reason = "length"
    made.ended()
    assert made.admit() == [large, small]


def test_one_that_could_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="101 cache slots"):
        scheduler(room=100).add(job(101))


def test_one_that_does_not_fit_any_more_ends_with_an_error_when_nothing_runs() -> None:
    """While it waited a head was loaded, whose hidden states take memory of each token: nothing ran, for ever."""
    made, first, large, small = scheduler(room=100), job(50), job(60, arrival=1), job(30, arrival=2)
    made.add(first, large, small)
    made.admit()
    made._holds = lambda lengths: sum(lengths) <= 50
    assert made.admit() == [] and large.request.error is None
    first.request.finish_reason = "length"
    made.ended()
    assert made.admit() == [] and isinstance(large.request.error, FieldError)
    assert made.ended() == [large] and made.admit() == [small]


def grown(one: Job, tokens: int) -> None:
    one.request.append([7] * tokens, 0)


def test_texts_that_have_become_too_long_for_the_cache_wait_again() -> None:
    """Rows were reserved for the longest answer: with long contexts one request ran at a time, or none at all."""
    made, jobs = scheduler(3000, (500,)), [job(2900, arrival=i) for i in range(3)]
    for one in jobs:
        made.add(one)
    assert made.admit() == jobs[:2], "1,029 tokens each"
    assert made._kept.lengths == [500] and made.make_room() == []
    grown(jobs[0], 1500)
    assert made.admit() == [] and made.make_room() == []
    grown(jobs[1], 1000)
    assert made.make_room() == [] and made._kept.lengths == [], "kept rows go first"
    grown(jobs[0], 500)
    assert made.make_room() == [jobs[1]] and made.waiting == jobs[1:]
    assert made.admit() == [], "it waits until there is room for more of both"
    grown(jobs[0], 895)
    assert made.make_room() == [], "whoever is alone goes on"
    assert made.ended() == [jobs[0]]
    assert made.admit() == [jobs[1]], "it comes before who arrived later"


def test_a_cache_of_rows_as_long_as_the_longest_has_room_for_whole_texts() -> None:
    """It would have grown beyond its memory: such a cache gives none back while rows are open."""
    made, jobs = scheduler(room=3000, by_row=False), [job(2900, arrival=i) for i in range(2)]
    made.add(*jobs)
    assert made.admit() == jobs[:1] and made.make_room() == []


@pytest.mark.parametrize("arrival", [1.0, 30.0, 45.0, 100.0, 1000.0])
def test_others_come_beside_many_choices_however_long_those_wait(arrival: float) -> None:
    """Whoever came later than the next choice waited for 42 of 58 choices: 14 minutes."""
    made, many, more = scheduler(rows=4), grouped(200, 0.0, "many"), grouped(2, arrival, "more")
    made.add(*many)
    made.admit()
    made.add(*more)
    assert made.admit() == more[:1]
    assert made.admit() == []


def test_a_full_queue_says_when_to_come_back() -> None:
    made = scheduler(rows=1, queue=2)
    made.add(job(), job(), job())
    made.admit()
    with pytest.raises(QueueFullError) as full:
        made.add(job())
    assert 1 <= full.value.retry_after <= 60
    made.add(job(), bounded=False)
    assert len(made.waiting) == 3


def test_of_requests_that_do_not_all_fit_none_waits() -> None:
    """The first of a body's choices waited, and ran, until the last of them was rejected."""
    made = scheduler(rows=1, queue=2)
    made.add(job())
    with pytest.raises(QueueFullError):
        made.add(job(), job(), job())
    assert len(made.waiting) == 1
    made.add(job(), job())
    with pytest.raises(FieldError):
        made.add(job(10), job(2000), bounded=False)
    assert len(made.waiting) == made.most == 3


def test_the_cancelled_and_the_late_end_whether_they_run_or_wait() -> None:
    made = scheduler(rows=1)
    running, cancelled, late, waiting = job(), job(), job(timeout=1e-9), job()
    for one in (running, cancelled, late, waiting):
        made.add(one)
    assert made.admit() == [running]
    cancelled.cancelled = running.cancelled = True
    assert set(map(id, made.ended())) == set(map(id, (running, cancelled, late)))
    assert [one.request.finish_reason for one in (running, cancelled, late)] == ["cancelled", "cancelled", "deadline"]
    assert made.admit() == [waiting]
    assert waiting.request.finish_reason is None


def test_prompts_are_read_in_chunks_only_while_others_wait_for_their_next_token() -> None:
    made = scheduler(chunk=16)
    reading, decoding = job(), job()
    made.add(reading)
    made.admit()
    alone, _ = made.limits
    made.add(decoding)
    made.admit()
    decoding.request.row = Row(0, 3)
    decoding.request.append([7], 0)
    assert alone > made.limits[0] == 16


class Timed:
    """A toy whose passes take seconds of a clock of its own: one, and so much more for each token beside the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: float) -> None:
        self.model, self.now, self._patch = ToyModel(7, max_length=1200), 0.0, monkeypatch
        self.add(self.model, 1.0, token)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def add(self, model: ToyModel, first: float, token: float) -> None:
        """Time the passes of a model, too."""
        extend = model.extend

        def timed(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
            self.now += first + token * (sum(len(new.tokens) for new in nodes) - 1)
            return extend(rows, nodes)

        self._patch.setattr(model, "extend", timed)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("token", [0.001, 0.02, 0.1])
def test_a_long_prompt_delays_no_stream_by_more_than_two_steps(
    streams: int, token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a token of it costs: chunks grow as long as steps stay short."""
    clock = Timed(monkeypatch, token)
    engine, params = Engine(clock.model), SamplingParams(max_tokens=500, ignore_eos=True)
    handles = [engine.submit((1, 2 + i), params) for i in range(streams)]
    engine.wait(lambda: all(len(handle.request.chunks) >= 4 for handle in handles))
    step, gaps = 1 + token * (streams - 1), list[float]()
    late = engine.submit([i % 6 for i in range(1000)], SamplingParams(max_tokens=1))
    while not late.done:
        before, began = [len(handle.request.chunks) for handle in handles], clock.now
        engine.advance()
        assert [len(handle.request.chunks) for handle in handles] == [count + 1 for count in before]
        gaps.append(clock.now - began)
    assert len(gaps) > 1 and max(gaps) <= 3 * step
    for handle in handles:
        handle.cancel()
    engine.wait(lambda: all(handle.done for handle in handles))


@pytest.mark.parametrize(
    ("heavy", "drafting", "token"),
    [(1, 0.0, 0.02), (3, 0.6, 0.02), (3, 0.0, 0.1), (1, 0.6, 0.1), (1, 0.6, 1.0), (3, 0.0, 1.0)],
)
def test_drafts_of_others_make_a_request_take_at_most_twice_as_long(
    heavy: int, drafting: float, token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve tokens took 0.2 s alone and 88.7 s beside a request that drafted 1,024 nodes a step."""

    def neighbour(slowdown: float | None, *, drafts: bool) -> float:
        clock, draft = Timed(monkeypatch, token), ToyModel(7, 1, max_length=1200)
        clock.add(draft, drafting, drafting / 100)
        drafter = TreeDrafter(OptTree(), ModelSource(draft, 7)) if drafts else None
        made = Speculation(drafter, min(64, int(7 / token)))  # a server bounds a pass to eight times one without a tree
        engine = Engine(clock.model, made, scheduling=SchedulerParams(slowdown=slowdown))
        endless = SamplingParams(max_tokens=1000, temperature=1.0, ignore_eos=True)
        handles = [engine.submit((1, 2 + i), endless) for i in range(heavy)]
        engine.wait(lambda: all(len(handle.request.chunks) >= 4 for handle in handles))
        began = clock.now
        engine.submit((5, 6), SamplingParams(max_tokens=40, ignore_eos=True), Speculation()).result()
        took = clock.now - began
        for handle in handles:
            handle.cancel()
        engine.wait(lambda: all(handle.done for handle in handles))
        return took

    plain = neighbour(None, drafts=False)
    assert neighbour(2.0, drafts=True) <= 2 * plain < neighbour(None, drafts=True)


def test_whoever_is_alone_drafts_within_its_own_budget() -> None:
    made = scheduler()
    made.drafts.longest = 2.0
    made.add(job())
    made.admit()
    assert made.limits[1] is None
    made.add(job())
    made.admit()
    assert made.limits[1] == 0


def test_a_short_prompt_does_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour of two tokens waited for 6 s while 3,000 tokens of another prompt were read."""
    engine = Engine(Timed(monkeypatch, 0.001).model, scheduling=SchedulerParams(chunk=64))
    long = [
        engine.submit([i % 6 for i in range(first, first + 1000)], SamplingParams(max_tokens=1)) for first in (0, 1)
    ]
    engine.advance()
    before = [handle.request.unread for handle in long]
    short = engine.submit((5, 6), SamplingParams(max_tokens=1))
    engine.advance()
    assert len(short.request.chunks) == 1
    read = [count - handle.request.unread for count, handle in zip(before, long, strict=True)]
    assert read[0] >= sum(read) // 2 and sum(read) > 100, "the first goes on with half of the step at least"
    for handle in long:
        handle.cancel()


def grouped(count: int, arrival: float, group: object) -> list[Job]:
    made = [job(arrival=arrival) for _ in range(count)]
    for place, one in enumerate(made):
        one.group, one.place = group, place
    return made


def test_many_choices_of_one_leave_a_row_to_others() -> None:
    """Sixteen choices with long prompts took all rows: whoever came next waited for two minutes."""
    made, many, more = scheduler(rows=4), grouped(9, 0.0, "many"), grouped(2, 30.0, "more")
    made.add(*many)
    assert made.admit() == many[:4]
    made.add(*more)
    assert made.admit() == more[:1], "it comes before choices that are many places further on"
    assert made.admit() == [], "two groups share the rows now"
    many[0].request.finish_reason = more[0].request.finish_reason = "length"
    made.ended()
    assert made.admit() == [many[4], more[1]], "the last takes the row that is left where one group has all others"


def test_one_row_is_one_row() -> None:
    made = scheduler(rows=1)
    made.add(*grouped(2, 0.0, "many"), job(arrival=1.0))
    assert len(made.admit()) == 1
    assert made.admit() == []


def test_a_chunk_that_is_given_stays() -> None:
    made, jobs = scheduler(chunk=48), [job(), job()]
    for one in jobs:
        made.add(one)
    made.admit()
    jobs[0].request.append([7], 0)
    made.chunk.observe(0, 0.1)
    made.chunk.observe(48, 10.0)
    assert made.limits[0] == 48


@pytest.mark.parametrize(
    "bad", [{"rows": 0}, {"queue": 0}, {"chunk": 0}, {"prefixes": -1}, {"rows": 1.5}, {"slowdown": 0.9}]
)
def test_params_out_of_range_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SchedulerParams(**bad)


@pytest.mark.parametrize("bad", [{"timeout": 0.0}, {"timeout": -1.0}, {"priority": 0.5}])
def test_a_job_out_of_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        job(**bad)  # type: ignore[arg-type]


def test_priorities_that_no_float_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="priority is 1000001"):
        job(priority=10**6 + 1)


def test_who_leaves_while_a_long_prompt_is_read_is_read_no_further() -> None:
    """Steps read 2,048 tokens of prompts, which took a processor 8 s: for so long an aborted request held its row."""
    model, read = ToyModel(6, max_length=2000), list[int]()
    extend = model.extend

    def counted(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        read.extend(len(new.tokens) for new in nodes)
        handle.cancel()  # while the pass is made
        return extend(rows, nodes)

    model.extend = counted  # type: ignore[method-assign]
    handle = Engine(model).submit([i % 6 for i in range(1000)], SamplingParams(max_tokens=9))
    assert handle.result().finish_reason == "cancelled"
    assert read == [256] and handle.request.row is None


@pytest.mark.parametrize("kind", ["one", "two that begin alike", "with log-probabilities"])
def test_the_size_of_chunks_follows_what_was_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited or was read in parts of 64 tokens counted as read: chunks grew to 512, and the next prompt's stalled
    streams for five steps."""
    clock = Timed(monkeypatch, 0.01)
    engine, endless = Engine(clock.model), SamplingParams(max_tokens=500, ignore_eos=True)
    stream = engine.submit((1, 2), endless)
    engine.wait(lambda: len(stream.request.chunks) >= 4)
    seen, fed, extend, observe = list[int](), list[int](), clock.model.extend, engine.scheduler.observe

    def noted(read: int, outcomes: Sequence[Outcome], seconds: float) -> None:
        seen.append(read)
        observe(read, outcomes, seconds)

    def counted(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        fed.append(sum(len(new.tokens) for row, new in zip(rows, nodes, strict=True) if row is not stream.request.row))
        return extend(rows, nodes)

    monkeypatch.setattr(engine.scheduler, "observe", noted)
    monkeypatch.setattr(clock.model, "extend", counted)
    prompt = [i % 6 for i in range(1000)]
    last = SamplingParams(max_tokens=1, prompt_logprobs=1 if kind == "with log-probabilities" else None)
    prompts = [[*prompt, 1], [*prompt, 2]] if kind == "two that begin alike" else [prompt]
    handles = [engine.submit(each, last) for each in prompts]
    while not all(handle.done for handle in handles):
        engine.advance()
    assert seen == fed and sum(fed) >= 1000
    late, gaps = engine.submit([5, *prompt], SamplingParams(max_tokens=1)), list[float]()
    while not late.done:
        began = clock.now
        engine.advance()
        gaps.append(clock.now - began)
    assert max(gaps) <= 3
    stream.cancel()
