"""Sampled beams follow the distribution of beam sampling: by enumeration through the engine, and by chi-square."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.beams import layers as rules
from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamParams, BeamRequest
from draftree.beams.layers import BeamDraws, target_distributions
from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.models.base import prefill_scored
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.dsbd import Cell, Residuals

from ..pairs import target
from ..papers.test_dsbd import Twice, Upside
from ..toy import ToyModel, chi_square
from ..verify.chances import Chance, outcomes
from .parts import PROMPTS, source

PROMPT = [1, 0]
PLAIN = SamplingParams(temperature=1.0)
Tokens = tuple[int, ...]
State = tuple[Tokens, ...]
"""Beams with their multiplicities, sorted: running and finished ones alike (finished ones end with an end token)."""
Distribution = dict[State, float]
Warp = Literal["joint", "token"]
After = Callable[[Tokens], Tensor]
"""Generated tokens -> [V] float64 probabilities of the next."""


def warped(weights: Sequence[float], params: SamplingParams) -> list[float]:
    """T by its definition, on outcomes with probabilities proportional to ``weights``; outcomes that tie stay together.

    Of what temperature gives, the k most probable; of these the fewest whose probability reaches top_p; of these those
    with at least min_p times the greatest probability.
    """
    powers = [w ** (1 / params.temperature) for w in weights]
    kept = sorted(powers, reverse=True)[: params.top_k or None]
    mass, total = 0.0, sum(kept)
    nucleus = 0
    while nucleus < len(kept) and mass < params.top_p * total - 1e-12:
        mass += kept[nucleus]
        nucleus += 1
    edge = max(kept[nucleus - 1], params.min_p * kept[0])
    left = [w if w >= edge else 0.0 for w in powers]
    return [w / sum(left) for w in left]


class BeamDistribution:
    """Beam sampling by its definition: of W places, those of running beams are drawn anew, each from the joint
    distribution over (running beam, next token), in which a beam is as often as it was drawn.

    Args:
        after: before any warp.
        width, limit, eos: W, most tokens, and tokens that end a beam.
        params: the warp.
        beam_warp: "token" warps what follows each beam, "joint" what follows all of them.
    """

    def __init__(
        self,
        after: After,
        width: int,
        limit: int,
        eos: frozenset[int] = frozenset(),
        params: SamplingParams = PLAIN,
        beam_warp: Warp = "token",
    ) -> None:
        def rows(beam: Tokens) -> Tensor:
            distribution = after(beam)
            return (
                torch.tensor(warped(distribution.tolist(), params), dtype=torch.float64)
                if beam_warp == "token"
                else distribution
            )

        self.after, self._width, self._limit, self._eos = cache(rows), width, limit, eos
        self._params = params if beam_warp == "joint" else PLAIN

    def ended(self, beam: Tokens) -> bool:
        return len(beam) == self._limit or (bool(beam) and beam[-1] in self._eos)

    def probability(self, beam: Tokens) -> float:
        total = 1.0
        for i, token in enumerate(beam):
            total *= float(self.after(beam[:i])[token])
        return total

    def cells(self, running: Sequence[Tokens], after: After | None = None) -> dict[Tokens, float]:
        """p_beam (Eq. 1); q_beam with what a drafter says of the next token."""
        after = after or self.after
        beams = [(*beam, token) for beam in running for token in range(len(after(beam)))]
        weights = [self.probability(beam[:-1]) * float(after(beam[:-1])[beam[-1]]) for beam in beams]
        found: dict[Tokens, float] = defaultdict(float)
        for beam, p in zip(beams, warped(weights, self._params), strict=True):
            if p:
                found[beam] += p
        return found

    def layer(self, state: State, width: int | None = None) -> Distribution:
        """The distribution of the beams one layer on."""
        finished = [beam for beam in state if self.ended(beam)]
        running = [beam for beam in state if not self.ended(beam)]
        cells, found = self.cells(running), defaultdict[State, float](float)
        for draws in product(cells, repeat=width or self._width - len(finished)):
            chance = 1.0
            for beam in draws:
                chance *= cells[beam]
            found[tuple(sorted([*finished, *draws]))] += chance
        return found

    def final(self, state: State) -> Distribution:
        """The distribution of the finished beams."""
        if all(self.ended(beam) for beam in state):
            return {state: 1.0}
        found: dict[State, float] = defaultdict(float)
        for after, chance in self.layer(state).items():
            for end, rest in self.final(after).items():
                found[end] += chance * rest
        return found


class Scripted(BeamDraws):
    """Draws that go every way in turn."""

    replacement = True

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def accepts(self, chance: float) -> bool:
        return self._chance.accepts(chance)

    def draft_cells(self, cells: NDArray[np.float64], count: int, depth: int) -> list[Cell]:
        distribution, found = cells.copy(), list[Cell]()
        for _ in range(min(count, int((distribution > 0).sum())) if not self.replacement else count):
            found += self._cells(distribution)
            if not self.replacement:
                distribution[found[-1]] = 0
        return found

    def target_cells(self, cells: NDArray[np.float64], numbers: Sequence[int], position: int) -> list[Cell]:
        return [cell for _ in numbers for cell in self._cells(cells)]

    def _cells(self, distribution: NDArray[np.float64]) -> list[Cell]:
        flat = (distribution / distribution.sum()).flatten().tolist()
        row, token = divmod(self._chance.choose(flat), distribution.shape[1])
        return [(row, token)]


class Scriptable(BeamEngine):
    """An engine whose chance is scripted."""

    script: Scripted

    def _draws(self, request: BeamRequest) -> Scripted:
        return self.script


def toys(vocab: int, eos: frozenset[int] = frozenset(), seed: int = 3) -> tuple[ToyModel, ToyModel]:
    """A target and a drafter that knows little of it."""
    options = {"spread": 1.2, "dtype": torch.float64, "eos_ids": eos}
    return ToyModel(vocab, seed, **options), ToyModel(vocab, 11, **options)  # type: ignore[arg-type]


def distribution_of(
    model: ToyModel, width: int, limit: int, params: SamplingParams = PLAIN, beam_warp: Warp = "token"
) -> BeamDistribution:
    def after(beam: Tokens) -> Tensor:
        return model.after([*PROMPT, *beam]).float().double().softmax(-1)

    return BeamDistribution(after, width, limit, model.capabilities.eos_ids, params, beam_warp)


def states(request: BeamRequest) -> State:
    return tuple(sorted(tuple(n.tokens) for n in (*request.finished, *Counter(request.running).elements())))


def one_step(
    models: tuple[ToyModel, ToyModel],
    beams: BeamParams,
    limit: int,
    script: type[Scripted] = Scripted,
    params: SamplingParams = PLAIN,
) -> Distribution:
    """The exact distribution of the beams after the prefill and one step."""
    drafting = ModelSource(models[1], models[1].capabilities.vocab_size)
    return distribution_after(1, lambda: Scriptable(models[0], drafting), beams, limit, script, params)


def distribution_after(
    steps: int,
    made: Callable[[], Scriptable],
    beams: BeamParams,
    limit: int,
    script: type[Scripted] = Scripted,
    params: SamplingParams = PLAIN,
) -> Distribution:
    """The exact distribution of the beams after the prefill and so many steps of an engine."""

    def program(chance: Chance) -> State:
        engine = made()
        engine.script = script(chance)
        request = BeamRequest(PROMPT, params, beams, limit, engine.target.capabilities.eos_ids)
        try:
            engine.open(request)
            for _ in range(steps):
                if not request.done:
                    engine.step([request])
        finally:
            engine.close(request)
        return states(request)

    found: dict[State, float] = defaultdict(float)
    for state, chance in outcomes(program):
        found[state] += chance
    return found


def completed(distribution: Distribution, want: BeamDistribution) -> Distribution:
    """The exact distribution of the finished beams where those that still run go on by the definition."""
    found: dict[State, float] = defaultdict(float)
    for state, chance in distribution.items():
        for end, rest in want.final(state).items():
            found[end] += chance * rest
    return found


def variation(
    vocab: int,
    width: int,
    drafted: int,
    depth: int,
    eos: frozenset[int] = frozenset(),
    script: type[Scripted] = Scripted,
    params: SamplingParams = PLAIN,
) -> float:
    """Total variation between one speculative step's beams, completed by the definition, and the definition's."""
    models, limit = toys(vocab, eos), depth + 2
    beams = BeamParams(width=width, draft_width=drafted, depth=depth)
    want = distribution_of(models[0], width, limit, params, "joint")
    got = completed(one_step(models, beams, limit, script, params), want)
    return distance(got, want.final(((),)))


def distance(one: Distribution, other: Distribution) -> float:
    """Total variation."""
    return 0.5 * sum(abs(one.get(end, 0.0) - other.get(end, 0.0)) for end in {*one, *other})


@pytest.mark.parametrize(("vocab", "width", "drafted", "depth"), [(3, 1, 2, 1), (2, 1, 2, 2), (2, 2, 2, 1)])
def test_beams_follow_the_distribution_of_beam_sampling(vocab: int, width: int, drafted: int, depth: int) -> None:
    assert variation(vocab, width, drafted, depth) < 1e-12


@pytest.mark.parametrize(("vocab", "width", "drafted", "depth"), [(2, 1, 2, 2), (2, 2, 2, 1)])
def test_they_do_where_beams_finish(vocab: int, width: int, drafted: int, depth: int) -> None:
    assert variation(vocab, width, drafted, depth, frozenset({0})) < 1e-12


@pytest.mark.parametrize("wrong", [Upside, Twice])
def test_the_papers_errors_are_caught(wrong: type[Residuals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "Residuals", wrong)
    assert variation(3, 1, 2, 1) > 1e-3


def test_drawing_without_replacement_is_caught() -> None:
    class Distinct(Scripted):
        replacement = False

    assert variation(3, 1, 2, 1, script=Distinct) > 1e-3


def test_beams_that_coincide_count_twice() -> None:
    """A distribution that forgets how often a beam is there is another one, and the test above would see it."""
    want = distribution_of(toys(2)[0], 2, 3)
    twice = want.layer(((0,), (0,)))
    assert twice == pytest.approx(want.layer(((0,),), 2))
    mixed = want.cells([(0,), (0,), (1,)])
    assert mixed != pytest.approx(want.cells([(0,), (1,)]))


SHARP = SamplingParams(temperature=0.5)


@pytest.mark.parametrize(
    ("drafted", "threshold", "params"),
    [(3, 0.9, PLAIN), (2, 0.2, SHARP), (3, 0.9, SHARP)],
)
def test_a_layer_of_dynamic_width_has_that_many_draws_of_its_distribution(
    drafted: int, threshold: float, params: SamplingParams
) -> None:
    """The width follows from the two distributions alone, so given the first layer it is a number; the layer behind the
    drafted one has all W beams."""
    models, width = toys(2), 2
    want, drafter = (
        distribution_of(models[0], width, 3, params, "joint"),
        distribution_of(models[1], width, 3, params, "joint"),
    )
    beams = BeamParams(width=width, draft_width=drafted, depth=1, threshold=threshold)
    exact, got = defaultdict[State, float](float), defaultdict[State, float](float)
    for first, chance in want.layer(((),)).items():
        for second, then in want.layer(first, expected_width(drafter, want, first, drafted, threshold)).items():
            for end, rest in want.layer(second, width).items():
                exact[end] += chance * then * rest
    for state, chance in one_step(models, beams, 3, params=params).items():
        ends = {state: 1.0} if len(state[0]) == 3 else want.layer(state, width)
        for end, rest in ends.items():
            got[end] += chance * rest
    assert distance(got, exact) < 1e-12


def expected_width(
    drafter: BeamDistribution, want: BeamDistribution, state: State, drafted: int, threshold: float
) -> int:
    """Eq. 4 to 7 by their definitions."""
    p, q = want.cells(state), want.cells(state, drafter.after)
    left, alphas = dict(p), []
    for _ in range(drafted):
        alphas.append(sum(min(left[x], q[x]) for x in p))
        left = {x: max(left[x] - q[x], 0.0) for x in p}
        left = {x: mass / sum(left.values()) for x, mass in left.items()}
    distribution = [0.0] * (drafted + 1)
    for made in product((True, False), repeat=drafted):
        chance, refused = 1.0, 0
        for yes in made:
            chance *= alphas[refused] if yes else 1 - alphas[refused]
            refused = 0 if yes else refused + 1
        distribution[sum(made)] += chance
    widest = max(k for k in range(drafted + 1) if sum(distribution[k:]) >= threshold)
    return min(2, max(1, widest))


def test_the_dynamic_width_differs_from_beam_to_beam() -> None:
    """Else the test above would be one of a fixed width."""
    models = toys(2)
    want, drafter = distribution_of(models[0], 2, 3), distribution_of(models[1], 2, 3)
    widths = {expected_width(drafter, want, s, 3, t) for s in want.layer(((),)) for t in (0.2, 0.5, 0.9)}
    assert widths == {1, 2}


def final_distribution(model: HFModel, prompt: list[int], params: SamplingParams, limit: int) -> BeamDistribution:
    def after(beam: Tokens) -> Tensor:
        row, scores = prefill_scored(model, [*prompt, *beam])
        distribution = np.exp(target_distributions(scores.logits([0]), PLAIN)[0])
        model.close(row)
        return torch.from_numpy(distribution)

    return BeamDistribution(after, 2, limit, params=params, beam_warp="joint")


class Eager(Residuals):
    """Accepts more than it should."""

    def acceptance(self, cell: Cell, rejected: int) -> float:
        return min(1.0, 1.3 * super().acceptance(cell, rejected))


@pytest.mark.parametrize("wrong", [None, Eager])
def test_sampled_beams_of_a_real_model_pass_a_chi_square_test(
    wrong: type[Residuals] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2000 requests are enough to see an error that is as small as that of ``Eager``."""
    if wrong:
        monkeypatch.setattr(rules, "Residuals", wrong)
    made, params = target(), SamplingParams(max_tokens=3, temperature=2.0, top_k=3)
    distribution = final_distribution(made, PROMPTS[1], params, 3).final(((),))
    engine, seen = BeamEngine(made, source("relative", made)), Counter[State]()
    beams = BeamParams(width=2, returned=2, draft_width=3, depth=2)
    for one in engine.generate([PROMPTS[1]] * 2000, [replace(params, seed=i) for i in range(2000)], beams):
        seen[tuple(sorted(tuple(h.token_ids) for h in one.hypotheses))] += 1
    assert set(seen) <= set(distribution)
    p = chi_square(torch.tensor([seen[s] for s in distribution]), torch.tensor(list(distribution.values())))
    assert p < 1e-4 if wrong else p > 1e-4
