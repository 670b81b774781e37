"""``draftree bench`` on tiny models: what a run writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import draftree
from benchmarks.quality.answers import read_items
from draftree.bench import contestants
from draftree.bench.entries import entries
from draftree.bench.results import Turn, read_results
from draftree.bench.run import RunPlan
from draftree.bench.suites import Item
from draftree.cli.bench import code_digest, commit
from draftree.cli.main import run
from draftree.config import SamplingParams
from draftree.models.heads import own_heads
from draftree.models.heads.eagle_network import save_head
from draftree.models.heads.own_heads import own_head_for
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.loading import load

from ..conftest import Full
from ..heads import DRAFTED, random_network
from ..tiny import save_tiny

Captured = pytest.CaptureFixture[str]
PROMPTS = ["the cat in the hat", "a b a b a b a b", "one the other one"]
METHODS = ["ar", "chain:depth=2", "opt-tree:nodes=4", "peer:hf-generate", "peer:hf-prompt-lookup"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suites") / "own.jsonl"
    rows = [{"turns": [p, "and again"], "id": f"p{i}", "category": "ab"[i % 2]} for i, p in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _asked(model: str, suite: str, out: Path, *more: str, methods: str = ",".join(METHODS[1:])) -> list[str]:
    asked = ["bench", "--suite", suite, "--target", model, "--drafters", "self", "--max-tokens", "8"]
    return [*asked, "--methods", methods, "--out", str(out), *more]


def _summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_a_run_has_a_line_for_each_prompt_and_method(model: str, suite: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(_asked(model, suite, tmp_path / "out")) == 0
    records = read_results(tmp_path / "out")
    assert len(records) == len(PROMPTS) * len(METHODS)
    assert {(r.prompt, r.method) for r in records} == {(f"p{i}", m) for i in range(3) for m in METHODS}
    assert all(len(r.turns) == 2 and 0 < r.tokens <= 16 for r in records)
    printed = capsys.readouterr().out
    assert all(f"| {m} " in printed for m in METHODS)
    rows = _summary(tmp_path / "out")["methods"]
    assert set(rows) == set(METHODS)
    assert set(rows["ar"]) == {"all", "a", "b"}
    plain = rows["ar"]["all"]
    assert plain["speedup"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert (plain["mal"], plain["nodes_per_token"], plain["ids_equal"]) == (1.0, 0.0, 1.0)
    for name in METHODS:
        assert rows[name]["all"]["ids_equal"] == 1.0, name
    chain = rows["chain:depth=2"]["all"]
    assert chain["mal"] > 1
    parts = sum(chain["seconds"][k] for k in ("prefill", *chain["share"]))
    assert chain["seconds"]["total"] == pytest.approx(parts, rel=1e-5)  # each is a sum of figures with six digits
    assert sum(chain["share"].values()) == pytest.approx(1, rel=1e-5)
    assert rows["peer:hf-generate"]["all"]["mal"] == 1.0
    assert rows["peer:hf-generate"]["all"]["share"] is None


def test_processor_time_of_an_answer_is_recorded(model: str, suite: str, tmp_path: Path) -> None:
    assert run(_asked(model, suite, tmp_path / "out", methods="chain")) == 0
    turns = [turn for record in read_results(tmp_path / "out") for turn in record.turns]
    assert all(turn.cpu is not None and 0 < turn.cpu < 100 * turn.seconds.total for turn in turns)


def test_top_k_and_top_p_hold_for_all_contestants(model: str, suite: str, tmp_path: Path, capsys: Captured) -> None:
    """Of one token, and of next to no probability, nothing is left to draw: the text is that of temperature 0."""
    methods, limit = "chain,beams:width=2:drafter=self", ("--limit", "1")
    own = [*limit, "--temperature", "1"]
    assert run(_asked(model, suite, tmp_path / "greedy", *limit, methods="chain")) == 0
    greedy = read_results(tmp_path / "greedy")[0]
    for name, value in (("--top-k", "1"), ("--top-p", "0.000001")):
        assert run(_asked(model, suite, tmp_path / name, *own, name, value, methods=methods)) == 0
        for record in read_results(tmp_path / name):
            assert [turn.ids for turn in record.turns] == [turn.ids for turn in greedy.turns], (name, record.method)
    capsys.readouterr()
    assert run(_asked(model, suite, tmp_path / "--top-k", *own, "--top-k", "2", methods=methods)) == 2
    assert "top_k" in capsys.readouterr().err


def test_a_target_without_a_head_is_drafted_for_by_lookup(model: str, suite: str, tmp_path: Path) -> None:
    """The default was a head, which few targets have."""
    words = ["bench", "--suite", suite, "--target", model, "--max-tokens", "4", "--methods", "chain", "--limit", "1"]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    assert [record.method for record in read_results(tmp_path / "out")] == ["ar", "chain"]


def test_a_run_says_what_it_was_made_on(model: str, suite: str, tmp_path: Path) -> None:
    assert run(_asked(model, suite, tmp_path / "out", methods="chain")) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ran = _summary(tmp_path / "out")["ran"]
    assert (ran["tier"], ran["threads"], ran["accelerator"]) == ("torch", torch.get_num_threads(), "")
    assert config["versions"]["torch"] == torch.__version__
    assert config["commit"] == commit()
    assert config["code"] == code_digest(Path(draftree.__file__).parent)
    assert [item.id for item in read_items(tmp_path / "out")] == ["p0", "p1", "p2"]


def test_answers_of_another_version_of_the_code_are_another_run(tmp_path: Path) -> None:
    """A commit tells nothing of what is changed behind it, nor of the native library."""
    files = [tmp_path / name for name in ("a.py", "inner/b.py", "inner/lib.so")]
    (tmp_path / "inner").mkdir()
    for file in (*files, tmp_path / "a.pyc"):
        file.write_text("one")
    first = code_digest(tmp_path)
    os.utime(files[0], (1, 1))
    (tmp_path / "a.pyc").write_text("two")
    assert code_digest(tmp_path) == first
    seen = {first}
    for file in files:
        file.write_text("two")
        seen.add(code_digest(tmp_path))
    assert len(seen) == 4


def test_a_finished_run_says_that_nothing_was_decoded(model: str, suite: str, tmp_path: Path, capsys: Captured) -> None:
    told = []
    for _ in range(2):
        assert run(_asked(model, suite, tmp_path / "out", "--limit", "1", methods="chain")) == 0
        told.append("finished earlier" in capsys.readouterr().err)
    assert told == [False, True]


def test_trees_by_entropy_take_part_and_depth_and_nodes_are_reported(
    model: str, suite: str, tmp_path: Path, capsys: Captured
) -> None:
    steps = "dynamic-width:width=2:depth=3"
    loose = "chain:verify=relaxed"
    assert run(_asked(model, suite, tmp_path / "out", "--limit", "1", methods=f"{steps},{loose}")) == 0
    rows = _summary(tmp_path / "out")["methods"]
    assert set(rows) == {"ar", steps, loose}
    trees = [t.steps for r in read_results(tmp_path / "out") if r.method == steps for t in r.turns if t.steps]
    for key, column in (("nodes_per_step", "nodes"), ("depth_per_step", "depth")):
        values = [value for tree in trees for value in getattr(tree, column)]
        assert rows[steps]["all"][key] == pytest.approx(sum(values) / len(values)), column
    assert rows[steps]["all"]["ids_equal"] == 1.0
    assert 1 < rows[steps]["all"]["depth_per_step"] <= 3
    assert "nodes/step" in capsys.readouterr().out


def test_columns_of_steps_add_up(model: str, suite: str, tmp_path: Path) -> None:
    assert run(_asked(model, suite, tmp_path / "out", methods="static:nodes=6")) == 0
    for record in read_results(tmp_path / "out"):
        for turn in record.turns:
            steps = turn.steps
            assert steps is not None and turn.drafted is not None
            assert sum(steps.gained) == len(turn.ids) - 1 == len(turn.drafted) - 1
            assert len(steps.gained) == len(steps.nodes) == len(steps.expected) == turn.passes
            assert sum(steps.drafted_by_depth) == sum(steps.nodes)
            assert (
                sum(turn.drafted)
                == sum(steps.accepted_by_depth)
                <= sum(steps.accepted)
                == sum(steps.accepted_by_probability)
            )
            assert all(a >= b for a, b in zip(steps.reached_by_probability, steps.accepted_by_probability, strict=True))
            assert sum(steps.reached_by_probability) <= sum(steps.nodes)
            assert 0 < steps.target_seconds < turn.seconds.total
            assert turn.seconds.draft is not None
            assert (0 < steps.drafter_seconds < turn.seconds.draft) == (record.method != "ar")


def test_sampled_ids_equal_ar_decoding_under_the_same_seed(model: str, suite: str, tmp_path: Path) -> None:
    more = ("--temperature", "0.5,1")
    assert run(_asked(model, suite, tmp_path / "out", *more, methods="opt-tree,peer:hf-generate")) == 0
    rows = _summary(tmp_path / "out")["methods"]
    assert set(rows) == {f"{m} T={t}" for m in ("ar", "opt-tree", "peer:hf-generate") for t in ("0.5", "1")}
    assert rows["opt-tree T=1"]["all"]["ids_equal"] == 1.0
    assert rows["peer:hf-generate T=1"]["all"]["verdicts"].get("other-draw", 0) > 0


def test_a_finished_run_decodes_nothing_again(
    model: str, suite: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _asked(model, suite, tmp_path / "out")
    assert run(asked) == 0
    first = capsys.readouterr().out
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    monkeypatch.setattr(contestants, "load", None)
    assert run(asked) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_a_killed_run_loses_nothing_and_repeats_nothing(model: str, suite: str, tmp_path: Path) -> None:
    """Killed without warning in mid-run, its last line torn on top of it."""
    asked, results = _asked(model, suite, tmp_path / "out"), tmp_path / "out" / "results.jsonl"
    program = [sys.executable, "-c", "from draftree.cli.main import main; main()", *asked]
    same = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # a run goes on with as many threads alone
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=same)  # noqa: S603
    while not results.exists() or results.read_bytes().count(b"\n") < 7:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = results.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    with results.open("ab") as file:
        file.write(kept[:40])
    assert 7 <= kept.count(b"\n") < 45
    assert run(asked) == 0
    assert results.read_bytes().startswith(kept)
    records = read_results(tmp_path / "out")
    assert len(records) == len(PROMPTS) * len(METHODS) == len({r.key for r in records})


def _plan(prompts: int) -> RunPlan:
    items = [Item(str(i), "a", ("x",)) for i in range(prompts)]
    return RunPlan(items, entries(["chain", "opt-tree"], ["lookup"], [0.0], 4), 8)


def test_contestants_take_turns_and_each_is_first_as_often() -> None:
    labels = [entry.label for _, entry in _plan(6).missing([])]
    rounds = [labels[at : at + 3] for at in range(0, len(labels), 3)]
    assert all(sorted(order) == ["ar", "chain", "opt-tree"] for order in rounds)
    assert [order[0] for order in rounds] == ["ar", "chain", "opt-tree"] * 2
    left = _plan(2).missing({("0", "ar"), ("1", "opt-tree")})
    assert [(item.id, entry.label) for item, entry in left] == [
        ("0", "chain"),
        ("0", "opt-tree"),
        ("1", "chain"),
        ("1", "ar"),
    ]


@pytest.mark.parametrize(
    ("more", "key"),
    [(("--max-tokens", "9"), "max_tokens 8"), (("--limit", "2"), "prompts 3"), (("--seed", "1"), "seed")],
)
def test_another_configuration_is_refused(
    more: tuple[str, str], key: str, model: str, suite: str, tmp_path: Path, capsys: Captured
) -> None:
    asked = _asked(model, suite, tmp_path / "out", methods="chain")
    assert run(asked) == 0
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    capsys.readouterr()
    assert run([*asked, *more]) == 2
    assert key in capsys.readouterr().err
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_a_run_that_failed_before_its_first_answer_gives_way(
    model: str, suite: str, tmp_path: Path, capsys: Captured
) -> None:
    """Its configuration refused the folder to the command in which the mistake was mended."""
    out, wrong = tmp_path / "out", tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps({"prompt": "a b " * 200}) + "\n")
    assert run(_asked(model, str(wrong), out, methods="chain")) == 2
    assert (out / "config.json").exists() and not read_results(out)
    assert run(_asked(model, suite, out, methods="chain")) == 0
    assert len(read_results(out)) == 6 and {item.id for item in read_items(out)} == {"p0", "p1", "p2"}
    assert json.loads((out / "config.json").read_text())["suite"] == suite
    capsys.readouterr()
    assert run(["report", str(out)]) == 0
    assert "3 of 3 prompts of own.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["c++", "a>", "++"])
def test_the_path_of_a_model_may_have_what_stands_between_drafters(
    folder: str, model: str, suite: str, tmp_path: Path
) -> None:
    copy = tmp_path / folder / "model"
    shutil.copytree(model, copy)
    assert run(_asked(str(copy), suite, tmp_path / "out", "--limit", "1", methods="chain")) == 0
    assert str(copy) in json.loads((tmp_path / "out" / "config.json").read_text())["files"]


def test_a_file_behind_a_name_that_has_changed_is_refused(
    model: str, suite: str, tmp_path: Path, capsys: Captured
) -> None:
    """Half of the answers would be another model's, or another tree's."""
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    asked = _asked(str(copy), suite, tmp_path / "out", methods="chain")
    assert run(asked) == 0
    assert run(asked) == 0
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert run(asked) == 2
    assert f"files {copy}" in capsys.readouterr().err


@pytest.mark.parametrize(("drafter", "before"), [("auto", None), ("auto", 1), ("head", 1)])
def test_answers_of_another_head_are_not_added(
    drafter: str, before: int | None, suite: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was trained between two starts drafted the rest, and the report averaged both."""
    monkeypatch.setattr(own_heads, "heads_folder", lambda: tmp_path / "heads")
    model = str(save_tiny(tmp_path / "model"))
    target = load(model)
    assert isinstance(target, HFModel)
    target.track_features()

    def train(seed: int | None) -> None:
        shutil.rmtree(tmp_path / "heads", ignore_errors=True)
        if seed is not None:
            save_head(own_head_for(target), random_network(target, seed), DRAFTED, target)

    asked = [*_asked(model, suite, tmp_path / "out", methods="chain,peer:hf-generate"), "--drafters", drafter]
    train(before)
    with monkeypatch.context() as patch:
        _press_after(patch, answers=6)
        assert run(asked) == 130
    kept = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert kept
    train(2)
    capsys.readouterr()
    assert run(asked) == 2
    complaint = capsys.readouterr().err
    assert "models chain" in complaint and "--out another folder" in complaint and complaint.count("\n") == 1
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == kept
    train(before)
    assert run(asked) == 0
    assert len(read_results(tmp_path / "out")) == 9


