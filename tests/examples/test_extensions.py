"""The parts of ``docs/extend.md``: each does what the page promises, and the page shows it as it is."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import draftree
from draftree.cli.main import run
from draftree.drafters.draft_model import ModelSource
from draftree.tree import ROOT
from examples.entropy_policy import ByEntropy
from examples.ngram_backend import NgramModel
from examples.phrase_source import PhraseBook
from examples.typical_scheme import Typical

from ..toy import ToyModel

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "extend.md").read_text()
EXAMPLES = {path.stem: path for path in (TOP / "examples").glob("*.py")}
QUOTED = ["entropy_policy", "phrase_source", "typical_scheme", "ngram_backend"]
VOCAB, PROMPT = 8, [1, 2, 3]
GREEDY = draftree.SamplingParams(max_tokens=40)
SAMPLED = draftree.SamplingParams(max_tokens=40, temperature=0.8, seed=5)
Trees = list[draftree.DraftTree]


class Watching(draftree.Observer):
    """Keeps the trees that were verified, and how long each accepted path was."""

    def __init__(self) -> None:
        self.trees, self.accepted = Trees(), list[int]()

    def stepped(self, outcomes: Sequence[object]) -> None:
        for outcome in outcomes:
            self.trees.append(outcome.tree)  # type: ignore[attr-defined]
            self.accepted.append(len(outcome.path))  # type: ignore[attr-defined]


def engine(
    source: draftree.DraftSource | None = None, policy: draftree.GrowthPolicy | None = None, nodes: int = 64
) -> tuple[draftree.Engine, Watching]:
    """A toy that another toy drafts for, or ``source``."""
    source = source or ModelSource(ToyModel(VOCAB, seed=9), VOCAB)
    drafter = draftree.TreeDrafter(policy or draftree.StaticTree(width=2, depth=3), source)
    watching = Watching()
    return draftree.Engine(ToyModel(VOCAB), draftree.Speculation(drafter, nodes), observers=[watching]), watching


def ar(params: draftree.SamplingParams) -> list[int]:
    return draftree.Engine(ToyModel(VOCAB)).generate([PROMPT], params)[0].token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_policy_grows_by_entropy_and_changes_no_text(params: draftree.SamplingParams) -> None:
    made, watching = engine(policy=ByEntropy(width=2, depth=4, stop=1.3))
    assert made.generate([PROMPT], params)[0].token_ids == ar(params)
    seen = set[tuple[int, bool]]()
    for tree in watching.trees:
        for node in range(ROOT, len(tree)):
            if children := tree.children(node):
                entropy = float(tree.entropies[children[0]])
                assert len(children) == min(2, 1 + int(entropy))
                deeper = [child for child in children if tree.children(child)]
                assert entropy <= 1.3 or not deeper
                seen.add((len(children), bool(deeper)))
    assert seen >= {(1, True), (2, True), (2, False)}
    assert max(tree.depth for tree in watching.trees) == 4


def test_the_phrase_book_scores_by_counts() -> None:
    made, _ = engine()
    request = made.submit([7, 1, 2], GREEDY).request
    scorer = PhraseBook([1, 2, 3, 1, 2, 4, 2, 1, 2, 3, 5]).scorer([request], False)
    root, unknown = draftree.UnscoredNode(0, ROOT, ROOT, 0), draftree.UnscoredNode(0, 0, ROOT, 6)
    below = draftree.UnscoredNode(0, 1, ROOT, 3)
    for width, tokens in ((4, [3, 4]), (1, [3])):
        (found,) = scorer.score([root], width)
        assert found.tokens == tokens
        assert np.exp(found.logprobs) == pytest.approx([2 / 3, 1 / 3][:width])
        assert found.entropy == pytest.approx(math.log(3) - 2 / 3 * math.log(2))
    known, none = scorer.score([below, unknown], 4)
    assert sorted(known.tokens) == [1, 5] and known.entropy == pytest.approx(math.log(2))
    assert none == draftree.Candidates([], [], 0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_phrase_book_drafts_what_its_text_has_and_changes_no_text(params: draftree.SamplingParams) -> None:
    expected = ar(params)
    made, watching = engine(PhraseBook([*PROMPT, *expected]))
    answer = made.generate([PROMPT], params)[0]
    assert answer.token_ids == expected
    assert answer.stats.mal > 1.5 and max(tree.depth for tree in watching.trees) == 3


def typical(scheme: Typical, params: draftree.SamplingParams) -> tuple[draftree.Generation, Watching]:
    watching = Watching()
    source = ModelSource(ToyModel(VOCAB, seed=9), VOCAB)
    drafter = draftree.TreeDrafter(draftree.StaticTree(width=2, depth=3), source)
    made = draftree.Engine(ToyModel(VOCAB), draftree.Speculation(drafter, 64, scheme), observers=[watching])
    return made.generate([PROMPT], params)[0], watching


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_scheme_is_ar_decoding_where_nothing_is_typical(params: draftree.SamplingParams) -> None:
    answer, watching = typical(Typical(epsilon=1, delta=math.inf), params)
    assert answer.token_ids == ar(params) and answer.lossy
    assert 0 < sum(watching.accepted) < sum(tree.depth for tree in watching.trees)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_scheme_takes_whole_paths_where_all_is_typical(params: draftree.SamplingParams) -> None:
    answer, watching = typical(Typical(epsilon=0), params)
    assert watching.accepted == [tree.depth for tree in watching.trees]
    assert answer.token_ids != ar(params)


class Fixed:
    """Uniform draws whose token is 0."""

    def accepts(self, chance: float) -> bool:
        raise AssertionError("typical acceptance draws no acceptance")

    def draw(self, logits: object, depth: int) -> int:
        return 0


@pytest.mark.parametrize(("children", "token"), [([2, 1], 1), ([2], 2), ([3], 0)])
def test_the_scheme_decides_by_its_threshold(children: list[int], token: int) -> None:
    """min(0.09, 0.3 exp(-H)) is 0.09 where H is 0.94: the third token is typical, the last is not."""
    visit = draftree.Visit(np.log([0.6, 0.29, 0.1, 0.01]), children, draftree.DraftTree.empty(), -1, 0, 1.0)
    assert Typical().decide(visit, Fixed()) == token


TEXT = (TOP / "examples" / "ngram_backend.py").read_bytes()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_engine_drafts_for_the_backend_and_changes_no_text(params: draftree.SamplingParams) -> None:
    target, prompts = NgramModel(TEXT), [[*TEXT[:1500]], [*b"class Ngram"], [*b"row, row, row"]]
    alone = [draftree.Engine(target).generate([prompt], params)[0].token_ids for prompt in prompts]
    drafting = draftree.SpeculationParams(drafter="lookup", method="opt-tree", nodes=8)
    together = draftree.Engine(target, drafting).generate(prompts, params)
    assert [answer.token_ids for answer in together] == alone
    assert max(answer.stats.mal for answer in together) > 3
    by_costs = draftree.Engine(target, draftree.SpeculationParams(drafter="lookup")).generate(prompts, params)
    assert [answer.token_ids for answer in by_costs] == alone


def test_the_backend_gives_a_node_the_logits_of_its_path() -> None:
    target = NgramModel(TEXT)
    row = target.open()
    target.extend([row], [draftree.Nodes.chain([*b"def ope"])])
    target.commit(row, range(7))
    parents = [-1, -1, 0, 2]
    found = target.extend([row], [draftree.Nodes([*b"nfle"], parents)]).logits(range(4))
    paths = [b"def open", b"def opef", b"def openl", b"def openle"]
    assert np.array_equal(found, [target.logits([*path]) for path in paths])
    target.prune(row, [0, 2], 1)
    other = target.fork(row, 4)
    assert (row.length, other.length, row.parents) == (8, 4, [-1])
    both = target.extend([other, row], [draftree.Nodes.chain([*b"o"]), draftree.Nodes([*b"y"], [0])])
    assert np.array_equal(both.logits([0, 1]), [target.logits([*b"def o"]), target.logits([*b"def openly"])])
    with pytest.raises(draftree.RunError):
        target.commit(row, [1])


def test_beams_are_searched_on_the_backend() -> None:
    target, params = NgramModel(TEXT), draftree.SamplingParams(max_tokens=12)
    found = []
    for drafter in ("none", NgramModel(TEXT)):
        source = draftree.load_beam_source(drafter, target)
        beams = draftree.BeamEngine(target, source)
        best = beams.generate([[*b"    def "]], params, draftree.BeamParams(width=3, returned=3, depth=2))[0]
        found.append([hypothesis.token_ids for hypothesis in best.hypotheses])
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 3


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_the_code_that_is_tested() -> None:
    found = [next((name for name in QUOTED if block in EXAMPLES[name].read_text()), None) for block in _blocks()]
    assert found == QUOTED


def test_the_page_names_what_is_public() -> None:
    named = set(re.findall(r"\bdraftree\.(\w+)", PAGE + "".join(EXAMPLES[name].read_text() for name in QUOTED)))
    assert len(named) > 20 and named <= set(draftree.__all__)


@pytest.mark.real
@pytest.mark.parametrize("name", QUOTED[1:])
def test_the_files_are_programs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    *_, figures = re.findall(r"([\d.]+) tokens a pass of the target", capsys.readouterr().out)
    assert float(figures) > 1


@pytest.mark.real
def test_the_policy_is_named_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(TOP / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["generate", "Name the capital of France.", "--drafter", "head", "--method", "entropy_policy:ByEntropy"]
    assert run([*words, "--set", "width=3", "--max-tokens", "24", "--json", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ar"]["same_tokens"] and report["stats"]["mal"] > 1.5


@pytest.mark.real
@pytest.mark.parametrize("flags", ["--drafter lookup+phrase_source:of_this_file", "--verify typical_scheme:Typical"])
def test_so_are_the_drafter_and_the_scheme(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(TOP / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ["generate", "Repeat: for b, node, parent, token in nodes:", "--method", "static", *flags.split()]
    assert flags in PAGE and run([*words, "--max-tokens", "24", "--json", "--compare"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stats"]["mal"] > 1.1
    assert report["lossy"] != report["ar"]["same_tokens"]
