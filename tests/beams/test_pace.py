"""The depth that searched beams are drafted to follows the clock."""

from collections.abc import Callable

import pytest

from draftree.beams.engine import BeamEngine
from draftree.beams.pace import Pace
from draftree.beams.params import BeamParams
from draftree.config import SamplingParams

from ..pairs import target
from .parts import PROMPTS, source

STEPS = 400


def run(most: int, seconds: Callable[[int], float], layers: Callable[[int], float]) -> Pace:
    pace = Pace()
    for _ in range(STEPS):
        depth = pace.depth(most)
        assert 0 <= depth <= most
        pace.learn(depth, layers(depth), seconds(depth))
    return pace


@pytest.mark.parametrize(
    ("layers", "best"),
    [(lambda d: 1.0, 0), (lambda d: 1 + 0.9 * min(d, 1), 1), (lambda d: 1 + 0.8 * d, 3)],
    ids=["never right", "right once", "mostly right"],
)
def test_the_fastest_depth_is_used_most(layers: Callable[[int], float], best: int) -> None:
    pace = run(3, lambda d: 1 + 0.3 * d, layers)
    assert pace.chosen[best] > 0.9 * STEPS


def test_a_machine_that_changes_is_found_out() -> None:
    pace, dear = Pace(), 2.0
    chosen = []
    for step in range(800):
        if step == 300:
            dear = 0.1
        depth = pace.depth(1)
        chosen.append(depth)
        pace.learn(depth, 1 + depth, 1 + dear * depth)
    assert chosen[200:300].count(0) > 90
    assert chosen[600:].count(1) > 180


def test_every_depth_is_tried_at_first() -> None:
    pace = run(2, lambda d: 1.0, lambda d: 1.0)
    assert set(pace.chosen) == {0, 1, 2}


def test_without_room_nothing_is_drafted() -> None:
    assert set(run(0, lambda d: 1.0, lambda d: 1.0).chosen) == {0}


def test_beams_are_the_same_at_any_depth() -> None:
    model, params, beams = target(), SamplingParams(max_tokens=40), BeamParams(width=3, returned=3)
    plain = BeamEngine(model).generate(PROMPTS, params, beams)
    engine = BeamEngine(model, source("relative", model))
    for _ in range(2):
        for one, other in zip(plain, engine.generate(PROMPTS, params, beams), strict=True):
            assert [h.token_ids for h in one.hypotheses] == [h.token_ids for h in other.hypotheses]
    assert set(engine.pace.chosen) == {0, 1, 2, 3}


def test_sampled_beams_do_not_ask_the_clock() -> None:
    model, params = target(), SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    engine = BeamEngine(model, source("relative", model))
    once, again = (engine.generate([PROMPTS[0]], params, BeamParams(width=3))[0] for _ in range(2))
    assert once.hypotheses == again.hypotheses
    assert not engine.pace.chosen
