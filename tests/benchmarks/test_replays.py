"""Replays: by a cost profile in place of the clock, and of recorded drafts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.c2t import held_against, joint
from benchmarks.recorded import Drafts, RecordedSource, add_options, record, recorded
from benchmarks.replay import HEADER, Clock, Clocked, Run, main, row
from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.replay import Replay
from draftree.models.cost_profile import Point as Size
from draftree.models.cost_profile import Profile
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.c2t import ClassifierTree
from draftree.papers.opt_tree import OptTree
from draftree.policies.best_paths import Eagle2Tree
from draftree.request import Outcome, Request, StepCost
from draftree.text.detokenizer import NoText
from draftree.tree import DraftTree

from .. import tiny_gguf
from ..heads import trained
from ..pairs import costs, source, target
from ..tiny import VOCAB, save_tiny
from ..toy import chain_tree

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
POLICIES = [Eagle2Tree(4, 5), OptTree(0.01, 6), ClassifierTree(joint, 0.05, 6, 6, 6), ClassifierTree(joint, 0.05, 1)]


def made(name: str, model: HFModel) -> DraftSource:
    return EagleSource(trained(model), VOCAB) if name == "head" else source(name, model)


@pytest.mark.parametrize("name", ["relative", "lookup", "head"])
def test_trees_of_recorded_drafts_are_those_of_the_drafter(name: str, tmp_path: Path) -> None:
    model = target()
    texts = list(record(model, made(name, model), PROMPTS, 7, tmp_path / "new" / "drafts.safetensors"))
    assert len(texts) == 2
    again = list(record(model, made(name, model), PROMPTS, 7, tmp_path / "new" / "drafts.safetensors"))
    assert [(t.prompt, t.text) for t in again] == [(t.prompt, t.text) for t in texts]
    for number, policy in enumerate(POLICIES):
        for known in again[number % 2 :][:1]:
            drafter = TreeDrafter(policy, made(name, model))
            verifier = model if model.tracked else None
            with (
                Replay(drafter, known.prompt, known.text, SamplingParams(), target=verifier) as real,
                Replay(TreeDrafter(policy, RecordedSource(known)), known.prompt, known.text, SamplingParams()) as told,
            ):
                while real.left:
                    (tree, path), (copy, same) = real.step(8), told.step(8)
                    assert np.array_equal(copy.tokens, tree.tokens)
                    assert np.array_equal(copy.parents, tree.parents)
                    assert np.allclose(copy.path_logprobs, tree.path_logprobs, atol=1e-3)
                    assert path == same


def test_what_was_not_recorded_is_counted_and_has_no_candidates() -> None:
    model = target()
    (known,) = record(model, source("relative", model), PROMPTS[:1], 8)
    whole, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert missing == 0
    known.drafts = [Drafts({(): 0}, d.tokens, d.logprobs, d.entropies) for d in known.drafts]
    less, missing = held_against(("x", Eagle2Tree(4, 3), 8), [known])
    assert 0 < missing < 1
    assert int(less.taken) < int(whole.taken)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "target.gguf", weights="Q8_0", context=256)


def outcome(nodes: int, taken: int, draft: float = 0.5, passes: int = 2) -> Outcome:
    made = Request([1] * 10, SamplingParams(), 9, frozenset(), NoText())
    made.ids += [1] * taken
    tree = chain_tree([1] * nodes) if nodes else DraftTree.empty()
    return Outcome(made, tree, [], [1] * taken, taken, StepCost(1, draft, 9.0, 0.25, passes))


def test_a_step_takes_the_profiles_seconds_and_those_of_drafting_that_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So does it for the policy. Nothing is drafted in no time."""
    profile = Profile(costs(1.0).identity, (Size(1, 10, (1, 5), (1.0, 3.0)), Size(2, 10, (1, 3), (1.5, 4.5))))
    one, nothing = [outcome(2, 3)], [outcome(0, 1, draft=0.125, passes=0)]
    assert Clock(profile).cost(one) == StepCost(1, 0.5, 2.0, 0.25, 2)
    assert Clock(profile, 0.1).cost(one) == StepCost(1, 0.2, 2.0, 0.25, 2)
    assert Clock(profile, 0.1).cost([outcome(2, 3, passes=0)]).draft == 0.1
    split = replace(one[0], step=replace(one[0].step, drafters=(0.125, 0.25)))
    assert Clock(profile, 0.1).cost([split]).drafters == pytest.approx((0.05, 0.1))
    assert [Clock(profile, given).cost(nothing).draft for given in (None, 0.1)] == [0.125, 0.0]
    assert Clock(profile).cost([outcome(1, 1), outcome(3, 1)]).verify == pytest.approx(4.5)  # 6 tokens in two rows
    heard = list[Outcome]()
    monkeypatch.setattr(TreeDrafter, "observe", lambda self, outcomes: heard.extend(outcomes))
    Clocked(TreeDrafter(OptTree(), NgramSource()), Clock(profile)).observe(one)
    assert [outcome.step.verify for outcome in heard] == [2.0]


