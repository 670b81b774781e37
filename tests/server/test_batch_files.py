"""The files of a batch: what a second call finds done, what it cuts off, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.errors import ConfigError, RunError
from draftree.openai.batches import BatchLine, BatchOutput, batch_lines


@pytest.fixture
def lines(tmp_path: Path) -> list[BatchLine]:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}')
    return batch_lines(path)


def record_of(key: str, fingerprint: str = "f") -> dict[str, Any]:
    body = {"system_fingerprint": fingerprint}
    return {"id": key, "custom_id": "x", "response": {"status_code": 200, "body": body}, "error": None}


def write(output: BatchOutput, *records: dict[str, Any]) -> None:
    for record in records:
        output.append(record)


def test_empty_lines_are_none(lines: list[BatchLine]) -> None:
    assert [line.number for line in lines] == [1, 3, 4]


def test_a_second_call_keeps_what_is_whole_and_cuts_off_the_rest(lines: list[BatchLine], tmp_path: Path) -> None:
    first, second, third = (line.id for line in lines)
    out = tmp_path / "out.jsonl"
    write(BatchOutput(str(out), lines), record_of(second))
    whole = out.read_bytes()
    line = json.dumps(record_of(first)).encode()
    for cut in range(len(line) + 1):
        out.write_bytes(whole + line[:cut])
        again = BatchOutput(str(out), lines)
        assert again.done == {second} and out.read_bytes() == whole + line[:cut]
        write(again, record_of(first), record_of(third))
        assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [second, first, third]


@pytest.mark.parametrize(
    "content",
    [
        *(b'{"a":1}', b'{"a":1}\n', b"one line", b"a\nb", b"\n", b"\xff\x00", b"[]\n", b'{"id": [1]}\n', b"5\n"),
        *(b'{"id": "batch_req_', b'{"id": "batch_req_000000000000000000000000", "custom_id": "a"}\n'),
    ],
)
def test_a_file_that_is_not_a_batchs_own_is_refused_and_kept(
    lines: list[BatchLine], tmp_path: Path, content: bytes
) -> None:
    """A file of one line was taken for a record that had been cut off, and answers took its place."""
    out = tmp_path / "out.jsonl"
    own = json.dumps(record_of(lines[0].id)).encode()
    foreign = [content, content + own, own, own[: len(own) // 2]]
    if content.endswith(b"\n"):
        foreign.append(own + b"\n" + content)
    odds: list[Any] = [5, {}, "a"]
    foreign += [json.dumps({"id": json.loads(own)["id"], "response": odd}).encode() + b"\n" for odd in odds]
    for whole in foreign:
        out.write_bytes(whole)
        with pytest.raises(ConfigError, match="answers no"):
            BatchOutput(str(out), lines)
        assert out.read_bytes() == whole


def test_the_first_record_is_written_whole_or_not_at_all(
    lines: list[BatchLine], tmp_path: Path, full_disk: None
) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(RunError, match="No space left"):
        write(BatchOutput(str(out), lines), record_of(lines[0].id))
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


def test_a_record_is_in_the_file_when_the_next_one_is_made(lines: list[BatchLine], tmp_path: Path) -> None:
    out, made = tmp_path / "out.jsonl", [record_of(line.id) for line in lines]
    output = BatchOutput(str(out), lines)
    for count, record in enumerate(made, start=1):
        output.append(record)
        assert [json.loads(line) for line in out.read_bytes().splitlines()] == made[:count]


def test_every_text_is_written_as_utf_8(lines: list[BatchLine], tmp_path: Path) -> None:
    """Half of a surrogate pair has no UTF-8: it is written as JSON escapes it."""
    record = record_of(lines[0].id) | {"custom_id": "\ud800 ä \U0001f642"}
    write(BatchOutput(str(tmp_path / "out"), lines), record)
    assert json.loads((tmp_path / "out").read_bytes().decode()) == record


def test_errors_of_both_calls_are_counted(lines: list[BatchLine], tmp_path: Path) -> None:
    first, second, third = (line.id for line in lines)
    failed = {"custom_id": None, "response": None, "error": {"code": "invalid_line", "message": "why"}}
    write(BatchOutput(str(tmp_path / "out"), lines), {"id": first, **failed}, record_of(second))
    again = BatchOutput(str(tmp_path / "out"), lines)
    assert again.errors == 1
    write(again, {"id": third, **failed})
    assert again.errors == 2


def test_a_changed_batch_is_noticed(lines: list[BatchLine], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(BatchOutput(str(out), lines), *(record_of(line.id) for line in lines))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "B"}\n')
    with pytest.raises(ConfigError, match="line 2 answers"):
        BatchOutput(str(out), batch_lines(tmp_path / "in.jsonl"))


def test_a_broken_record_before_the_last_one_is_noticed(lines: list[BatchLine], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("no record\n" + json.dumps(record_of(lines[0].id)) + "\n")
    with pytest.raises(ConfigError, match="line 1 answers"):
        BatchOutput(str(out), lines)


def test_another_model_does_not_go_on(lines: list[BatchLine], tmp_path: Path) -> None:
    first, second, _ = (line.id for line in lines)
    out = str(tmp_path / "out.jsonl")
    write(BatchOutput(out, lines), record_of(first, "one"))
    with pytest.raises(ConfigError, match="one, .*two"):
        write(BatchOutput(out, lines), record_of(second, "two"))
    assert BatchOutput(out, lines).done == {first}


def test_files_that_do_not_do_are_named(lines: list[BatchLine], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for path, message in ((tmp_path / "empty", "is empty"), (tmp_path / "gone", "be read")):
        with pytest.raises(ConfigError, match=message):
            batch_lines(path)
    for name, message in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "out"), "be written"),
        ("/dev/null", "regular file"),
        (str(tmp_path / "in.jsonl"), "answers no"),
    ):
        with pytest.raises(ConfigError, match=message):
            BatchOutput(name, lines)
