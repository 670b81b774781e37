"""``draftree heads``, and heads that are trained without naming a place: drafter auto finds them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftree.artifacts import LOCK, locked
from draftree.cli.main import run
from draftree.models.heads import head_folder, own_heads
from draftree.models.heads.own_heads import HEAD_RECORD, RECORD
from draftree.train import eagle_training, head_data

from ..tiny_gguf import write
from .messages import Captured, complaint

PROMPTS = "".join(json.dumps({"kind": "test", "prompt": f"the cat {n} in the hat"}) + "\n" for n in range(12))
TRAINING = "--max-tokens 12 --held-out 2 --vocabulary 40 --batch 2 --no-bf16 --responses 1".split()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's file, beside prompts and the folder of heads."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    monkeypatch.setattr(own_heads, "heads_folder", lambda: tmp_path / "heads")
    return str(write(tmp_path / "model.gguf", layers=3, hidden=64, heads=2, kv_heads=1, context=2048))


def train(target: str, folder: Path, *more: str) -> int:
    return run(["train", "head", target, "--prompts", str(folder / "prompts.jsonl"), *TRAINING, *more])


def drafter(target: str, capsys: Captured) -> str:
    """What auto stands for."""
    capsys.readouterr()
    assert run(["info", target]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("drafter auto"))
    return line.removeprefix("drafter auto").strip()


def test_a_head_is_trained_found_checked_and_removed(target: str, tmp_path: Path, capsys: Captured) -> None:
    assert not drafter(target, capsys).startswith("lookup+head")
    assert train(target, tmp_path, "--steps", "4") == 0
    assert "drafter auto finds it" in capsys.readouterr().out
    (folder,) = own_heads.own_heads()
    assert drafter(target, capsys).startswith("lookup+head")

    assert run(["heads"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"{folder.name}  for {target}, MAL ") and "on 2 responses kept apart" in line
    assert run(["heads", "check", "model"]) == 0
    measured = capsys.readouterr().out
    assert measured.startswith(f"{folder.name}: MAL ")
    assert run(["heads", "check", str(folder)]) == 0 and capsys.readouterr().out == measured
    assert run(["heads", "check", str(Path(target).parent)]) == 2 and "no head" in complaint(capsys)
    assert run(["heads", "remove", "mod"]) == 0
    assert not folder.exists() and not drafter(target, capsys).startswith("lookup+head")
    capsys.readouterr()
    assert run(["heads", "check", "model"]) == run(["heads", "remove", "smollm2"]) == 2


def test_a_head_in_a_folder_that_is_called_as_a_drafter_is_checked_itself(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Drafter head, the one that auto finds, was measured in its place, or was not there."""
    monkeypatch.chdir(tmp_path)
    assert train(target, tmp_path, "--steps", "4", "--out", "lookup") == 0
    assert f"--drafter {tmp_path / 'lookup'};" in capsys.readouterr().out
    for name in ("lookup", str(tmp_path / "lookup")):
        assert run(["heads", "check", name, "--target", target]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one == other


def test_the_head_of_a_base_model_is_checked_on_plain_text(tmp_path: Path, target: str, capsys: Captured) -> None:
    """It needed a chat template, and so could not be checked."""
    base = str(write(tmp_path / "base.gguf", layers=3, hidden=64, heads=2, kv_heads=1, context=2048, template=None))
    assert train(base, tmp_path, "--raw", "--steps", "2") == 0
    assert run(["heads", "check", "base"]) == 0
    assert ": MAL " in capsys.readouterr().out


@pytest.mark.parametrize("named", ["", "nobody/nothing"])
def test_a_head_whose_target_is_elsewhere_is_checked_with_its_file(
    named: str, target: str, tmp_path: Path, capsys: Captured
) -> None:
    """The error was about a file, or a hub, that was never named; the way out was in the help alone."""
    assert train(target, tmp_path, "--steps", "2") == 0
    (folder,) = own_heads.own_heads()
    config = folder / "config.json"
    config.write_text(config.read_text().replace(json.dumps(target), json.dumps(named or target)))
    moved = Path(target).rename(tmp_path / "moved.gguf")
    capsys.readouterr()
    assert run(["heads", "check", "model"]) == 2
    line = complaint(capsys)
    assert "--target FILE" in line and (named or target) in line and folder.name in line
    assert run(["heads", "check", "model", "--target", str(moved)]) == 0


def test_a_head_that_is_being_trained_is_not_removed(target: str, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "heads" / "model-1"
    with locked(folder, "it", folder=True):
        assert run(["heads", "remove", "model"]) == 2
    assert str(folder) in complaint(capsys) and folder.exists()


def test_what_is_removed_is_held_by_nobody(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Windows removes no folder with an open file, and the command had one open itself."""
    assert train(target, tmp_path, "--steps", "1") == 0
    (folder,) = own_heads.own_heads()
    (tmp_path / "elsewhere").mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    rmtree = shutil.rmtree

    def of_windows(path: Path) -> None:
        assert not [file for file in path.rglob("*") if file.name == LOCK]
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", of_windows)
    assert run(["heads", "remove", "model"]) == 0
    assert own_heads.own_heads() == [] and (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("name", [".hidden.gguf", "-.gguf"])
def test_a_head_for_a_file_with_an_odd_name_is_listed(name: str, target: str, tmp_path: Path, capsys: Captured) -> None:
    """Folders that begin with a dot are left out of the list, and so this head was never found."""
    path = Path(target).rename(tmp_path / name)
    assert train(str(path), tmp_path, "--steps", "1") == 0
    (folder,) = own_heads.own_heads()
    assert folder.name[0].isalpha() and drafter(str(path), capsys).startswith("lookup+head")


def test_training_starts_from_the_head_that_comes_for_a_model(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a minute of training, whose head ``auto`` prefers, never costs what far more text has taught."""
    assert train(target, tmp_path, "--steps", "40", "--out", str(shipped := tmp_path / "shipped")) == 0
    monkeypatch.setattr(head_folder, "shipped", lambda pattern: [shipped])
    assert train(target, tmp_path, "--steps", "1", "--learning-rate", "1e-9") == 0
    (folder,) = own_heads.own_heads()
    assert HEAD_RECORD.read(folder / RECORD).acceptance == HEAD_RECORD.read(shipped / RECORD).acceptance
    assert "start: the head shipped" in (folder / "README.md").read_text()
    assert run(["heads", "remove", "model"]) == 0
    assert train(target, tmp_path, "--steps", "1", "--feed-forward", "32") == 0
    assert "start: ridge regression" in (folder / "README.md").read_text()


def test_a_better_head_stays_where_more_responses_are_kept_apart_later(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round draws one of the three, the second all: the head of the first is measured anew."""
    learning = ["--steps", "120", "--held-out", "1", "--out", str(start := tmp_path / "start")]
    assert train(target, tmp_path, *learning) == 0
    monkeypatch.setattr(head_data, "by_length", lambda lengths, count: [2, *range(11, 2, -1), 0, 1])
    ruining = ["--hours", "0.002", "--tokens", "200", "--learning-rate", "0.99", "--held-out", "3", "--rows", "1"]
    assert train(target, tmp_path, *ruining, "--init", str(start), "--out", str(out := tmp_path / "out")) == 0
    record = HEAD_RECORD.read(out / RECORD)
    assert (record.steps, record.held_out) == (0, 3) and record.mal > 1
    (before,), (after,) = (folder.glob("*.safetensors") for folder in (start, out))
    assert torch.equal(*(load_file(path)["fc.weight"] for path in (before, after)))


def test_of_responses_and_steps_what_is_better_stays(
    target: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps at an absurd rate ruin a head: that of the regression is kept."""
    assert train(target, tmp_path, "--steps", "1", "--learning-rate", "1e-9") == 0
    (folder,) = own_heads.own_heads()
    kept = HEAD_RECORD.read(folder / RECORD)
    assert run(["heads", "remove", "model"]) == 0
    monkeypatch.setattr(eagle_training, "_EVERY", 0.0)
    assert train(target, tmp_path, "--steps", "6", "--learning-rate", "0.99") == 0
    found = HEAD_RECORD.read(folder / RECORD)
    assert found.mal >= kept.mal and found.held_out == kept.held_out == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from draftree.cli.main import run
from draftree.models.heads import own_heads
from draftree.train import eagle_fit

steps, (place, *words) = eagle_fit.Fit.run, sys.argv[1:]
own_heads.heads_folder = lambda: Path(place)

def killed(fit):
    for done in steps(fit):
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield done

eagle_fit.Fit.run = killed
run(words)
"""


def test_killed_it_leaves_a_head_and_goes_on(target: str, tmp_path: Path, capsys: Captured) -> None:
    words = ["train", "head", target, "--prompts", str(tmp_path / "prompts.jsonl"), *TRAINING, "--steps", "6"]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "heads"), *words]
    done = subprocess.run(command, capture_output=True, env=os.environ)  # noqa: S603 - our own program
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert drafter(target, capsys).startswith("lookup+head")
    assert run(words) == 0
    (folder,) = own_heads.own_heads()
    resumed = {name: (folder / name).read_bytes() for name in ("config.json", "figures.json", "model.safetensors")}
    assert run(["heads", "remove", "model"]) == run(words) == 0
    assert {name: (folder / name).read_bytes() for name in resumed} == resumed


def test_another_model_under_the_same_name_is_not_trained_on_from_there(
    target: str, tmp_path: Path, capsys: Captured
) -> None:
    assert (
        train(target, tmp_path, "--steps", "1")
        == train(target, tmp_path, "--steps", "1", "--out", out := str(tmp_path / "out"))
        == 0
    )
    write(Path(target), layers=3, hidden=64, heads=2, kv_heads=1, context=2048, seed=1)
    assert not drafter(target, capsys).startswith("lookup+head")
    assert train(target, tmp_path, "--steps", "1", "--out", out) == 2
    assert out in complaint(capsys)
    assert train(target, tmp_path, "--steps", "1") == 0
    assert len(own_heads.own_heads()) == 2 and drafter(target, capsys).startswith("lookup+head")
