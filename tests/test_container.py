"""The Dockerfile, as far as it can be checked without Docker: what it copies is there, and what it runs exists."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from draftree.cli.main import app
from draftree.server.middleware import OPEN

ROOT = Path(__file__).parents[1]
INSTRUCTIONS = {
    *("FROM", "RUN", "COPY", "WORKDIR", "ENV", "VOLUME", "USER"),
    *("EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
}


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).split("\n")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def _of(name: str) -> list[str]:
    return [rest for found, rest in _instructions() if found == name]


def _copied() -> set[str]:
    return {source.removeprefix("./") for line in _of("COPY") for source in line.split()[:-1]}


def test_every_line_is_an_instruction() -> None:
    assert {name for name, _ in _instructions()} == INSTRUCTIONS


def test_what_is_copied_is_there_and_is_all_that_the_context_has() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*" and rules[-1] == "**/__pycache__"
    assert {rule.removeprefix("!") for rule in rules[1:-1]} == _copied()
    assert all((ROOT / source).exists() for source in _copied())


def test_what_the_installation_reads_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"], "src"} <= _copied()
    ((pip, extras),) = re.findall(r"(pip install [^&]*)'\.\[([\w,]+)\]'", " ".join(_of("RUN")))
    assert "-c constraints.txt" in pip and set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert "hub" in extras.split(","), "a name of a model that is to be downloaded ends in an error"

    data = re.findall(r"\./(packages/[\w-]+)", " ".join(_of("RUN")))
    assert sorted(data) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "packages").iterdir())


def test_it_serves_as_a_user_without_rights() -> None:
    names = [name for name, _ in _instructions()]
    (user,) = _of("USER")
    assert user != "root" and f" {user}" in " ".join(_of("RUN")) and names.index("USER") > names.index("VOLUME")
    program, *words = json.loads(_of("ENTRYPOINT")[0]) + json.loads(_of("CMD")[0])
    assert program == "draftree"
    command: Any = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    with command.make_context(words[0], words[1:]) as context:
        assert context.params["host"] == "0.0.0.0"  # noqa: S104 - inside the container
        assert context.params["port"] == int(_of("EXPOSE")[0])


def test_its_health_is_asked_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = _of("HEALTHCHECK")
    _, _, command = check.partition("CMD ")
    program, flag, code = json.loads(command)
    assert (program, flag) == ("python", "-c")
    asked: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", asked.append)
    exec(compile(code, "HEALTHCHECK", "exec"), {})  # noqa: S102 - our own line
    (url,) = asked
    assert url.startswith(f"http://127.0.0.1:{_of('EXPOSE')[0]}/") and url.endswith(OPEN)
