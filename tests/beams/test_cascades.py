"""Hierarchies and unions that draft beams."""

from __future__ import annotations

import pytest

from draftree.beams.beam_engine import BeamEngine, BeamGeneration
from draftree.beams.cascades import HierarchyBeams, UnionBeams
from draftree.beams.params import BeamParams
from draftree.beams.sources import ModelBeams
from draftree.config import SamplingParams
from draftree.errors import ConfigError
from draftree.load import load_beam_source
from draftree.models.huggingface import HFModel

from ..pairs import target
from ..toy import ToyModel
from .parts import PROMPTS, source
from .test_sampling import Scriptable, distance, law_after, law_of, toys

BEAMS = BeamParams(width=3, returned=3, depth=4)


@pytest.fixture(scope="module")
def model() -> HFModel:
    return target(eos=4)


def hierarchy(lower: str, upper: str, model: HFModel) -> HierarchyBeams:
    above = source(upper, model)
    below = source(lower, model)
    assert isinstance(above, ModelBeams) and below is not None
    return HierarchyBeams(below, above, f"{lower}>{upper}")


def decoded(engine: BeamEngine, temperature: float) -> list[BeamGeneration]:
    return engine.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=temperature, seed=3), BEAMS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lower", ["lookup", "stranger", "head", "self"])
@pytest.mark.parametrize("upper", ["relative", "self", "guest"])
def test_a_hierarchy_drafts_what_its_upper_level_drafts(
    lower: str, upper: str, temperature: float, model: HFModel
) -> None:
    """So beams are drawn from the upper level's law, and the same seed gives the same beams."""
    alone, both = BeamEngine(model, source(upper, model)), BeamEngine(model, hierarchy(lower, upper, model))
    want, got = decoded(alone, temperature), decoded(both, temperature)
    assert [one.hypotheses for one in got] == [one.hypotheses for one in want]
    assert [one.stats.drafted for one in got] == [one.stats.drafted for one in want]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lower_level_that_is_right_saves_passes_of_the_upper_one(temperature: float, model: HFModel) -> None:
    alone, made = source("self", model), hierarchy("self", "self", model)
    decoded(BeamEngine(model, alone), temperature)
    decoded(BeamEngine(model, made), temperature)
    assert alone is not None and 3 * made.upper.passes < alone.passes


def test_three_levels_are_a_hierarchy_too(model: HFModel) -> None:
    lower, upper = hierarchy("stranger", "relative", model), source("self", model)
    assert isinstance(upper, ModelBeams)
    made = BeamEngine(model, HierarchyBeams(lower, upper, "three"))
    want = decoded(BeamEngine(model, source("self", model)), 1.0)
    assert [one.hypotheses for one in decoded(made, 1.0)] == [one.hypotheses for one in want]


def test_beams_drafted_by_a_hierarchy_follow_the_law_of_beam_sampling() -> None:
    models, limit = toys(2), 3
    lowest = ToyModel(2, 5, spread=1.2, dtype=models[0].capabilities.dtype)

    def made() -> Scriptable:
        return Scriptable(models[0], HierarchyBeams(ModelBeams(lowest, 2), ModelBeams(models[1], 2), "toys"))

    law = law_after(limit, made, BeamParams(width=1, draft_width=2, depth=2), limit)
    assert distance(law, law_of(models[0], 1, limit).final(((),))) < 1e-12


def test_a_union_finds_the_beams_of_plain_search(model: HFModel) -> None:
    parts = [source("lookup", model), source("relative", model)]
    union = UnionBeams([part for part in parts if part is not None], "lookup+relative")
    want = decoded(BeamEngine(model), 0.0)
    for one, other in zip(decoded(BeamEngine(model, union), 0.0), want, strict=True):
        assert [h.token_ids for h in one.hypotheses] == [h.token_ids for h in other.hypotheses]


def test_a_union_finds_more_than_its_part(model: HFModel) -> None:
    lookup, right = source("lookup", model), source("self", model)
    assert lookup is not None and right is not None
    alone = decoded(BeamEngine(model, lookup), 0.0)
    both = decoded(BeamEngine(model, UnionBeams([lookup, right], "both")), 0.0)
    assert sum(one.stats.steps for one in both) < 0.8 * sum(one.stats.steps for one in alone)


def test_a_union_is_refused_where_beams_are_sampled(model: HFModel) -> None:
    with pytest.raises(ConfigError, match="lookup.self has no distribution of its own to draw beams from"):
        load_beam_source("lookup+self", model, sampled=True)
    assert isinstance(load_beam_source("lookup+self", model), UnionBeams)


def test_names_of_hierarchies(model: HFModel) -> None:
    made = load_beam_source("lookup>int8>self", model, sampled=True)
    assert isinstance(made, HierarchyBeams) and isinstance(made.lower, HierarchyBeams)
    assert (made.name, made.lower.name) == ("lookup>int8>self", "lookup>int8")
