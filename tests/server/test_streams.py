"""What a stream sends of a request that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

from draftree.request import Chunk
from draftree.server.engine_loop import Submission
from draftree.server.streams import EventStream


class _Builder:
    def first(self) -> list[dict[str, Any]]:
        return [{"first": True}]

    def events(self, index: int, chunks: Sequence[Chunk]) -> Iterator[dict[str, Any]]:
        yield from ({"token": chunk.text} for chunk in chunks)

    def ended(self, index: int) -> Iterator[dict[str, Any]]:
        raise RuntimeError("broken")


class _Submission:
    async def steps(self) -> AsyncIterator[list[tuple[int, Sequence[Chunk], bool]]]:
        yield [(0, [Chunk(1, "a", False, 0), Chunk(2, "b", True, 1)], True)]


def test_the_tokens_of_its_last_step_come_before_its_error() -> None:
    async def sent() -> list[str]:
        stream = EventStream(cast(Submission, _Submission()), cast(Any, _Builder()), ())
        return [str(part) async for part in stream.body_iterator]

    lines = "".join(asyncio.run(sent())).split("\n\n")
    assert lines[:3] == ['data: {"first": true}', 'data: {"token": "a"}', 'data: {"token": "b"}']
    assert "broken" in lines[3]
