"""What ``auto`` may lose beside AR decoding, by a simulated clock: passes are noisy and stall, costs are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from draftree.config import Budget
from draftree.models.cost_profile import Point, Profile
from draftree.policies.accounts import AutoSettings
from draftree.policies.auto import AutoTree
from draftree.policies.base import GrowthPolicy, Plan
from draftree.policies.fixed import StaticTree
from draftree.request import Request

from .simulated import NOISE, PASS, Answers, Decoded, Kind, Noise, Shape, decode, decode_answers, profile
from .test_policy import ME

TOKENS = 400
SETTINGS = AutoSettings()
LEAST = 0.98
A_STEP = 1.0
"""AR passes that the step in which an account is used up may lose beside what was left of it."""
RATES: dict[str, Callable[[int], float]] = {
    "never": lambda position: 0.0,
    "rarely": lambda position: 0.1,
    "at times": lambda position: 0.9 if position % 60 < 12 else 0.0,
    "at first": lambda position: 0.95 if position < 150 else 0.0,
    "later": lambda position: 0.0 if position < 250 else 0.95,
    "often": lambda position: 0.6,
    "always": lambda position: 1.0,
}
"""How often first candidates are right; "at first" shifts."""
LAYERS = {"lookup": 0.02, "head": 0.1, "model": 0.3}
SHAPES: dict[str, Shape] = {
    "flat": lambda tokens: 1 + 0.03 * (tokens - 1),
    "half": lambda tokens: 1 + 0.15 * (tokens - 1),
    "steep": lambda tokens: 1 + 0.5 * (tokens - 1),
}
WRONG: dict[str, Shape] = {
    "right": lambda tokens: 1.0,
    "cheap": lambda tokens: 1 / 1.5 if tokens > 1 else 1.0,
    "dear": lambda tokens: 1.5 if tokens > 1 else 1.0,
    "falling": lambda tokens: 1.5 ** -min(1.0, math.log2(tokens) / 4),
    "rising": lambda tokens: 1.5 ** min(1.0, math.log2(tokens) / 4),
}
"""Factors of the seconds over so many tokens a request in the profile that ``auto`` gets."""


class NeverDrafts(StaticTree):
    def plan(self, requests: Sequence[Request], budgets: Sequence[Budget], other_tokens: int = 0) -> Plan:
        return Plan([Budget(0)] * len(budgets))


def auto(drafter: str, shape: str, wrong: str) -> AutoTree:
    layers = Profile(ME, tuple(Point(b, 64, (1,), (PASS * LAYERS[drafter] * SHAPES[shape](b),)) for b in (1, 2, 4, 8)))
    target = profile(SHAPES[shape], WRONG[wrong])
    return AutoTree(target=target, drafter=None if drafter == "lookup" else layers)


def decoded(
    policy: GrowthPolicy, text: str, drafter: str, shape: str, batch: int = 1, seed: int = 0, noise: Noise = NOISE
) -> Decoded:
    return decode(policy, Kind(RATES[text], LAYERS[drafter]), SHAPES[shape], TOKENS, batch, seed, noise)


def may_lose(steps: int) -> float:
    """AR passes: the credit, and what each time that it is tried again may take, behind pauses that grow."""
    passes, pause = SETTINGS.credit + A_STEP, SETTINGS.pause
    while (steps := steps - pause) > 0:
        passes, pause = passes + SETTINGS.again + A_STEP, min(2 * pause, SETTINGS.longest)
    return passes


def bounded(found: Decoded, reading: float = 0.0) -> bool:
    """It is no slower than AR decoding, or has lost no more than it may; ``reading``: of a prompt, in AR passes."""
    texts = SETTINGS.credit + reading + SETTINGS.again / SETTINGS.longest * found.steps if reading else 0.0
    return found.ratio >= LEAST or found.lost <= may_lose(found.steps) + texts


def cells() -> list[tuple[str, str, str, str, int]]:
    """Each text with each error of the profile and two drafters, on the shapes and with 1 to 8 requests in turn."""
    found, shapes, drafters = list[tuple[str, str, str, str, int]](), [*SHAPES], [*LAYERS]
    for t, text in enumerate(RATES):
        for w, wrong in enumerate(WRONG):
            for d in ((t + w) % 3, (t + w + 1) % 3):
                found.append((text, drafters[d], shapes[(t + 2 * w + d) % 3], wrong, (1, 2, 4, 8)[(t + 2 * d + w) % 4]))
    return found


@pytest.mark.parametrize(("text", "drafter", "shape", "wrong", "batch"), cells())
def test_what_drafting_loses_is_bounded(text: str, drafter: str, shape: str, wrong: str, batch: int) -> None:
    found = decoded(auto(drafter, shape, wrong), text, drafter, shape, batch)
    assert bounded(found), f"{found.ratio:.3f}, {found.lost:.1f} passes lost"


GAINS = [("often", "lookup", "flat", 1.6), ("often", "head", "flat", 1.4), ("always", "head", "half", 1.5)]
"""Where drafting pays, and what it has to make of AR decoding at least."""


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("text", "drafter", "shape", "least"), GAINS)
def test_what_pays_is_drafted(text: str, drafter: str, shape: str, least: float, wrong: str) -> None:
    assert decoded(auto(drafter, shape, wrong), text, drafter, shape).ratio >= least


@pytest.mark.parametrize("batch", [1, 8])
def test_a_chain_that_is_always_right_is_drafted_nearly_as_deep_as_pays(batch: int) -> None:
    """Siblings of a first candidate that was right more often than it said were priced up with it, and took its place.

    Against chains of a fixed length.
    """
    best = max(decoded(StaticTree(1, depth), "always", "lookup", "flat", batch).ratio for depth in (4, 8, 16))
    assert decoded(auto("lookup", "flat", "right"), "always", "lookup", "flat", batch).ratio >= 0.8 * best


def test_policies_that_never_and_always_draft_are_found_out() -> None:
    for text, drafter, shape, least in GAINS:
        none = decoded(NeverDrafts(), text, drafter, shape)
        assert none.ratio == 1.0 and bounded(none) and none.ratio < least
        always = decoded(StaticTree(1, 4), "never", drafter, shape)
        assert not bounded(always)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("drafter", "shape", "batch"), [("lookup", "half", 1), ("head", "half", 1), ("head", "flat", 4)]
)
def test_the_same_text_takes_about_as_many_passes_whatever_the_noise(
    drafter: str, shape: str, wrong: str, batch: int
) -> None:
    """The same answer took 34 or 83 passes."""
    runs = [decoded(auto(drafter, shape, wrong), "often", drafter, shape, batch, seed) for seed in range(3)]
    passes = [found.passes for found in runs]
    assert max(passes) <= 1.15 * min(passes), [(found.steps, round(found.passes)) for found in runs]


def answered(text: str, each: Sequence[tuple[int, int]], limit: int, count: int = 60) -> tuple[Decoded, int]:
    """By a draft model: a layer takes 0.15 AR passes, a prompt token 0.03."""
    shape = SHAPES["flat"]
    policy = AutoTree(target=profile(shape))
    return decode_answers(policy, Kind(RATES[text], 0.15), shape, Answers(each, limit, 0.03), count)


LONG, SHORT = 600, 40
"""Tokens of prompts, which a draft model reads in 18 AR passes and in 1.2."""


@pytest.mark.parametrize("limit", [64, 4096])
@pytest.mark.parametrize("length", [10, 30, 60])
@pytest.mark.parametrize("prompt", [SHORT, 150, LONG])
@pytest.mark.parametrize("text", ["never", "rarely", "often", "always"])
def test_what_reading_prompts_loses_is_bounded(text: str, prompt: int, length: int, limit: int) -> None:
    """Long prompts before short answers took 18 AR passes each, and the next one was read again."""
    found, _ = answered(text, [(prompt, length)], limit)
    assert bounded(found, reading=0.03 * prompt), f"{found.ratio:.3f}, {found.lost:.1f} passes lost"


@pytest.mark.parametrize(("prompt", "length", "least"), [(SHORT, 30, 1.2), (SHORT, 300, 1.3), (LONG, 300, 1.2)])
def test_prompts_are_read_before_answers_that_pay_for_it(prompt: int, length: int, least: float) -> None:
    found, read = answered("often", [(prompt, length)], 4096)
    assert read == 60 and found.ratio >= least


@pytest.mark.parametrize("long", [100, 300, LONG])
def test_long_prompts_read_for_nothing_keep_no_short_one_from_being_read(long: int) -> None:
    """They emptied the account of both: of 100 short prompts behind ones of 300 tokens 50 were not read."""
    found, read = answered("often", [(long, 10), (SHORT, 50)], 64, count=200)
    assert read >= 95 and found.ratio >= 1.2
