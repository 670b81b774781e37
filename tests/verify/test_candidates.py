"""Plain and coupled candidates under match: the text is the same; what policies see is q, or q given the noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from draftree.bench.contestants import EngineContestant
from draftree.bench.entries import entries
from draftree.cli.main import app
from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine, load_engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError
from draftree.integrations.hf_generate import custom_generate
from draftree.papers.cascade import CascadeSource
from draftree.policies.base import Child, Frontier, GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.sampling.warping import gumbel_noise, stream_key, warp
from draftree.verify.schemes import CANDIDATES, DEFAULT_SCHEME, Match, find_scheme

from ..heads import random_head
from ..pairs import begun, costs, endless, target
from ..tiny import VOCAB, save_tiny
from ..toy import ToyModel

KINDS = ["coupled", "plain"]
SIZE = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("drafter", ["self", "lookup", "lookup+self", "lookup>self"])
def test_ids_are_the_targets_own_with_either_kind(folder: Path, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin, n-grams, an ensemble, a cascade; greedy and sampled in one batch.

    Costs are given: a level that a busy machine finds slower than the target is warned of.
    """
    monkeypatch.setattr("draftree.drafters.default.profile_of", lambda model: costs(1.0))
    prompts = ["the rain is in", "a rose is a rose is a", "the cat"]
    params = [SamplingParams(max_tokens=16, temperature=t, seed=5) for t in (1.0, 0.6, 0.0)]
    want = [g.token_ids for g in load_engine(str(folder), SpeculationParams(drafter="none")).generate(prompts, params)]
    for kind in KINDS:
        engine = load_engine(
            str(folder), SpeculationParams(drafter=drafter, method="dynamic-width", nodes=8, candidates=kind)
        )
        assert [g.token_ids for g in engine.generate(prompts, params)] == want


def test_a_heads_candidates_may_be_plain() -> None:
    model, params = target(), SamplingParams(max_tokens=16, temperature=1.0, seed=5)
    want = Engine(model).generate([[3, 4, 5]], params)[0].token_ids
    for kind in KINDS:
        drafter = TreeDrafter(StaticTree(2, 3), EagleSource(random_head(model), VOCAB))
        assert (
            Engine(model, Speculation(drafter, scheme=find_scheme(DEFAULT_SCHEME, kind)))
            .generate([[3, 4, 5]], params)[0]
            .token_ids
            == want
        )


class Spy(GrowthPolicy):
    """A chain of four that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[float], float]] = []

    def width_for(self, nodes: int) -> int:
        return 5

    def grow(self, frontier: Frontier) -> list[Child]:
        found = frontier.candidates[0]
        self.seen.append(([*found.tokens], [*found.logprobs], found.entropy))
        return [Child(0, 0, frontier.depth < 3)]


def expected(logits: Tensor, params: SamplingParams, position: int, kind: str) -> Tensor:
    """[V] log-probabilities: q is the warped draft distribution, or softmax(T (z + g))."""
    z = torch.from_numpy(warp(logits.numpy(), params.warping)).double()
    if kind == "plain":
        return z.log_softmax(-1)
    return (
        params.temperature * (z + torch.from_numpy(gumbel_noise(stream_key(params.seed or 0, position), SIZE)))
    ).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("warping", [{"temperature": 0.7}, {"temperature": 1.4, "top_k": 7}])
def test_policies_see_the_warped_draft_distribution_or_the_coupled_one(
    warping: dict[str, float], cascade: bool, kind: str
) -> None:
    """There was no switch: the papers' settings at T > 0, with entropies of q, could not be repeated."""
    params = SamplingParams(max_tokens=9, seed=3, **warping)  # type: ignore[arg-type]
    drafting, spy = ToyModel(SIZE, seed=8), Spy()
    source: DraftSource = ModelSource(drafting, SIZE)
    if cascade:
        source = endless(CascadeSource(NgramSource(), source, StaticTree(1, 2)))
    engine = Engine(ToyModel(SIZE), Speculation(TreeDrafter(spy, source), 4, find_scheme(DEFAULT_SCHEME, kind)))
    request = begun(engine.stepper, engine.request([1, 2, 3], params))
    ids = list(request.ids)
    tree = engine.stepper.step([request])[0].tree
    assert len(spy.seen) == len(tree) == 4
    other = KINDS[1 - KINDS.index(kind)]
    apart = 0.0
    for (tokens, logprobs, entropy), recorded in zip(spy.seen, tree.entropies, strict=True):
        logits = drafting.after(ids)
        want = expected(logits, params, len(ids), kind)
        assert tokens == want.topk(5).indices.tolist()
        assert logprobs == pytest.approx(want.topk(5).values.tolist(), abs=1e-5)
        assert entropy == recorded == pytest.approx(float(torch.special.entr(want.exp()).sum()), abs=1e-5)
        control = expected(logits, params, len(ids), other)
        apart = max(apart, abs(float(torch.special.entr(control.exp()).sum()) - entropy))
        ids.append(tokens[0])
    assert apart > 0.1


