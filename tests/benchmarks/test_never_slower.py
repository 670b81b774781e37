"""Cells of drafting beside AR decoding: which are decoded again, which fail, and what a second call decodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import never_slower
from benchmarks.never_slower import KINDS, Cell, Pairs, Timed, compare, decoder, main
from draftree.bench.suites import Item
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.loading import load

from .. import tiny_gguf

CELL = Cell("lookup", 0.0, "chat", 2)
PROMPTS = [[number] for number in range(20)]


class Clock:
    """Decodes nothing: drafting takes 1 / ``ratios[half]`` of AR decoding's second."""

    def __init__(self, *ratios: float) -> None:
        self.ratios, self.calls = ratios, list[tuple[Cell, tuple[int, ...], bool]]()

    def __call__(self, cell: Cell, prompts: Sequence[Sequence[int]], drafts: bool) -> Timed:
        self.calls.append((cell, tuple(ids[0] for ids in prompts), drafts))
        seconds = 1 / self.ratios[prompts[0][0] % 2] if drafts else 1.0
        return Timed(10, seconds, 8, seconds - 0.5)


def rows(path: Path, clock: Clock, *cells: Cell) -> list[list[str]]:
    return compare(cells, {"chat": PROMPTS}, Pairs(path, "tiny", 8), clock, 3)


@pytest.mark.parametrize(
    ("first", "second", "again", "fails"),
    [(0.97, 0.97, True, True), (0.97, 0.99, True, False), (0.99, 0.5, False, False), (1.5, 1.5, False, False)],
)
def test_a_cell_fails_where_it_is_slower_on_both_sets_of_prompts(
    first: float, second: float, again: bool, fails: bool, tmp_path: Path
) -> None:
    clock = Clock(first, second)
    (row,) = rows(tmp_path / "out.jsonl", clock, CELL)
    assert row[:4] == ["lookup", "0", "chat", "2"]
    assert row[4].startswith(f"{first:.2f} [") and row[5] == "1.00 [1.00, 1.00]" and bool(row[6]) == again
    assert bool(row[7]) == fails
    assert len(clock.calls) == (14 if again else 7)  # and one before each set, which is not counted


def test_no_prompt_is_taken_twice_and_each_side_is_first_in_turn(tmp_path: Path) -> None:
    clock = Clock(0.5, 0.5)
    rows(tmp_path / "out.jsonl", clock, CELL)
    assert [drafts for *_, drafts in clock.calls[1:7]] == [False, True, True, False, False, True]
    own = [number for _, numbers, drafts in clock.calls if drafts for number in numbers]
    assert len(own) == len(set(own)) == 12
    assert {number % 2 for number in own[:6]} == {0} and {number % 2 for number in own[6:]} == {1}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0"))


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_are_decoded_together_and_all_their_tokens_count(drafts: bool, gguf: str) -> None:
    model, prompts = load(gguf, threads=1), [[3, 4, 5, 3, 4], [6, 7, 6, 7, 6]]
    answers = Engine(model).generate(
        prompts, [SamplingParams(max_tokens=9, temperature=0.8, seed=11 + i) for i in (0, 1)]
    )
    found = decoder(model, 9)(Cell("lookup", 0.8, "chat", 2), prompts, drafts)
    assert found.tokens == sum(len(answer.token_ids) for answer in answers)
    assert found.later == found.tokens - 2 and 0 < found.prefill < found.seconds


@pytest.mark.parametrize(("ratio", "status"), [(0.5, True), (1.0, False)])
def test_the_command_prints_a_table_and_ends_with_1_where_a_cell_is_slower(
    ratio: float,
    status: bool,
    gguf: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [Item(str(number), "own", (f"the cat {number}",)) for number in range(8)]
    monkeypatch.setitem(KINDS, "chat", lambda: items)
    clock = Clock(ratio, ratio)
    monkeypatch.setattr(never_slower, "decoder", lambda target, tokens: clock)
    options = ["--target", gguf, "--drafters", "lookup", "--kinds", "chat", "--requests", "1,2", "--tokens", "4"]
    ended = None
    try:
        main([str(tmp_path / "out.jsonl"), *options, "--limit", "2", "--temperatures", "0,1.2"])
    except SystemExit as error:
        ended = str(error)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| lookup")]
    assert len(table) == 4 and all(("slower" in line) == status for line in table)
    assert (ended is not None) == status and (ended is None or ended.startswith("4 of 4"))
