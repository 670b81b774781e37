"""A server of a tiny model, the official client of it, and the same model without a server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from draftree.engine.engine import Engine

from .running import Running, bytes_target, running, target


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def spelling() -> Iterator[Running]:
    """A server of a model that spells every character beyond ASCII in several tokens."""
    with running(bytes_target()) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Engine:
    """The same model without drafts and without a server."""
    return Engine(target())
