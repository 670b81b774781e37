"""``draftree train head`` and decoding with what it trained, through the entry point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.train import eagle_fit as fit
from draftree.train import head_data
from draftree.train import responses as draw
from draftree.train.prompts import read_prompts

from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]

QUESTIONS = ["the cat in the hat", "a b a b a b", "is the hat in the cat?", "one two three", "where is the rain"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(QUESTIONS))
    return path


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained by ``asked``; ``--rows`` changes nothing about it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "prompts.txt").write_text("\n".join(QUESTIONS))
    assert run(asked(model, folder / "prompts.txt", folder / "head", "--rows", "2")) == 0
    return folder / "head"


def asked(model: str, prompts: Path, out: Path, *more: str) -> list[str]:
    given = ["train", "head", "--prompts", str(prompts), "--out", str(out), "--target", model, "--max-tokens", "24"]
    return [*given, "--steps", "6", "--held-out", "2", "--vocabulary", "40", "--batch", "2", "--no-bf16", *more]


def complaint(capsys: Captured) -> str:
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert printed.err.startswith("draftree: ")
    return printed.err


def test_it_trains_a_head_that_generate_drafts_with(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "head"
    capsys.readouterr()
    assert run(asked(model, prompts, out, "--licence", "CC0")) == 0
    printed = capsys.readouterr()
    assert "greedy: acceptance at depth 1 to 5: " in printed.out
    assert printed.err == ""
    card = (out / "README.md").read_text()
    assert f"| {prompts.name} | {len(QUESTIONS)} | CC0 | `" in card
    assert "6 steps of 2 responses" in card
    assert "opt-tree, 16 nodes" in card
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "head.safetensors", "work"]

    question = ["generate", QUESTIONS[0], "--target", model, "--max-tokens", "24", "--json", "--drafter"]
    assert run([*question, "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*question, str(out), "--method", "opt-tree", "--nodes", "12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == plain["token_ids"]
    assert report["stats"]["drafted"] > 0
    assert run(["calibrate", "--prompts", str(prompts), "--out", str(tmp_path / "tree.json"), "--target", model,
                "--drafter", str(out), "--max-tokens", "24", "--depth", "3"]) == 0  # fmt: skip


def test_a_second_run_has_nothing_left_to_do(model: str, trained: Path, prompts: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "head")
    before = {p: p.read_bytes() for p in (out / "head.safetensors", out / "README.md", out / "work" / "figures.json")}
    (out / "head.safetensors").unlink()
    assert run(asked(model, prompts, out)) == 0
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("stage", ["responses", "steps"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    stage: str,
    model: str,
    trained: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "head"
    drawn, steps = draw.respond, fit.Fit.run

    def interrupted(given: Iterator[object]) -> Iterator[object]:
        yield next(given)
        yield next(given)
        raise KeyboardInterrupt

    capsys.readouterr()
    with monkeypatch.context() as patch:
        if stage == "responses":
            patch.setattr(head_data, "respond", lambda *a, **k: interrupted(drawn(*a, **k)))
        else:
            patch.setattr(fit.Fit, "run", lambda self: interrupted(steps(self)))
        assert run(asked(model, prompts, out, "--rows", "2")) == 1
    assert "interrupted: the same command goes on from there" in complaint(capsys)
    assert not (out / "config.json").exists()
    assert run(asked(model, prompts, out, "--rows", "2")) == 0
    for name in ("head.safetensors", "README.md", "config.json"):
        assert (out / name).read_bytes() == (trained / name).read_bytes(), name


def test_steps_follow_the_hours(model: str, prompts: Path, tmp_path: Path) -> None:
    given = asked(model, prompts, tmp_path / "head", "--hours", "0.001")
    given[given.index("--steps") : given.index("--steps") + 2] = []
    assert run(given) == 0
    assert "steps of 2 responses" in (tmp_path / "head" / "README.md").read_text()


def test_a_head_can_start_from_another(model: str, trained: Path, prompts: Path, tmp_path: Path) -> None:
    assert run(asked(model, prompts, tmp_path / "two", "--init", str(trained), "--learning-rate", "1e-9")) == 0
    assert "start: the head head" in (tmp_path / "two" / "README.md").read_text()
    heads = [(folder / "head.safetensors").read_bytes() for folder in (trained, tmp_path / "two")]
    assert sum(a != b for a, b in zip(*heads, strict=True)) < 0.01 * len(heads[0])


def test_other_settings_are_refused_unless_forced(
    model: str, trained: Path, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = shutil.copytree(trained, tmp_path / "head")
    capsys.readouterr()
    assert run(asked(model, prompts, out, "--learning-rate", "1e-4")) == 2
    assert "of a training with other responses or settings" in complaint(capsys)
    assert run(asked(model, prompts, out, "--learning-rate", "1e-4", "--force")) == 0
    capsys.readouterr()
    assert run(asked(model, prompts, out, "--max-tokens", "20")) == 2
    assert "holds responses of another target, other prompts or other settings" in complaint(capsys)


def test_nothing_to_learn_from_is_said(model: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert run(asked(model, prompts, tmp_path / "head", "--held-out", "5")) == 1
    assert "no responses to learn from: 5 prompts, of which 5 are kept apart" in complaint(capsys)


BAD = {
    "no hours": (["--hours", "0"], "hours is 0"),
    "no tokens": (["--tokens", "0"], "tokens is 0"),
    "no steps": (["--steps", "0"], "steps is 0"),
    "no vocabulary": (["--vocabulary", "0"], "vocabulary is 0"),
    "no rows": (["--rows", "0"], "rows is 0"),
    "no responses": (["--responses", "0"], "responses is 0"),
    "fewer than none": (["--held-out", "-1"], "held_out is -1"),
    "one token": (["--max-tokens", "1"], "max_tokens is 1"),
    "no batch": (["--batch", "0"], "batch is 0"),
    "no unrolling": (["--unroll", "0"], "unroll 0"),
    "no rate": (["--learning-rate", "0"], "learning rate is 0"),
    "negative seed": (["--seed", "-1"], "seed is -1"),
    "no folder": (["--out", "nowhere/head"], "folder nowhere"),
    "no head to start from": (["--init", "nowhere"], "no draft head in nowhere"),
    "a licence too many": (["--licence", "MIT", "--licence", "CC0"], "2 --licence for 1 --prompts"),
    "no prompt file": (["--prompts", "nowhere.txt"], "no prompt file 'nowhere.txt'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_work(case: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments, named = BAD[case]
    assert run(asked("./nowhere", prompts, tmp_path / "head", *arguments)) == 2
    assert named in complaint(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"]


def test_a_folder_of_something_else_is_refused(prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run(asked("./nowhere", prompts, tmp_path)) == 2
    assert "holds another model: give --out a folder of its own" in complaint(capsys)
    assert run(asked("./nowhere", prompts, prompts)) == 2
    assert "prompts.txt is a file: give --out a folder" in complaint(capsys)


DOLLY = '{"id": 0, "instruction": "When?", "context": "In May.", "response": "May"}\n'
SELF_INSTRUCT = '{"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]}\n{"instruction": "Sing."}\n'
EMPTY_INPUT = '{"instruction": "Sing.", "instances": [{"input": "", "output": "la"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("dolly.jsonl", DOLLY, ["When?\n\nIn May."]),
        ("gsm8k.jsonl", '{"question": "1 + 1?", "answer": "2"}\n', ["1 + 1?"]),
        ("mbpp.jsonl", '{"text": "Write add.", "code": "", "task_id": 601}\n', ["Write add."]),
        ("self.jsonl", SELF_INSTRUCT, ["Sort.\n\nb a", "Sing."]),
        ("self.jsonl", EMPTY_INPUT, ["Sing."]),
        ("plain.jsonl", '{"prompt": "Hello"}\n\n{"text": "Bye"}\n', ["Hello", "Bye"]),
        ("acts.csv", 'act,prompt,for_devs\n"x","Say ""a""\nand b",FALSE\ny,Go,TRUE\n', ['Say "a"\nand b', "Go"]),
        ("plain.txt", "one\n\n two \n", ["one", "two"]),
    ],
)
def test_prompt_files_are_read_as_they_are(name: str, content: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", "act,text\nx,y\n", 'a.csv line 1 has no column "prompt"'),
        ("a.csv", "", 'a.csv line 1 has no column "prompt"'),
        ("a.csv", 'act,prompt\nx,y\nz,""\n', "a.csv line 3 has no prompt"),
        ("a.csv", "act,prompt\nx\n", "a.csv line 2 has no prompt"),
        ("a.csv", 'act,prompt\nx,"y\n', "a.csv line 2 is not CSV"),
        ("a.csv", "act,prompt\n", "a.csv has no prompts"),
        ("a.jsonl", '{"instruction": "x"}\n{"response": "y"}\n', "a.jsonl line 2 has no"),
        ("a.jsonl", '{"instruction": "x"}\nx\n', "a.jsonl line 2 is not JSON"),
    ],
)
def test_a_file_in_another_format_says_which_line(
    name: str, content: str, named: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / name).write_text(content)
    assert run(asked("./nowhere", tmp_path / name, tmp_path / "head")) == 2
    assert named in complaint(capsys)
