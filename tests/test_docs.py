"""Documents that could go stale: their code runs, their files are there, and every public name is explained."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import draftree
from draftree.bench.suites import SUITES
from draftree.cli.main import app, run

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.real
def test_the_code_of_the_python_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102 - our own guide
    assert len(blocks) >= 9
    assert capsys.readouterr().out


def test_the_python_guide_has_every_public_name() -> None:
    guide = (ROOT / "docs" / "python.md").read_text()
    missing = [name for name in draftree.__all__ if not re.search(rf"\b{name}\b", guide)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    gone = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert gone == []


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "Makefile"], ids=lambda path: path.name)
def test_modules_that_are_run_are_there(document: Path) -> None:
    named = re.findall(r"python -m ((?:benchmarks|draftree)[\w.]*)", document.read_text())
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def _commands(text: str) -> list[list[str]]:
    """Command lines of ``draftree`` in blocks of code, as words."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:    |\t)?\$? ?(draftree [a-z].*)$", fenced, re.MULTILINE)
    lines += re.findall(r"^    (draftree [a-z].*)$", text, re.MULTILINE)
    return [shlex.split(line.removesuffix("\\"), comments=True) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_parse(document: Path) -> None:
    for _, *words in _commands(document.read_text()):
        command: Any = get_command(app)
        while words and hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        with command.make_context(command.name, list(words)):
            pass


def test_the_commands_of_documents_are_found() -> None:
    found = {document.name: len(_commands(document.read_text())) for document in DOCUMENTS}
    least = {"quickstart.md": 15, "choosing.md": 8, "README.md": 3, "results.md": 5}
    assert all(found[name] >= count for name, count in least.items()), found


# Files that commands read.

DATA_FILE = re.compile(r"[\w./$*-]*\w\.(?:jsonl|json|txt|csv|gguf|py|svg|html|md|lark|gbnf)\b")
OF_THE_READER = re.compile(r"path/to/|my-|/mine/|(?:.*/)?[A-Z_]+\.\w+$")
"""How documents call what a reader brings, or chooses the name of."""
RECORDED = {"results.md", *(path.name for path in (ROOT / "docs" / "papers").glob("*.md"))}
"""Pages that ``make results`` writes, with the commands of its runs: it makes their files first."""
MAKERS = {"coder_prompts": ("code.jsonl", "maths.jsonl", "prose.jsonl")}
"""Benchmarks that fill the folder which they are given with these files."""


def _statements(text: str) -> list[list[str]]:
    """Commands of a document's blocks, as words; one may have a quoted text of several lines."""
    found, begun = list[list[str]](), ""
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in "\n".join([*blocks, *re.findall(r"^    (draftree .*|python -m .*)$", text, re.MULTILINE)]).splitlines():
        begun = f"{begun}\n{line}" if begun else line
        try:
            words = shlex.split(begun.removesuffix("\\"), comments=True)
        except ValueError:
            continue  # a quote is open
        begun = ""
        if words and (words[0] in ("draftree", "echo", "torchrun") or words[:2] == ["python", "-m"]):
            found.append(words)
    return found


def missing_files(text: str) -> list[str]:
    """Files that a document's commands read, which neither come with the project nor were made by a command before."""
    made, missing = set[str](), list[str]()
    for words in _statements(text):
        after, written = "", set[str]()
        for word in words:
            for file in DATA_FILE.findall(word) if words[0] != "echo" or after == ">" else ():
                last_of_batch = words[:2] == ["draftree", "batch"] and file == words[3]
                if after in (">", "--out", "--trace", "--plot") or last_of_batch:
                    written.add(file)
                elif file not in made and not OF_THE_READER.match(file) and not (ROOT / file).exists():
                    missing.append(file)
            after = word
        for benchmark, files in MAKERS.items():
            if f"benchmarks.{benchmark}" in words:
                written |= {f"{words[-1]}/{file}" for file in files}
        made |= written
    return missing


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.name not in RECORDED], ids=lambda p: p.name)
def test_files_that_commands_read_are_there_or_made_before(document: Path) -> None:
    assert missing_files(document.read_text()) == []


def test_a_file_that_nobody_has_is_found() -> None:
    page = """```
draftree calibrate --prompts prompts.txt --out tree.json
draftree generate "Why?" --set tree=tree.json --prediction file.py --target my-model.gguf
draftree batch questions.jsonl answers.jsonl
echo '{"prompt":
  "other.txt"}' > questions.jsonl
draftree batch questions.jsonl answers.jsonl --target path/to/model.gguf
draftree generate "Like $(cat area.py)" --drafter x.gguf+head
```
"""
    assert missing_files(page) == ["prompts.txt", "file.py", "questions.jsonl", "area.py", "x.gguf"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_prompts_of_examples_have_answers(document: Path) -> None:
    """Pasted as it stood, the prompt "..." was answered by 8,161 empty tokens."""
    assert [words for words in _commands(document.read_text()) if "..." in words] == []


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/choosing.md"])
def test_a_newcomer_needs_no_published_suite(name: str) -> None:
    suites = [words[words.index("--suite") + 1] for words in _commands((ROOT / name).read_text()) if "--suite" in words]
    assert [suite for suite in suites if suite in SUITES] == []


@pytest.mark.real
def test_the_answer_by_the_schema_of_the_quickstart_is_whole_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its strings had no bounds, and the answer went on until the context was full."""
    statements = _statements((ROOT / "docs" / "quickstart.md").read_text())
    (at,) = [i for i, words in enumerate(statements) if "--json-schema" in words]
    _, schema, _, file = statements[at - 1]
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(schema)
    assert run(statements[at][1:]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == json.loads(schema)["properties"].keys()


def test_the_changelog_is_short() -> None:
    """A merge kept the lines of all versions beside those that had replaced them."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 110


def test_the_readme_fits_a_terminal() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_the_readme_has_every_room_and_none_that_is_gone() -> None:
    tree = (ROOT / "README.md").read_text().split("## Where things are\n\n```\n")[1].split("```")[0]
    rooms = {path.parent.name for path in (ROOT / "src" / "draftree").glob("*/**/__init__.py")}
    named = set(re.findall(r"\b([a-z_]+)/", tree)) - {
        "src",
        "draftree",
        "packages",
        "native",
        "benchmarks",
        "tests",
        "docs",
        "examples",
    }
    assert named == rooms - {"native", "heads"} | {"heads"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_documents_name_are_there(document: Path) -> None:
    there = {path.name for top in ("src", "benchmarks", "examples", "tests") for path in (ROOT / top).rglob("*.py")}
    named = re.findall(r"`[a-z/]*?([a-z0-9_]+\.py)`", document.read_text())
    assert sorted(set(named) - there) == []
