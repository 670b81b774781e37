"""A request takes the tokens of a step."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.config import SamplingParams
from draftree.engine.input_processor import text_stream
from draftree.request import Request

from .test_text import EOS, TOKENIZER, ids_of


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
