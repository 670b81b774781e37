"""``draftree train head`` and decoding with what it trained, through the entry point."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftree.cli.main import run
from draftree.models.heads.head_folder import find_head
from draftree.models.huggingface.hf_model import HFModel
from draftree.train import eagle_fit as fit
from draftree.train import head_data
from draftree.train import responses as draw
from draftree.train.responses import read_prompts

from .. import tiny_gguf
from ..published import FLAGS, Recipe
from .messages import Captured, complaint

FILES = ["README.md", "config.json", "figures.json", "model.safetensors"]
QUESTIONS = ["the cat in the hat", "a b a b a b", "is the hat in the cat?", "one two three", "where is the rain"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(QUESTIONS))
    return path


def _trained(arch: str, model: str, folder: Path) -> Path:
    (folder / "prompts.txt").write_text("\n".join(QUESTIONS))
    assert run(asked(model, folder / "prompts.txt", folder / "head", "--rows", "2", "--arch", arch)) == 0
    return folder / "head"


@pytest.fixture(scope="module")
def trained(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head that was trained by ``asked``; ``--rows`` changes nothing about it."""
    return _trained("eagle", model, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def eagle3(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an EAGLE-3 head."""
    return _trained("eagle3", model, tmp_path_factory.mktemp("eagle3"))


def asked(model: str, prompts: Path, out: Path, *more: str) -> list[str]:
    given = ["train", "head", "--prompts", str(prompts), "--out", str(out), model, "--max-tokens", "12"]
    return [*given, "--steps", "6", "--held-out", "1", "--vocabulary", "40", "--batch", "2", "--no-bf16", *more]


@pytest.mark.parametrize(("arch", "engine"), [("eagle", "native"), ("eagle3", "transformers")])
def test_it_trains_a_head_that_generate_drafts_with(
    arch: str, engine: str, model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "head"
    if engine == "native":
        model = str(tiny_gguf.write(tmp_path / "model.gguf", layers=3, hidden=64, heads=2, kv_heads=1, context=512))
    capsys.readouterr()
    assert run(asked(model, prompts, out, "--licence", "CC0", "--arch", arch)) == 0
    printed = capsys.readouterr()
    assert "MAL of its chains" in printed.out
    assert printed.err == ""
    card = (out / "README.md").read_text()
    assert f"| {prompts.name} | {len(QUESTIONS)} | CC0 | `" in card
    assert "6 steps of 2 responses" in card
    assert "| 5 | " in card
    assert ("smooth L1" in card, "speculators" in card) == (arch == "eagle", arch == "eagle3")
    assert sorted(p.name for p in out.iterdir()) == [*FILES, "work"]

    question = ["generate", QUESTIONS[0], "--target", model, "--max-tokens", "24", "--json", "--drafter"]
    assert run([*question, "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*question, str(out), "--method", "opt-tree", "--nodes", "12"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == plain["token_ids"]
    assert sum(report["stats"]["drafted"]) > 0
    assert run(["calibrate", "--prompts", str(prompts), "--out", str(tmp_path / "tree.json"), "--target", model,
                "--drafter", str(out), "--max-tokens", "24", "--depth", "3"]) == 0  # fmt: skip


@pytest.mark.parametrize("arch", ["eagle", "eagle3"])
def test_a_head_has_the_mlp_that_is_asked_for(arch: str, model: str, prompts: Path, tmp_path: Path) -> None:
    assert run(asked(model, prompts, tmp_path / "head", "--arch", arch, "--feed-forward", "32")) == 0
    head = find_head(tmp_path / "head")
    assert head is not None
    assert head.config.intermediate_size == 32
    assert head.arrays(None).tensors["layers.0.mlp.gate_proj.weight"].shape[0] == 32


def test_a_packed_head_is_smaller_and_drafts(model: str, trained: Path, prompts: Path, tmp_path: Path) -> None:
    assert run(asked(model, prompts, out := tmp_path / "head", "--packed")) == 0
    assert (out / "model.safetensors").stat().st_size < 0.6 * (trained / "model.safetensors").stat().st_size
    assert run(["generate", "the cat", "--target", model, "--max-tokens", "8", "--drafter", str(out)]) == 0


def test_an_eagle3_head_is_not_packed(model: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(asked(model, prompts, tmp_path / "head", "--packed", "--arch", "eagle3")) == 2
    assert "leave --packed out" in complaint(capsys)
    assert not (tmp_path / "head" / "work").exists()


def test_a_second_run_has_nothing_left_to_do(model: str, trained: Path, prompts: Path, tmp_path: Path) -> None:
    out = shutil.copytree(trained, tmp_path / "head")
    before = {out / name: (out / name).read_bytes() for name in FILES}
    (out / "model.safetensors").unlink()
    assert run(asked(model, prompts, out)) == 0
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(("arch", "stage"), [("eagle", "responses"), ("eagle3", "steps")])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    arch: str,
    stage: str,
    model: str,
    prompts: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    whole: Path = request.getfixturevalue("trained" if arch == "eagle" else arch)
    out, arguments = tmp_path / "head", ("--rows", "2", "--arch", arch)
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
        assert run(asked(model, prompts, out, *arguments)) == 130
    assert "interrupted: the same command goes on from there" in complaint(capsys)
    assert (out / "config.json").exists() is (stage == "steps")
    assert run(asked(model, prompts, out, *arguments)) == 0
    for name in FILES:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("interrupted", range(3))
def test_steps_follow_the_hours_in_rounds(
    interrupted: int, model: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted as a round has drawn its responses, it goes on from what the round before it left."""
    given = asked(model, prompts, tmp_path / "head", "--hours", "0.001")
    given[given.index("--steps") : given.index("--steps") + 2] = []
    rounds, collect = 0, head_data.HeadData.collect

    def counted(*args: Any, **given: Any) -> None:
        nonlocal rounds
        collect(*args, **given)
        rounds += 1
        if rounds == interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(head_data.HeadData, "collect", counted)
    assert run(given) == (130 if interrupted else 0)
    assert (tmp_path / "head" / "config.json").exists() is (interrupted != 1)
    assert not interrupted or run(given) == 0
    assert rounds == (2 if interrupted == 0 else 3)
    assert [path.name for path in (tmp_path / "head" / "work").glob("*.pt")] == ["checkpoint-2.pt"]
    assert "steps of 2 responses" in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize("arch", ["eagle", "eagle3"])
def test_a_head_can_start_from_another(
    arch: str, model: str, prompts: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    start: Path = request.getfixturevalue("trained" if arch == "eagle" else arch)
    given = ["--arch", arch, "--init", str(start), "--learning-rate", "1e-9"]
    assert run(asked(model, prompts, tmp_path / "two", *given)) == 0
    assert "start: the head head" in (tmp_path / "two" / "README.md").read_text()
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "two"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.allclose(value.float(), after[name].float(), atol=1e-5), name


def test_a_head_of_another_kind_is_no_start(
    model: str, trained: Path, eagle3: Path, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    for arch, start in (("eagle", eagle3), ("eagle3", trained)):
        capsys.readouterr()
        assert run(asked(model, prompts, tmp_path / "two", "--arch", arch, "--init", str(start))) == 2
        assert f"no draft head of this --arch in {start}" in complaint(capsys)
    assert not (tmp_path / "two").exists()


def test_a_published_head_is_a_start_if_it_is_one_layer_on_the_targets_embeddings(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    start, given = tmp_path / "start", ["--arch", "eagle3", "--init", str(tmp_path / "start"), "--steps", "1"]
    final = Recipe(ids=None, states=1, flags={"use_aux_hidden_state": False})
    for recipe in (Recipe(ids=(2, 0, 1)), Recipe(flags=FLAGS["two layers"]), Recipe(qk_norm=True), final):
        recipe.save(start)
        code = 0 if recipe.ids == (2, 0, 1) else 2
        capsys.readouterr()
        assert run(asked(model, prompts, tmp_path / f"two-{code}", *given)) == code
        assert code == 0 or "give --init a head of one Llama layer" in complaint(capsys)
    made = find_head(tmp_path / "two-0")
    assert made is not None and made.config.eagle_aux_hidden_state_layer_ids == (2, 0, 1)
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "two-0" / "model.safetensors")
    assert torch.equal(before["d2t"], after["d2t"]) and not torch.equal(before["fc.weight"], after["fc.weight"])


def test_what_one_kind_of_head_has_begun_is_not_anothers(
    model: str, trained: Path, eagle3: Path, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    for arch, other in (("eagle", eagle3), ("eagle3", trained)):
        out = shutil.copytree(other, tmp_path / arch)
        capsys.readouterr()
        assert run(asked(model, prompts, out, "--arch", arch)) == 2
        assert "holds another model: give --out a folder of its own" in complaint(capsys)
        (out / "config.json").unlink()
        assert run(asked(model, prompts, out, "--arch", arch)) == 2
        assert "of other models, prompts or settings" in complaint(capsys)


def test_a_head_that_was_copied_here_is_not_overwritten(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    capsys.readouterr()
    out = Recipe().save(tmp_path / "head")
    assert run(asked(model, prompts, out, "--arch", "eagle3")) == 2
    assert "has a head, but no work that its training goes on from" in complaint(capsys)


def test_nothing_to_learn_from_is_said(model: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert run(asked(model, prompts, tmp_path / "head", "--held-out", "5")) == 2
    assert "--held-out 5 of 5 prompts leaves none to learn from" in complaint(capsys)
    assert not (tmp_path / "head" / "work").exists()
    two = prompts.with_name("two.txt")  # of which the longer one is not answered
    two.write_text("a\n" + "b " * 9)
    found = dict[int, str]()
    for seed in map(str, range(8)):
        ended = run(asked(model, two, tmp_path / seed, "--tokens", "1", "--rows", "1", "--seed", seed))
        found[ended] = capsys.readouterr().err
    assert found.keys() == {0, 1} and "no responses to learn from: of 2 prompts 1 are kept apart" in found[1]


BAD = {
    "one token": (["--max-tokens", "1"], "max-tokens is 1"),
    "no head to start from": (["--init", "nowhere"], "no draft head of this --arch in nowhere"),
    "a licence too many": (["--licence", "MIT", "--licence", "CC0"], "2 --licence for 1 --prompts"),
    "no such kind": (["--arch", "eagle9"], "--arch eagle9: use one of eagle, eagle3"),
    "an odd width": (["--feed-forward", "48"], "feed-forward is 48: use a multiple of 32"),
    "no prompt file": (["--prompts", "nowhere.txt"], "no prompt file 'nowhere.txt'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_any_work(case: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments, named = BAD[case]
    assert run(asked("./nowhere", prompts, tmp_path / "head", *arguments)) == 2
    assert named in complaint(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"]


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
        ("plain.jsonl", '{"prompt": "a\\nb", "text": "no"}\n\n{"text": "Bye", "id": 3}\n', ["a\nb", "Bye"]),
        ("acts.csv", 'act,prompt,for_devs\n"x","Say ""a""\nand b",FALSE\ny,Go,TRUE\n', ['Say "a"\nand b', "Go"]),
        ("plain.txt", 'one\r\n\n  {"prompt": "two"} \n', ["one", '{"prompt": "two"}']),
    ],
)
def test_prompt_files_are_read_as_they_are(name: str, content: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(str(tmp_path / name)) == (expected, hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", "act,answer\nx,y\n", "a.csv line 2 has no text under any of prompt, text"),
        ("a.csv", 'act,prompt\nx,y\nz,""\n', "a.csv line 3 has no text"),
        ("a.csv", "act,prompt\nx\n", "a.csv line 2 has no text"),
        ("a.csv", 'act,prompt\nx,"y\n', "a.csv line 2 is not CSV"),
        ("a.csv", "act,prompt\n", "a.csv has no prompts"),
    ],
)
def test_a_file_in_another_format_says_which_line(
    name: str, content: str, named: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / name).write_text(content)
    assert run(asked("./nowhere", tmp_path / name, tmp_path / "head")) == 2
    assert named in complaint(capsys)


@pytest.mark.parametrize(("option", "value"), [("--seed", str(2**62 - 1)), ("--responses", str(10**18))])
def test_options_hold_up_to_their_bounds(option: str, value: str, model: str, prompts: Path, tmp_path: Path) -> None:
    """A large seed failed after the responses had been drawn, and as many answers took all of the memory."""
    assert run([*asked(model, prompts, tmp_path / "head"), "--tokens", "60", option, value]) == 0


@pytest.mark.parametrize("value", ["1e305", "0", "nan", "inf"])
def test_hours_have_bounds(value: str, model: str, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(asked(model, prompts, tmp_path / "head", "--hours", value)) == 2
    assert "--hours" in complaint(capsys)


def test_no_more_room_is_taken_than_a_context_has(
    model: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved, reserve = list[int](), HFModel.reserve

    def noted(self: HFModel, rows: int, tokens: int) -> None:
        reserved.append(tokens)
        reserve(self, rows, tokens)

    monkeypatch.setattr(HFModel, "reserve", noted)
    given = asked(model, prompts, tmp_path / "head", "--tokens", "40", "--rows", "1")
    given[given.index("--max-tokens") + 1] = str(10**9)
    assert run([*given, "--backend", "transformers"]) == 0
    assert reserved and max(reserved) <= 4096


@pytest.mark.parametrize("option", ["--hours", "--tokens", "--responses"])
def test_another_amount_is_not_taken_for_the_same_training(
    option: str, model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    """More hours for a training that had ended changed nothing, and nothing was said."""
    given = asked(model, prompts, tmp_path / "head")
    assert run([*given, option, "3"]) == 0
    capsys.readouterr()
    assert run([*given, option, "7"]) == 2
    assert "checkpoint-1.pt" in complaint(capsys)
    (tmp_path / "head" / "work" / "checkpoint-1.pt").unlink()
    assert run([*given, option, "7"]) == 0


def test_a_head_without_what_it_was_trained_from_is_not_trained_on(
    model: str, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The user had deleted it as the last line said, and was told that the folder held something else."""
    given = asked(model, prompts, tmp_path / "head")
    assert run(given) == 0
    shutil.rmtree(tmp_path / "head" / "work")
    capsys.readouterr()
    assert run(given) == 2
    assert "has a head, but no work" in complaint(capsys)
