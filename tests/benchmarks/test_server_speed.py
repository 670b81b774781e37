"""Servers are timed in small: each way decodes what it was asked to, and its figures are printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import server_speed
from benchmarks.raw_client import Answer, RawClient
from draftree.bench.suites import Item

from .. import tiny_gguf

Queues = Sequence[Sequence[Mapping[str, Any]]]
ITEMS = [Item(str(at), "kind", (text, "And then?"), None) for at, text in enumerate(("the cat", "a hat", "one", "two"))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", context=16384)


def printed(what: str, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run prints that finds no text which differs."""
    monkeypatch.setattr(server_speed, "load_suite", lambda name: ITEMS)
    arguments = f"{what} --target {target} --drafter lookup --requests 4 --concurrency 2 --tokens 4 --threads 1"
    monkeypatch.setattr("sys.argv", ["server_speed", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        server_speed.main()
    found = capsys.readouterr().out
    assert ended.value.code == 0, found
    return found


def test_a_server_is_timed_beside_the_api(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, send = list[object](), RawClient.send

    def recorded(self: RawClient, url: str, queues: Queues, path: str) -> list[list[Answer]]:
        asked.extend(body.get("draftree") for queue in queues for body in queue)
        return send(self, url, queues, path)

    monkeypatch.setattr(RawClient, "send", recorded)
    out = printed("overhead", target, monkeypatch, capsys)
    assert asked == [None, None, {"drafter": "none"}, {"drafter": "none"}] * 3  # two rounds, and one to warm up
    rates = re.findall(r"^drafter (\w+): (\d+\.\d) tokens/s by the API, (\d+\.\d) by the server", out, re.MULTILINE)
    assert [name for name, *_ in rates] == ["lookup", "none"]
    assert all(float(rate) > 0 for _, *pair in rates for rate in pair)


def test_llamas_server_is_timed_beside_ours(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed("llama --speculation ngram-simple", target, monkeypatch, capsys)
    ways = ("llama.cpp", "llama.cpp, ngram-simple", "AR", "lookup")
    rates = dict(re.findall(rf"^({'|'.join(ways[::-1])}) +(\d+\.\d) tokens/s", out, re.MULTILINE))
    assert tuple(rates) == ways and all(float(rate) > 0 for rate in rates.values())


def test_a_file_of_prompts_is_timed(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed("batch", target, monkeypatch, capsys)
    assert len(re.findall(r"^(?:draftree batch, \w+|llama.cpp's server): \d+\.\d s, \d+ MiB$", out, re.MULTILINE)) == 3
    assert "4 of 4 prompts answered, 0 texts differ" in out
