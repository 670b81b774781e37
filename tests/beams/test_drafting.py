"""Drafted beams: the same at any depth and in any batch, and what is counted of them."""

from __future__ import annotations

import pytest

from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams

from ..pairs import target
from .parts import PROMPTS, source


def test_layers_are_counted_where_something_was_drafted() -> None:
    """Those of a step that drafted nothing are none."""
    model, params = target(), SamplingParams(max_tokens=12)
    for name, beams in (("relative", BeamParams(width=2, depth=2)), ("none", BeamParams(width=2))):
        stats = BeamEngine(model, source(name, model)).generate([[5, 6]], params, beams)[0].stats
        assert (stats.drafted_layers > 0) is (sum(stats.drafted) > 0)
        assert stats.drafted_layers <= sum(stats.drafted)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_searched_beams_are_the_same_at_any_depth(depth: int) -> None:
    model, params, beams = target(), SamplingParams(max_tokens=24), BeamParams(width=3, returned=3, depth=depth)
    plain = BeamEngine(model).generate(PROMPTS, params, beams)
    engine = BeamEngine(model, source("relative", model))
    for _ in range(2):
        for one, other in zip(plain, engine.generate(PROMPTS, params, beams), strict=True):
            assert [h.token_ids for h in one.hypotheses] == [h.token_ids for h in other.hypotheses]


@pytest.mark.parametrize("drafter", ["relative", "stranger"])
def test_a_seed_repeats_its_beams_alone_in_a_batch_and_later(drafter: str) -> None:
    model, params = target(), SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    drafts, beams = source(drafter, model), BeamParams(width=3, returned=3)
    assert drafts is not None
    engine = BeamEngine(model, drafts)
    batch = engine.generate(PROMPTS, params, beams)
    alone = [engine.generate([prompt], params, beams)[0] for prompt in PROMPTS]
    ids = [[[h.token_ids for h in one.hypotheses] for one in made] for made in (batch, alone)]
    assert ids[0] == ids[1]
