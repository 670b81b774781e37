"""Rows of ended requests take what others leave of the cache: no request waits, fails or is ended by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from draftree import Engine, SamplingParams, SchedulerParams, Speculation
from draftree.models.base import LanguageModel, prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel

from . import tiny_gguf
from .jobs import job, kept, scheduler
from .references import nbytes
from .tiny import tiny


def test_kept_rows_make_room_before_anybody_waits() -> None:
    made = scheduler(100, (30, 30, 30))
    made.add(one := job(35))
    assert made.admit() == [one]
    assert made._kept.lengths == [30, 30]


def test_kept_rows_stay_where_a_request_waits_all_the_same() -> None:
    """While one waited for cache each ended conversation lost its row: its next turn was read anew."""
    made = scheduler(100, (20,))
    made.add(first := job(60), job(60))
    assert made.admit() == [first]
    assert made.admit() == [] and made._kept.lengths == [20]


@pytest.mark.parametrize(
    ("ids", "by_row", "left"),
    [
        ([*kept(0, 45), 3], True, [45]),
        ([*kept(0, 45), 3], False, [45]),
        ([*kept(0, 40), 0, 0], True, [45]),
        ([*kept(0, 40), 0, 0], False, []),
        ([3, 2, 1], True, []),
    ],
)
def test_the_row_that_a_request_goes_on_from_is_counted_once(ids: list[int], by_row: bool, left: list[int]) -> None:
    made = scheduler(100, (45, 45), by_row=by_row)
    made.add(one := job(60, ids=ids))
    assert made.admit() == [one]
    assert made._kept.lengths == left


def test_one_whose_prompt_is_scored_goes_on_from_no_row() -> None:
    made = scheduler(100, (45,))
    made.add(one := job(60, ids=[*kept(0, 45), 3]))
    one.request.params = replace(one.request.params, prompt_logprobs=0)
    assert made.admit() == [one] and made._kept.lengths == []


def test_requests_that_are_admitted_together_leave_each_other_their_rows() -> None:
    """The second one was let in beside the row that the first one was about to take over: one of them was closed."""
    made, jobs = scheduler(100, (30, 30)), [job(45, ids=[*kept(number, 30), 3]) for number in range(2)]
    made.add(*jobs)
    assert made.admit() == jobs
    assert made._kept.lengths == [30, 30]


@pytest.mark.parametrize(("by_row", "left"), [(True, [40]), (False, [])])
def test_kept_rows_leave_whole_texts_their_room_where_all_rows_are_as_long(by_row: bool, left: list[int]) -> None:
    """Such a cache has memory for the longest text from the start."""
    made = scheduler(100, (), by_row=by_row)
    made.add(job(70))
    made.admit()
    made._kept.most = 1
    made._kept.keep(kept(0, 40), prefill(made._kept._model, kept(0, 40)))
    assert made.make_room() == [] and made._kept.lengths == left


def test_rows_that_are_taken_over_are_reserved_once() -> None:
    made = scheduler(100, (45, 20))
    made.add(job(60, ids=[*kept(0, 45), 3]))
    made.admit()
    assert made._kept.lengths == [20, 45] and made.reserved == (2, 60)
    made._holds = lambda lengths: True
    assert made.reserved == (3, 60)


CACHE = 1024
"""Tokens of a small cache."""
LONG, OTHER = ([5 + (number * i + i // 7) % 60 for i in range(700)] for number in (3, 11))
NEXT = [*range(9, 39)]
EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)

Maker = Callable[[str], LanguageModel]


@pytest.fixture
def made(tmp_path: Path) -> Maker:
    file = tmp_path / "tiny.gguf"
    makers: Mapping[str, Callable[[], LanguageModel]] = {
        "transformers": lambda: HFModel(tiny("llama_bytes"), self_test=False),
        "llama.cpp": lambda: LlamaModel(tiny_gguf.write(file, weights="Q8_0")),
        "native": lambda: NativeModel(tiny_gguf.write(file, weights="Q8_0")),
    }
    return lambda backend: makers[backend]()


def small(model: LanguageModel) -> Engine:
    """Of a model whose cache takes so many tokens; in the native engine a row has a page more than it fills."""
    model.cache_bytes = CACHE * model.capabilities.slot_bytes
    if isinstance(model, NativeModel):
        model.cache_bytes = (CACHE // 64 + 1) * model.loaded.page_bytes
    return Engine(model, Speculation(nodes=1), scheduling=SchedulerParams(prefixes=4))


def taken(model: LanguageModel) -> int:
    """Bytes that its cache takes."""
    if isinstance(model, HFModel):
        return nbytes(model.cache)
    return model.loaded.cache_bytes() if isinstance(model, NativeModel) else 0


@pytest.mark.parametrize("backend", ["transformers", "llama.cpp", "native"])
def test_a_conversation_of_most_of_the_cache_is_read_once(backend: str, made: Maker) -> None:
    """One of more than half of it was never kept: an agent's was read anew at each turn, of an idle server."""
    model, plain = made(backend), Engine(made(backend))
    engine = small(model)
    for text in (LONG, OTHER):
        known = 0
        for _ in range(3):
            (answer,) = engine.generate([text], EIGHT)
            assert answer.token_ids == plain.generate([text], EIGHT)[0].token_ids
            assert answer.stats.reused == known
            assert taken(model) <= model.cache_bytes
            known = len(text) + len(answer.token_ids) - 1
            text = [*text, *answer.token_ids, *NEXT]


