"""What commands write: a file or a folder of somebody else is refused in one line before any work, and is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand

from draftree.artifacts import locked
from draftree.cli.main import app, run

Captured = pytest.CaptureFixture[str]
NOWHERE = "./no-model-is-looked-for"


@dataclass(frozen=True)
class Output:
    """A command, and the option or argument that names what it writes.

    Attributes:
        words: of the command; OUT stands for the output, SOURCE for a file of prompts, MODEL for a model.
        folder: it is one.
        beside: the name of what is written beside it, from its own, where that is what is somebody else's.
        suffix: of the output.
    """

    words: str
    folder: bool = False
    beside: str = ""
    suffix: str = ".json"


TRAINED = "--prompts SOURCE --max-tokens 8"
OUTPUTS = [
    Output(f"batch SOURCE OUT --target {NOWHERE}"),
    Output(f"bench --suite SOURCE --target {NOWHERE} --out OUT", folder=True),
    *(
        Output(f"{words} --trace OUT")
        for words in (
            f"generate hello --target {NOWHERE}",
            f"chat {NOWHERE}",
            f"batch SOURCE NEW --target {NOWHERE}",
            f"serve {NOWHERE} --port 0",
        )
    ),
    Output(f"calibrate --target {NOWHERE} --prompts SOURCE --out OUT"),
    Output(f"train classifier --target {NOWHERE} --prompts SOURCE --out OUT"),
    Output(f"train classifier --target MODEL {TRAINED} --drafter lookup --apart 2 --out OUT", True, "OUT.samples"),
    Output(f"train classifier --target MODEL {TRAINED} --drafter lookup --apart 2 --out NEW --data OUT", True),
    Output(f"train head {NOWHERE} --prompts SOURCE --out OUT", True),
    Output(f"train head MODEL {TRAINED} --out OUT", True, "OUT/work"),
]
READ = {
    *("prediction", "json_schema", "api_key_file", "chat_template"),
    *("source", "prompts", "init", "suite", "folders"),
}
"""Parameters that name what is read; --data of suites is another."""
FOREIGN = [b'{"a":1}', b'{"a":1}\n', b"precious\nlines", b"\x89PNG\r\n\x00", b'{"format": "mine"}\n', b"[" * 100_000]


def _commands(app: typer.Typer) -> Iterator[tuple[str, TyperCommand]]:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for inner, made in getattr(command, "commands", {"": command}).items():
            yield f"{name} {inner}".strip(), made


def test_every_option_that_names_a_file_is_read_or_tested_here() -> None:
    """A command that writes something new is refused no place until it stands in the list above."""
    kinds = ("FILE", "DIR", "FOLDER", ".jsonl")
    for name, command in _commands(app):
        for parameter in command.params:
            if any(kind in (parameter.metavar or "") for kind in kinds) and parameter.name not in READ:
                flag = max(parameter.opts, key=len)
                written = [o.words for o in OUTPUTS if o.words.startswith(f"{name} ")]
                read = flag == "--data" and name.startswith("bench")
                assert read or any(f"{flag} OUT" in words or flag == "out" for words in written), (name, flag)


def _everything(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def _words(output: Output, out: Path, model: str) -> list[str]:
    """The command line, beside whose output there is a file of prompts."""
    source = out.with_name("source.jsonl")
    source.write_text("".join(json.dumps({"prompt": f"a b {n}"}) + "\n" for n in range(4)))
    places = {"OUT": str(out), "SOURCE": str(source), "NEW": str(source.with_name("new")), "MODEL": model}
    return [places.get(word, word) for word in output.words.split()]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: f"{output.words} {output.beside}".strip())
def test_what_is_not_its_own_is_refused_and_stays(output: Output, model: str, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / f"out{output.suffix}"
    at, words = Path(output.beside.replace("OUT", str(out)) or out), _words(output, out, model)
    if "MODEL" in output.words:  # which is loaded first
        cases = [(content, "recipe.json" if output.folder else "") for content in (FOREIGN[0], FOREIGN[-1])]
    elif output.folder:
        cases = [(content, name) for content in FOREIGN for name in ("config.json", "settings.json", "a")]
    else:
        cases = [(content, "") for content in FOREIGN]
    for content, name in cases:
        file = at / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        before = _everything(tmp_path)
        assert run(words) == 2
        complaint = capsys.readouterr().err
        assert len(complaint.splitlines()) == 1 and out.name in complaint and NOWHERE not in complaint
        assert _everything(tmp_path) == before
        file.unlink()


RESUMED = [
    Output("batch SOURCE OUT --target MODEL"),
    Output("bench --suite SOURCE --target MODEL --out OUT --methods chain", folder=True),
    Output(f"train classifier --target MODEL {TRAINED} --drafter lookup --apart 2 --out NEW --data OUT", folder=True),
    Output(f"train head MODEL {TRAINED} --out OUT", folder=True),
]


@pytest.mark.parametrize("output", RESUMED, ids=lambda output: output.words.split(" --")[0])
def test_what_another_process_writes_is_refused(output: Output, model: str, tmp_path: Path, capsys: Captured) -> None:
    """Two batches at once into one file cut off each other's records."""
    out = tmp_path / f"out{'' if output.folder else output.suffix}"
    words = _words(output, out, model)
    with locked(out, "it", folder=output.folder):
        before = _everything(tmp_path)
        assert run(words) == 2
        assert "is being written by another process" in capsys.readouterr().err.splitlines()[-1]
        assert _everything(tmp_path) == before


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        pytest.param(output, kind, id=f"{output.words}-{kind}")
        for output in OUTPUTS
        for kind in ("a folder", "a device", "in no folder", "in a file")
        if not output.beside and not output.folder
        if not (kind == "a device" and "--trace" in output.words)  # a trace may go to a device
    ],
)
def test_a_place_where_no_file_can_be_is_named(
    output: Output, kind: str, model: str, tmp_path: Path, capsys: Captured
) -> None:
    words = _words(output, tmp_path / "out", model)
    where = {"a folder": tmp_path, "a device": Path("/dev/zero"), "in no folder": tmp_path / "no" / "a.svg"}
    out = where.get(kind, tmp_path / "source.jsonl" / "a.svg")
    assert run([str(out) if word == str(tmp_path / "out") else word for word in words]) == 2
    complaint = capsys.readouterr().err
    assert len(complaint.splitlines()) == 1 and str(out.parent) in complaint and NOWHERE not in complaint
