"""The files of a batch: what a second call finds done, what it cuts off, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.batch.batch_files import BatchInput, BatchOutput
from draftree.errors import ConfigError


@pytest.fixture
def lines(tmp_path: Path) -> BatchInput:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}')
    return BatchInput(path)


def record_of(key: str, fingerprint: str = "f") -> dict[str, Any]:
    body = {"system_fingerprint": fingerprint}
    return {"id": key, "custom_id": "x", "response": {"status_code": 200, "body": body}, "error": None}


def write(output: BatchOutput, *records: dict[str, Any]) -> None:
    with output.appending() as append:
        for record in records:
            append(record)


def test_empty_lines_are_none(lines: BatchInput) -> None:
    assert [line.number for line in lines.lines()] == [1, 3, 4]


@pytest.mark.parametrize("tail", ["", '{"id": "batch', '{"id": "batch\n'])
def test_a_second_call_keeps_what_is_whole_and_cuts_off_the_rest(lines: BatchInput, tmp_path: Path, tail: str) -> None:
    first, second, third = (line.id for line in lines.lines())
    out = tmp_path / "out.jsonl"
    write(BatchOutput(str(out), lines), record_of(second))
    with out.open("a") as file:
        file.write(tail)
    again = BatchOutput(str(out), lines)
    assert again.done == {second}
    write(again, record_of(first), record_of(third))
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [second, first, third]


def test_a_record_is_in_the_file_when_the_next_one_is_made(lines: BatchInput, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with BatchOutput(str(out), lines).appending() as append:
        append(record_of(next(lines.lines()).id))
        assert out.read_text().endswith("}\n")


def test_a_changed_batch_is_noticed(lines: BatchInput, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(BatchOutput(str(out), lines), *(record_of(line.id) for line in lines.lines()))
    lines.path.write_text('{"prompt": "a"}\n\n{"prompt": "B"}\n')
    with pytest.raises(ConfigError, match="line 2 answers no line of this batch"):
        BatchOutput(str(out), lines)


def test_a_broken_record_before_the_last_one_is_noticed(lines: BatchInput, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("no record\n" + json.dumps(record_of(next(lines.lines()).id)) + "\n")
    with pytest.raises(ConfigError, match="line 1 answers no line"):
        BatchOutput(str(out), lines)


def test_another_model_does_not_go_on(lines: BatchInput, tmp_path: Path) -> None:
    first, second, _ = (line.id for line in lines.lines())
    out = str(tmp_path / "out.jsonl")
    write(BatchOutput(out, lines), record_of(first, "one"))
    with pytest.raises(ConfigError, match="has answers of one, and this is two"):
        write(BatchOutput(out, lines), record_of(second, "two"))
    assert BatchOutput(out, lines).done == {first}


def test_files_that_do_not_do_are_named(lines: BatchInput, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for path, message in ((tmp_path / "empty", "is empty"), (tmp_path / "gone", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            BatchInput(path)
    for name, message in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "out"), "which is not there"),
        (str(lines.path), "is the batch itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            BatchOutput(name, lines)