def test_a_full_disk_is_one_line_and_keeps_what_is_done(
    model: str, suite: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _asked(model, suite, tmp_path / "out", methods="chain")
    opened: Any = Path.open

    def find_room_for_two(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        full = mode == "ab" and path.exists() and path.read_bytes().count(b"\n") == 2
        return Full(0) if full else opened(path, mode, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", find_room_for_two)
        assert run(asked) == 1
    complaint = capsys.readouterr().err
    assert "No space left on device" in complaint and complaint.count("\n") == 1
    assert len(read_results(tmp_path / "out")) == 2
    assert run(asked) == 0
    assert len(read_results(tmp_path / "out")) == 6


def _press_after(monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    """Ctrl-C in the middle of an answer (warm-ups count)."""
    decode, count = contestants.EngineContestant.decode, 0

    def interrupted(self: contestants.EngineContestant, prompt: list[int], params: SamplingParams) -> Turn:
        nonlocal count
        count += 1
        if count == answers:
            os.kill(os.getpid(), signal.SIGINT)
        return decode(self, prompt, params)

    monkeypatch.setattr(contestants.EngineContestant, "decode", interrupted)


def test_ctrl_c_keeps_the_answers_that_have_ended(
    model: str, suite: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _asked(model, suite, tmp_path / "out", methods="chain")
    with monkeypatch.context() as patch:
        _press_after(patch, answers=5)  # two warm-ups, the two turns of an answer, then the next one's first
        assert run(asked) == 130
    assert "interrupted after 1 of 6 answers: the same command goes on" in capsys.readouterr().err
    assert len(read_results(tmp_path / "out")) == 1
    assert run(asked) == 0
    assert len(read_results(tmp_path / "out")) == 6


def test_a_prompt_that_does_not_fit_is_left_out(model: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "own.jsonl"
    long, short = json.dumps({"prompt": "a b " * 200}), json.dumps({"prompt": "a b"})
    path.write_text(f"{long}\n{short}\n")
    assert run(_asked(model, str(path), tmp_path / "out", methods="chain")) == 0
    assert "1 of 2 prompts are left out" in capsys.readouterr().err
    assert {r.prompt for r in read_results(tmp_path / "out")} == {"2"}
    path.write_text(f"{long}\n")
    assert run(_asked(model, str(path), tmp_path / "none", methods="chain")) == 2
    assert "no prompt of the suite fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--temperature", "x"), "use numbers with commas"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
    ],
)
def test_bad_options_are_one_line(
    more: tuple[str, str], why: str, model: str, suite: str, tmp_path: Path, capsys: Captured
) -> None:
    assert run([*_asked(model, suite, tmp_path / "out"), *more]) == 2
    complaint = capsys.readouterr().err
    assert why in complaint and complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_entry_of_a_line_says_who_it_was(model: str, suite: str, tmp_path: Path) -> None:
    assert run(_asked(model, suite, tmp_path / "out", methods="chain")) == 0
    chain = next(r for r in read_results(tmp_path / "out") if r.method == "chain")
    assert (chain.drafter, chain.temperature) == ("self", 0.0)


def test_without_a_suite_and_a_folder_it_runs_on_what_ships_and_goes_on_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    model = str(save_tiny(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "--target", model, "--drafters", "self", "--methods", "chain", "--max-tokens", "3", "--limit"]
    assert run([*asked, "2"]) == 0
    (folder,) = Path("runs").iterdir()
    assert {r.category for r in read_results(folder)} == {"chat", "writing"}
    written = (folder / "results.jsonl").read_bytes()
    assert run([*asked, "2"]) == 0
    assert (folder / "results.jsonl").read_bytes() == written and [*Path("runs").iterdir()] == [folder]
    assert run([*asked, "1"]) == 0
    assert len([*Path("runs").iterdir()]) == 2
    assert f"draftree report {folder}" in capsys.readouterr().err


@pytest.mark.real
def test_bench_alone_is_a_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "--max-tokens", "6"]) == 0
    (folder,) = Path("runs").iterdir()
    rows = _summary(folder)["methods"]
    assert {*rows} == {"ar", "auto"} and rows["auto"]["all"]["prompts"] == 20
    assert rows["auto"]["all"]["ids_equal"] == 1.0
