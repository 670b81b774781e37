"""A classifier in other policies: learned widths, and ``auto`` with scores in place of the draft's probabilities."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftree.cli.main import run
from draftree.config import Budget, SamplingParams
from draftree.drafters.grow import grow
from draftree.drafters.ngram import NgramSource
from draftree.engine import Engine
from draftree.errors import ConfigError, DraftreeWarning
from draftree.policies.auto.policy import AutoTree
from draftree.policies.c2t import provenance
from draftree.policies.classifier import Classifier, ClassifierFile
from draftree.policies.entropy import EntropyTree
from draftree.policies.learned import LearnedTree, LearnedWidth, ScoredAuto
from draftree.policies.methods import find_policy
from draftree.request import Request, Stats
from draftree.tree import DraftTree

from ..pairs import costs, drafter, source, target
from ..tiny import save_tiny
from ..toy import Script, ScriptedScorer, trees_of

MACHINE, CHEAP = costs(1.0), costs(0.01)
PATHS = Classifier(("probability", "entropy", "depth"), ((4.0, -0.2, 0.0),), (0.1,), (1.5,), -1.0)
WIDTHS = Classifier(("rank", "entropy"), ((-1.0, 1.0), (1.0, -1.0)), (0.0, 0.0), (1.0, -1.0), 0.0, given_parent=True)
"""C = sigmoid(H - rank): at least one half for ranks up to H."""
MADE_FOR = provenance(target(), [NgramSource()])


def test_a_learned_width_is_the_number_of_ranks_that_are_worth_it() -> None:
    entropies = torch.tensor([0.0, 0.9, 2.5, 100.0])
    assert LearnedWidth(WIDTHS, 0.5)(entropies).tolist() == [1, 1, 3, 64]
    assert LearnedWidth(WIDTHS, 0.9)(entropies).tolist() == [0, 0, 1, 64]
    script: Script = lambda row, path: ([1, 2, 3, 4], [-1.0] * 4, 1.5 - len(path))  # noqa: E731
    tree = trees_of(ScriptedScorer(script), EntropyTree(LearnedWidth(WIDTHS, 0.5), depth=3), [Budget(20)])[0]
    assert tree.depths.tolist() == [1, 1, 2, 2]  # entropies 1.5, 0.5, -0.5: two children, one each, none


@pytest.mark.parametrize(
    ("net", "beta", "named"),
    [
        (PATHS, 0.5, "sees probability,entropy,depth: for a width train one with .* entropy,rank --given-parent"),
        (replace(WIDTHS, given_parent=False), 0.5, "sees rank,entropy: for a width"),
        (WIDTHS, 0.0, "beta is 0"),
    ],
)
def test_what_is_no_width_function_is_refused(net: Classifier, beta: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LearnedWidth(net, beta)


def saved(net: Classifier, path: Path) -> str:
    ClassifierFile(net, MADE_FOR, {}, {}).save(path)
    return str(path)


def test_a_width_is_learned_from_a_file_and_warned_about_elsewhere(tmp_path: Path) -> None:
    file = saved(WIDTHS, tmp_path / "net.json")
    policy = find_policy("learned-width", {"classifier": file, "beta": "0.5", "depth": "3"})
    assert policy == LearnedTree(LearnedWidth(WIDTHS, 0.5), None, 7, 3, MADE_FOR)
    assert policy.partner == "lookup"
    policy.prepare(target(), [NgramSource()])
    with pytest.warns(DraftreeWarning, match="and drafter lookup .lookup., not from"):
        policy.prepare(target(), [source("self", target())])
    stopped = find_policy("learned-width+dynamic-window", {"classifier": file})
    assert stopped.width_for(20) == 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


STEPS = Classifier(("step", "rank"), ((4.0, -1.0), (0.0, 0.0)), (0.0, 1.0), (1.0, 0.5), -2.0, given_parent=True)


@pytest.mark.parametrize("method", ["learned-width", "auto"])
def test_the_command_line_drafts_by_a_classifier_and_says_what_plain_decoding_says(
    method: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "the cat in the hat the cat in", "--target", model, "--max-tokens", "20", "--json"]
    assert run([*asked, "--drafter", "none"]) == 0
    plain = json.loads(capsys.readouterr().out)
    net = {"learned-width": WIDTHS, "auto": STEPS}[method]
    file = tmp_path / "net.json"
    ClassifierFile(net, MADE_FOR, {}, {}).save(file)
    assert run([*asked, "--method", method, "--set", f"classifier={file}"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["token_ids"] == plain["token_ids"]
    assert "learned from" not in printed.err


@pytest.mark.parametrize("method", ["learned-width", "auto"])
def test_a_classifier_of_whole_paths_is_refused(method: str, tmp_path: Path) -> None:
    file = saved(PATHS, tmp_path / "net.json")
    with pytest.raises(ConfigError, match="train one with 'draftree train classifier .*--given-parent"):
        find_policy(method, {"classifier": file})


class Fake(Request):
    """A request with nothing but its tokens."""

    def __init__(self) -> None:
        self.ids = [0] * 64
        self.prompt_length, self.limit = 64, 10**6
        self.stats = Stats(steps=1)


def planned(policy: AutoTree, script: Script) -> DraftTree:
    """What it proposes at first."""
    budgets = policy.plan([Fake()], [Budget(12)])
    return grow(ScriptedScorer(script), policy, budgets)[0].tree


def test_auto_weighs_what_lies_between_the_classifier_and_the_draft() -> None:
    """The draft is sure of each token; the classifier finds it unlikely, or the other way round."""
    unlikely = Classifier(("depth",), ((0.0,),), (1.0,), (-8.0,), 0.0, given_parent=True)  # with 0.99: 0.15
    likely = replace(unlikely, output=(8.0,))  # with 0.005: 0.79

    def nodes(policy: AutoTree, said: float) -> int:
        return len(planned(policy, lambda row, path: ([len(path) + 1], [math.log(said)], 1.0)))

    assert nodes(AutoTree(target=MACHINE, drafter=CHEAP), 0.99) > 4
    assert nodes(ScoredAuto(target=MACHINE, drafter=CHEAP, classifier=unlikely), 0.99) <= 2  # nodes cost nothing here
    assert nodes(AutoTree(target=MACHINE, drafter=CHEAP), 0.005) == 0
    assert nodes(ScoredAuto(target=MACHINE, drafter=CHEAP, classifier=likely), 0.005) > 2


@pytest.mark.parametrize("name", ["lookup", "relative", "lookup+relative"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_with_a_classifier_says_what_plain_decoding_says_alone_and_in_a_batch(
    name: str, temperature: float
) -> None:
    prompts = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
    model, params = target(), SamplingParams(max_tokens=30, temperature=temperature, seed=5)
    want = [g.token_ids for g in Engine(model).generate(prompts, params)]

    def made() -> ScoredAuto:
        return ScoredAuto(target=MACHINE, drafter=CHEAP, classifier=STEPS)

    together = Engine(model, drafter(name, model, made()), nodes=12).generate(prompts, params)
    assert [g.token_ids for g in together] == want
    alone = [Engine(model, drafter(name, model, made()), nodes=12).generate([p], params)[0] for p in prompts]
    assert [g.token_ids for g in alone] == want
    assert sum(sum(g.stats.drafted) for g in together) > 0


def test_no_candidate_is_likelier_than_one_of_a_lower_rank() -> None:
    """``auto`` learns from candidates in descending order; a classifier may say otherwise of ranks."""
    rising = Classifier(("rank",), ((1.0,),), (0.0,), (1.0,), -1.0, given_parent=True)
    policy = ScoredAuto(target=MACHINE, drafter=CHEAP, classifier=rising)
    seen = planned(policy, lambda row, path: ([1, 2, 3], [-1.0, -1.5, -2.0], 1.0))
    assert policy._plan is not None
    law = policy._plan.frontiers[0].candidates.logprobs.exp()
    odds = math.sqrt(math.exp(-1.0) * math.exp(-1.0) / (1 - math.exp(-1.0)))  # of the first: C and the draft's
    assert law.tolist() == [pytest.approx([odds / (1 + odds)] * 3)]
    assert len(seen)
