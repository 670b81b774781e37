"""Cascades by name: how they are written, what they are made of, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftree.cli.main import app
from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import is_model, load_drafter
from draftree.drafters.spec import DrafterSpec, StageSpec, learns
from draftree.engine.engine import Engine, load_engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import InputError, UnknownNameError
from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Profile
from draftree.models.huggingface.hf_loading import load_huggingface
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.cascade import CascadeSource, LoopBack
from draftree.papers.hsddw import DynamicWindow
from draftree.policies.fixed import StaticTree

from ..pairs import costs
from ..tiny import save_tiny

TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> HFModel:
    found = load_huggingface(str(folder))
    assert isinstance(found, HFModel)
    return found


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with fewer weights cost less."""

    def found(model: LanguageModel) -> Profile:
        return costs(1e-9 * model.capabilities.parameters)

    monkeypatch.setattr("draftree.drafters.default.profile_of", found)


def source(name: str, model: HFModel) -> CascadeSource:
    made = load_drafter(name, model, StaticTree())
    assert isinstance(made, TreeDrafter)
    assert made.name == name
    assert isinstance(made.source, CascadeSource)
    return made.source


def test_levels_are_written_from_the_lowest_up_with_settings_of_their_own() -> None:
    assert DrafterSpec.parse("lookup+head:method=static:width=3 > self:tau=first:pending=9").stages == (
        StageSpec(("lookup", "head"), {"method": "static", "width": "3"}),
        StageSpec(("self",), {"tau": "first", "pending": "9"}),
    )


def test_what_is_no_cascade_is_one_level(tmp_path: Path) -> None:
    odd = tmp_path / "a>b:c=d"
    odd.mkdir()
    for name in ("lookup", "self", "a/model:latest", str(odd)):
        assert DrafterSpec.parse(name).stages == (StageSpec((name,)),)


def test_settings_reach_what_they_are_of(model: HFModel) -> None:
    made = source("lookup:method=static:width=3:depth=2>self:tau=0.7:pending=5", model)
    assert made.policy == StaticTree(3, 2)
    assert made.settings == LoopBack(0.7, 5)
    default = source("lookup>self", model)
    assert default.policy == DynamicWindow()
    assert default.settings == LoopBack()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["auto", "hsddw"])
def test_an_engine_of_names_gives_the_targets_text(folder: Path, method: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=3)
    plain = (
        load_engine(str(folder), SpeculationParams(drafter="none")).generate(["the rain is in"], params)[0].token_ids
    )
    engine = load_engine(str(folder), SpeculationParams(drafter="lookup>self:tau=0.7", method=method))
    assert engine.generate(["the rain is in"], params)[0].token_ids == plain


def test_cascades_learn_and_are_no_models() -> None:
    for name in ("lookup>head", "lookup>some/model"):
        assert learns(DrafterSpec.parse(name))
        assert not is_model(DrafterSpec.parse(name))
    for name in ("self", "auto", "none"):
        assert not is_model(DrafterSpec.parse(name))
    assert is_model(DrafterSpec.parse("some/model"))


# bad input


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lookup>", "'lookup>' .*lookup.head"),
        (">self", "'>self'"),
        ("lookup:tau=1>self", "hsddw .*'tau'"),
        ("lookup>self:cap=3", "self:cap=3, .*'cap': .*tau, pending, rejected"),
        ("lookup:cap=0>self", "cap is 0"),
        ("lookup:method=hsddw:start=-1>self", "start is -1.0"),
        ("lookup:method=chian>self", "'chian': .*chain"),
        ("lookup:depth=x:method=chain>self", "depth is 'x': .*chain"),
        ("lookup>self:tau=-2", "tau is -2.0"),
        ("lookup>self:tau=high", "tau is 'high'"),
        ("lookup:share=0.6>self", "hsddw .*'share'"),
        ("lookup>self:pending=0", "pending is 0"),
        ("lookup>self:pending=few", "pending is 'few'"),
        ("lookup>self:rejected=maybe", "rejected is 'maybe': .*'end'.*'on'"),
        ("none>self", "none joins"),
        ("auto>self", "auto joins"),
        ("lookup>layers=1", "no drafter 'layers=1'"),
        ("lookup>self>self", "3 stages"),
        ("lookup>no-such-folder/x/y", "no drafter 'no-such-folder/x/y'"),
    ],
)
def test_names_that_cannot_be_are_answered_in_one_line(model: HFModel, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refusal:
        load_drafter(name, model, StaticTree())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["lookup>{}", "{}>self"])
def test_a_level_of_another_vocabulary_is_translated(model: HFModel, tmp_path: Path, name: str) -> None:
    other, params = save_tiny(tmp_path / "other", vocab_shift=True), SamplingParams(max_tokens=TOKENS)
    engine = Engine(model, SpeculationParams(drafter=name.format(other), method="static"))
    (found,), (alone,) = (each.generate(["the cat in the hat"], params) for each in (engine, Engine(model)))
    assert found.token_ids == alone.token_ids
    assert sum(found.stats.drafted) > 0


def test_a_misspelt_lower_level_is_found_before_anything_is_loaded() -> None:
    with pytest.raises(UnknownNameError, match="no method 'chian'"):
        load_engine("./never-loaded", SpeculationParams(drafter="lookup:method=chian>self", method="chain"))


def test_one_round_a_proposal_reaches_the_levels(folder: Path) -> None:
    command = ["generate", "the rain", "--target", str(folder), "--drafter", "lookup>self:pending=1"]
    found = CliRunner().invoke(app, [*command, "--raw", "--json", "--max-tokens", "12"])
    assert found.exit_code == 0, found.output
    stats = json.loads(found.stdout)["stats"]
    assert stats["figures"]["stages"][1]["passes"] <= stats["steps"]