@pytest.mark.parametrize("backend", ["llama.cpp", "native"])
def test_a_conversation_whose_end_is_told_otherwise_is_read_from_there(backend: str, made: Maker) -> None:
    """Its row was closed for the request that would have gone on from it: both together seemed too large."""
    model, plain = made(backend), Engine(made(backend))
    engine = small(model)
    engine.generate([LONG], EIGHT)
    for cut in (690, 680):
        text = [*LONG[:cut], *NEXT]
        (answer,) = engine.generate([text], EIGHT)
        assert answer.token_ids == plain.generate([text], EIGHT)[0].token_ids
        assert answer.stats.reused == cut
        assert taken(model) <= model.cache_bytes


@pytest.mark.parametrize("backend", ["transformers", "llama.cpp", "native"])
def test_requests_run_together_whatever_is_kept(backend: str, made: Maker) -> None:
    model, plain = made(backend), Engine(made(backend))
    engine = small(model)
    engine.generate([LONG], EIGHT)
    texts = [[*OTHER[first : first + 300], 3] for first in (0, 100)]
    answers = engine.generate(texts, EIGHT)
    assert [answer.token_ids for answer in answers] == [plain.generate([text], EIGHT)[0].token_ids for text in texts]
    assert taken(model) <= model.cache_bytes


def test_storage_of_rows_as_long_as_the_longest_keeps_to_its_memory(made: Maker) -> None:
    """It doubled beside a kept row, however long the request had been allowed to become that left it."""
    model = cast(HFModel, made("transformers"))
    engine = small(model)
    handle = engine.submit(LONG[:100], SamplingParams(max_tokens=800, ignore_eos=True))
    engine.wait(lambda: len(handle.request.chunks) > 4)
    handle.cancel()
    text = [*LONG[:100], *handle.request.output_ids]
    assert model.cache.placement.slots > 800
    assert engine.generate([OTHER[:300]], EIGHT)[0].stats.reused == 0
    assert taken(model) <= model.cache_bytes
    params = replace(EIGHT, max_tokens=300)
    (answer,) = engine.generate([[*text, *NEXT]], params)
    assert answer.stats.reused >= len(text) - 1
    assert answer.token_ids == Engine(made("transformers")).generate([[*text, *NEXT]], params)[0].token_ids
    assert taken(model) <= model.cache_bytes
