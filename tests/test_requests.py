"""A request takes the tokens of a step, ends with all of its text, and a stream has all of its tokens."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine, Handle
from draftree.engine.input_processor import text_stream
from draftree.engine.scheduler import Job
from draftree.engine.speculation import EngineRequest, Speculation
from draftree.policies.fixed import StaticTree
from draftree.request import Chunk, Request

from .jobs import scheduler
from .test_text import EOS, TOKENIZER, ids_of
from .toy import ToyModel


@pytest.mark.parametrize("stop", [(), ("xy",), ("z",)])
@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": (ids_of("y")[0],)}, {"include_stop_str_in_output": True}])
@pytest.mark.parametrize(("limit", "least"), [(9, 0), (4, 0), (9, 6)])
def test_a_request_takes_the_tokens_of_a_step_as_one_by_one(
    stop: tuple[str, ...], ends: dict[str, Any], limit: int, least: int
) -> None:
    """Chunks, ids and why it ended; no criterion sees a token behind a stop string."""
    ids, seen = ids_of("a€xy!xyz"), list[list[int]]()

    def watch(before: Any) -> bool:
        seen.append(before.tolist())
        return False

    found = []
    for criteria in ((), (watch,)):
        params = SamplingParams(stop=stop, criteria=criteria, min_tokens=least, max_tokens=limit, **ends)
        for size in (1, 2, len(ids)):
            request = Request([5], params, limit, frozenset({EOS}), text_stream(TOKENIZER, params, [5]))
            seen.clear()
            for at in range(0, len(ids), size):
                if request.finish_reason is None:
                    request.append(ids[at : at + size], accepted=0)
            assert len(request.chunks) == len(request.output_ids)
            found.append((request.finish_reason, request.output_ids, [chunk.text for chunk in request.chunks]))
            assert len(seen) <= len(request.chunks)
    assert all(each == found[0] for each in found)
    reasons = {"stop"} if stop or "stop_token_ids" in ends else {None}
    assert found[0][0] in reasons | ({"length"} if limit < len(ids) else set())


def has_more(ids: NDArray[np.int64], most: int) -> bool:
    return len(ids) > most


@pytest.mark.parametrize("reason", ["eos", "length", "criteria", "cancelled", "deadline"])
def test_a_text_has_all_of_its_tokens_whatever_ends_it(reason: str) -> None:
    """What a stop string or a character could begin with was lost where the end came between two steps."""
    ids = ids_of("a < b </cod </code é€ <</co€ <")
    for count in range(1, len(ids) + 1):
        criteria = (partial(has_more, most=count),) if reason == "criteria" else ()
        params = SamplingParams(stop=("</code>", "<<<", "€ <a"), criteria=criteria)
        limit = count if reason == "length" else 99
        stream, came = text_stream(TOKENIZER, params, [5]), [*ids[:count], *[EOS] * (reason == "eos")]
        request = EngineRequest([5], params, limit, frozenset({EOS}), stream, speculation=Speculation())
        books, job = scheduler(), Job(request, 9, arrival=0.0, timeout=1e-9 if reason == "deadline" else None)
        books.add(job)
        for token in came:
            request.append([token], accepted=0)
        job.cancelled = reason == "cancelled"
        assert books.ended() == [job] and request.finish_reason == reason
        assert request.output_ids == came and len(request.chunks) == len(came)
        assert request.text == TOKENIZER.decode(came, skip_special_tokens=True)


class _Racing:
    """A request that gains a token whenever one looks whether it has ended, and ends with the last of them."""

    row = error = None

    def __init__(self, tokens: int) -> None:
        self.left, self.chunks = tokens, list[Chunk]()

    @property
    def finish_reason(self) -> str | None:
        if self.left:
            self.left -= 1
            self.chunks.append(Chunk(self.left, "", False, 0))
        return None if self.left else "length"


@pytest.mark.parametrize("tokens", range(1, 7))
def test_a_stream_has_the_tokens_that_another_thread_adds_while_it_looks_for_the_end(tokens: int) -> None:
    """They were counted before it looked whether the request had ended: the last ones could be lost."""
    job: Any = SimpleNamespace(request=_Racing(tokens))
    assert [chunk.token for chunk in Handle(Engine(ToyModel()), job)] == [*range(tokens)][::-1]


def test_what_drafts_for_one_request_alone_goes_with_it() -> None:
    """The engine kept each drafter that a request had brought, with its index or its model, until it ended itself."""
    engine, kept = Engine(ToyModel(6)), list[ref[TreeDrafter]]()
    for _ in range(2):
        drafter = TreeDrafter(StaticTree(width=1, depth=2), NgramSource())
        kept.append(ref(drafter))
        engine.generate([(1, 2)], SamplingParams(max_tokens=4), Speculation(drafter, 2))
        del drafter
    gc.collect()
    assert [each() for each in kept] == [None, None]
