"""Help: groups of options, hints at what was meant, completion."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command

from draftree.cli.main import COMMANDS, app, run
from draftree.cli.option_groups import GROUPS

Captured = pytest.CaptureFixture[str]


def _sections(printed: str) -> dict[str, list[str]]:
    """Title -> the first option names of its lines."""
    found: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if title := re.fullmatch(r"(\w[\w ]*):", line):
            found[title[1]] = []
        elif found and (option := re.match(r"  (-[\w-]+)", line)):
            found[[*found][-1]].append(option[1])
    return found


def test_generate_has_all_its_options_in_groups_and_ten_on_top(capsys: Captured) -> None:
    assert run(["generate", "--help"]) == 0
    sections = _sections(capsys.readouterr().out)
    assert [*sections] == ["Arguments", *GROUPS]
    assert len(GROUPS["Most used"]) == 10
    for title, options in GROUPS.items():
        assert sorted(sections[title]) == sorted(options)


def test_what_is_no_option_of_generate_is_a_commands_own(capsys: Captured) -> None:
    assert run(["bench", "--help"]) == 0
    sections = _sections(capsys.readouterr().out)
    assert [*sections][0] == "Options"
    assert "--suite" in sections["Options"] and "--backend" in sections["Model"]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("generat hi", "'generate'"),
        ("generate hi --max-tokns 3", "--max-tokens"),
        ("generate hi --method opttree", "opt-tree"),
        ("generate hi --verify mach", "match"),
        ("methods stattic", "static"),
    ],
)
def test_a_typo_suggests_what_was_meant(line: str, meant: str, capsys: Captured) -> None:
    assert run(line.split()) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and meant in printed


@pytest.mark.parametrize(("words", "completed"), [("gen", "generate"), ("generate --meth", "--method")])
def test_shells_complete_commands_and_options(
    words: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("_DRAFTREE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"draftree {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    with pytest.raises(SystemExit):
        run(["ignored"])
    assert completed in capsys.readouterr().out.split()


def test_help_loads_neither_models_nor_arrays() -> None:
    code = (
        "import sys; from draftree.cli.main import run; run(['--help']); "
        "print(sorted({'numpy', 'torch', 'rich', 'draftree.config'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_has_help() -> None:
    group = get_command(app)
    for name in COMMANDS:
        assert group.commands[name].help  # type: ignore[attr-defined]
