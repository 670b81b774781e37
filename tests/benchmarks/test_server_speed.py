"""Servers are timed in small: each way decodes what it was asked to, and its figures are printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import server_speed
from benchmarks.raw_client import Answer, RawClient
from draftree.bench.suites import Item

from .conftest import Printed

Queues = Sequence[Sequence[Mapping[str, Any]]]
ITEMS = [Item(str(at), "kind", (text, "And then?"), None) for at, text in enumerate(("the cat", "a hat", "one", "two"))]


@pytest.fixture
def timed(roomy: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What a run prints that finds no text which differs."""
    monkeypatch.setattr(server_speed, "load_suite", lambda name: ITEMS)
    options = f"--target {roomy} --drafter lookup --requests 4 --concurrency 2 --tokens 4 --threads 1"
    return lambda what: printed(server_speed, f"{what} {options}")


def test_a_server_is_timed_beside_the_api(timed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, send = list[object](), RawClient.send

    def recorded(self: RawClient, url: str, queues: Queues, path: str) -> list[list[Answer]]:
        asked.extend(body.get("draftree") for queue in queues for body in queue)
        return send(self, url, queues, path)

    monkeypatch.setattr(RawClient, "send", recorded)
    out = timed("overhead")
    assert asked == [None, None, {"drafter": "none"}, {"drafter": "none"}] * 3  # two rounds, and one to warm up
    rates = re.findall(r"^drafter (\w+): (\d+\.\d) tokens/s by the API, (\d+\.\d) by the server", out, re.MULTILINE)
    assert [name for name, *_ in rates] == ["lookup", "none"]
    assert all(float(rate) > 0 for _, *pair in rates for rate in pair)


def test_llamas_server_is_timed_beside_ours(timed: Callable[[str], str]) -> None:
    out = timed("llama --speculation ngram-simple")
    ways = ("llama.cpp", "llama.cpp, ngram-simple", "AR", "lookup")
    rates = dict(re.findall(rf"^({'|'.join(ways[::-1])}) +(\d+\.\d) tokens/s", out, re.MULTILINE))
    assert tuple(rates) == ways and all(float(rate) > 0 for rate in rates.values())


def test_a_file_of_prompts_is_timed(timed: Callable[[str], str]) -> None:
    out = timed("batch")
    assert len(re.findall(r"^(?:draftree batch, \w+|llama.cpp's server): \d+\.\d s, \d+ MiB$", out, re.MULTILINE)) == 3
    assert "4 of 4 prompts answered, 0 texts differ" in out


def test_too_few_prompts_for_a_round_are_counted() -> None:
    with pytest.raises(SystemExit) as ended:
        server_speed.in_groups("abcd", 5)
    assert re.findall(r"\d+", str(ended.value.code)) == ["4", "5"]
