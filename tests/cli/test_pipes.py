"""Files of text as pipes, such as ``<(program)``: what is read of one is gone, and nobody can read it again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.artifacts import open_file
from draftree.cli.main import run
from draftree.cli.train import PromptOptions

from .messages import Captured, complaint

REQUEST = json.dumps({"prompt": "the cat"}) + "\n"
OPTIONS = {
    "generate cat --prediction PIPE --max-tokens 2": "the cat",
    "generate cat --json-schema PIPE": '{"enum": ["the cat"]}',
    "generate cat --chat-template PIPE --max-tokens 2": "{{ messages[0]['content'] }}",
    "batch PIPE OUT --drafter lookup": REQUEST,
    "bench --suite PIPE --out OUT --methods chain --drafters self --max-tokens 2": REQUEST,
    "calibrate --prompts PIPE --out OUT --drafter self --max-tokens 6 --raw --depth 2 --nodes 4": "the cat\na b a b\n",
}


@pytest.fixture
def pipe() -> Iterator[tuple[str, int]]:
    """The name of a pipe as shells give it to a program, and the end to write to."""
    read, write = os.pipe()
    yield f"/dev/fd/{read}", write
    os.close(read)


@pytest.mark.parametrize("line", OPTIONS)
def test_an_option_that_names_a_text_takes_a_pipe(
    line: str, pipe: tuple[str, int], model: str, tmp_path: Path, capsys: Captured
) -> None:
    """Prompts were read twice, which ended without a word, and a suite had to be a regular file."""
    name, end = pipe
    with open(end, "w") as file:
        file.write(OPTIONS[line])
    places = {"PIPE": name, "OUT": str(tmp_path / "out")}
    assert run([*(places.get(word, word) for word in line.split()), "--target", model]) == 0, capsys.readouterr().err


def test_prompts_from_a_pipe_are_known_by_their_bytes(pipe: tuple[str, int]) -> None:
    name, end = pipe
    with open(end, "wb") as file:
        file.write(b"\xef\xbb\xbfthe cat\r\nthe hat\r\n")
    prompts, (source,) = PromptOptions(prompts=(name,)).read()
    assert sorted(prompts) == ["the cat", "the hat"]
    assert source.digest == hashlib.sha256(b"\xef\xbb\xbfthe cat\r\nthe hat\r\n").hexdigest()


def test_a_pipe_that_cannot_be_read_ends_in_a_line_wherever_it_is_opened(
    pipe: tuple[str, int], model: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of broken pipes, as which it was raised, is no message but an exit code of its own."""
    name, end = pipe
    os.close(end)

    def read(path: str) -> None:
        open_file(Path(path))

    monkeypatch.setattr("draftree.cli.train.read_prompts", read)
    assert run(["calibrate", "--prompts", name, "--out", str(tmp_path / "out"), "--target", model]) == 1
    assert "nobody writes to" in complaint(capsys)