def test_contestants_of_one_run_may_differ_in_their_candidates() -> None:
    """The target as its own drafter foresees every draw by the noise that it shares, and not without it."""
    model, params = target(), SamplingParams(max_tokens=25, temperature=1.0, seed=4)
    made = entries(["chain", "chain:candidates=plain"], ["self"], [1.0], 8)[1:]
    coupled, plain = (EngineContestant(e, model, e.drafter).decode([3, 14, 15], params) for e in made)
    assert coupled.ids == plain.ids
    assert coupled.steps is not None
    assert plain.steps is not None
    assert coupled.steps.accepted == coupled.steps.nodes
    assert sum(plain.steps.accepted) < 0.8 * sum(plain.steps.nodes)


def test_the_command_line_chooses_and_reports_them(folder: Path, tmp_path: Path) -> None:
    command = ["generate", "the rain", "--target", str(folder), "--drafter", "self", "--temperature", "1", "--json"]
    reports = {}
    for kind in KINDS:
        file = tmp_path / f"{kind}.jsonl"
        found = CliRunner().invoke(
            app, [*command, "--seed", "3", "--max-tokens", "12", "--candidates", kind, "--trace", str(file)]
        )
        assert found.exit_code == 0, found.output
        reports[kind] = json.loads(found.stdout)
        run = json.loads(file.read_text().splitlines()[0])
        assert run["candidates"] == reports[kind]["candidates"] == kind
    assert reports["plain"]["token_ids"] == reports["coupled"]["token_ids"]


@pytest.mark.parametrize("kind", CANDIDATES)
def test_a_scheme_of_ones_own_keeps_its_class_and_gets_the_candidates(kind: str) -> None:
    """Match itself took its place."""

    class Own(Match):
        name = "own"

    own, before = Own(), Own().coupled
    found = find_scheme(own, kind)
    assert type(found) is Own and found.coupled is CANDIDATES[kind]
    assert own.coupled is before and find_scheme(DEFAULT_SCHEME).coupled is Match().coupled


# refusals, before anything is loaded


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("match", "sampled"), ("relaxed", "plain"), ("multi-round", "plain"), ("top1-residual", "coupled")],
)
def test_candidates_that_cannot_be_are_refused(scheme: str, kind: str) -> None:
    for make in (
        lambda: Engine(ToyModel(), Speculation(scheme=find_scheme(scheme, kind))),
        lambda: load_engine(
            "./never-loaded", SpeculationParams(drafter="lookup", verification=scheme, candidates=kind)
        ),
        lambda: custom_generate(SpeculationParams(drafter="./never-loaded", verification=scheme, candidates=kind)),
    ):
        with pytest.raises(ConfigError, match=f"candidates are '{kind}'") as refusal:
            make()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "x", "--beams", "2", "--target", "./never-loaded"],
        ["generate", "x", "--verify", "multi-round", "--target", "./never-loaded"],
        ["chat", "./never-loaded", "--verify", "top1-residual"],
    ],
)
def test_commands_refuse_them_in_a_line(command: list[str]) -> None:
    found = CliRunner().invoke(app, [*command, "--candidates", "plain"])
    assert isinstance(found.exception, ConfigError)
    assert "candidates" in str(found.exception)