def test_the_figures_of_a_method_are_those_of_its_steps() -> None:
    """By hand: two prompts, of which AR decoding takes 10 and 20 seconds."""
    ar = [
        Run([[1]], tokens=10, steps=10, verify=8.0, other=2.0),
        Run([[2]], tokens=10, steps=10, verify=18.0, other=2.0),
    ]
    own = [
        Run([[1]], tokens=10, steps=5, nodes=10, draft=1.0, verify=3.0, other=1.0),
        Run([[3]], tokens=10, steps=5, nodes=10, draft=6.0, verify=3.0, other=1.0),
    ]
    label, over, free, accepted, *others = row("x", own, ar)
    assert label == "x"
    assert [text.split()[0] for text in (over, free, accepted)] == ["2.00", "3.54", "5.30"]
    assert others == ["2.00", "2.0", "700.00", "600.00", "200.00", "1/2"]


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> list[list[str]]:
    main(args)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_command_prints_figures_by_a_given_profile(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target drafts for itself: every step gains all its nodes, and a pass costs one second."""
    suite = tmp_path / "own.jsonl"
    suite.write_text("".join(f'{{"prompt": "the cat {word}", "category": "{word}"}}\n' for word in ("hat", "one")))
    monkeypatch.setattr("draftree.models.cost_profile.profile_folder", lambda: tmp_path)
    costs(1.0).save()
    profile = str(tmp_path / costs(1.0).identity.file_name)
    shape = ["--target", str(gguf), "--drafters", "self", "--suites", str(suite), "--max-tokens", "13"]
    shape += ["--profile", profile, "--draft-ms", "250", "--methods", "auto,chain:depth=2"]
    table = printed(capsys, *shape)
    assert table[0] == list(HEADER)
    methods = {cells[0]: dict(zip(HEADER, cells, strict=True)) for cells in table[2:5]}
    chain = methods["chain:depth=2"]
    assert float(chain["over AR"].split()[0]) == pytest.approx(3 / 1.5, abs=0.02)
    assert float(chain["drafted for nothing"].split()[0]) == pytest.approx(3, abs=0.02)
    assert (chain["MAL"], chain["verify"], chain["draft"], chain["equal"]) == ("3.00", "1000.00", "500.00", "2/2")
    assert methods["auto"]["equal"] == "2/2"
    (both,) = [cells for cells in printed(capsys, *shape, "--batch", "2") if cells[0] == "chain:depth=2"]
    assert float(both[4]) > 2 and both[-1] == "1/1"
    for other in ("peer:llama.cpp", "beams:width=2"):  # AR decoding was shown under their names
        with pytest.raises(SystemExit, match=other):
            main([*shape, "--methods", f"auto,{other}"])


def test_recorded_drafts_of_another_target_are_not_taken(tmp_path: Path) -> None:
    suite = tmp_path / "own.jsonl"
    suite.write_text('{"prompt": "the cat in the hat"}\n')
    parser, texts = argparse.ArgumentParser(), list[list[int]]()
    add_options(parser)
    for seed in (0, 1, 0):
        model = str(save_tiny(tmp_path / f"model-{seed}", seed=seed))
        asked = ["--target", model, "--drafter", "lookup", "--suites", str(suite), "--max-tokens", "9"]
        made = recorded(parser.parse_args([*asked, "--cache", str(tmp_path / "cache")]))
        texts.append(made.texts[0].text)
    assert texts[0] == texts[2] != texts[1]
    assert len(list((tmp_path / "cache").iterdir())) == 2
