"""Drawing one token: the warped distribution is transformers', the noise is keyed and standard, draws follow it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftree.config import SamplingParams
from draftree.draws import Draws
from draftree.errors import ConfigError
from draftree.models.huggingface import torch_scores
from draftree.sampling import warping
from draftree.sampling.warping import stream_key
from draftree.scores import NumpyScores
from draftree.verify.base import draw_at

from .toy import chi_square

DRAWS = 30_000
REFUSED = 1e-4
ROUNDING = 2e-6  # of a float32 sum of probabilities up to the edge of a nucleus

SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=1.8),
    "top-k": SamplingParams(temperature=0.9, top_k=7),
    "top-k 1": SamplingParams(temperature=1.0, top_k=1),
    "top-k above the vocabulary": SamplingParams(temperature=1.0, top_k=10_000),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "small top-p": SamplingParams(temperature=1.0, top_p=0.01),
    "large top-p": SamplingParams(temperature=1.3, top_p=0.999),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "min-p 1": SamplingParams(temperature=1.0, min_p=1.0),
    "top-k and top-p": SamplingParams(temperature=1.2, top_k=20, top_p=0.8),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.05),
}
settings = pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers; the global random state is left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """[R, V] by NumPy, row by row."""
    return torch.stack([torch.from_numpy(warping.warp(row.numpy(), params.warping)) for row in logits])


def warp_by_torch(logits: Tensor, params: SamplingParams) -> Tensor:
    return torch_scores.warp(logits, params.warping)


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab: int) -> Tensor:
    """[R, V] by NumPy, row by row."""
    keys = [stream_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return torch.stack([torch.from_numpy(warping.gumbel_noise(key, vocab)) for key in keys])


def transformers_warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """What transformers' ``generate`` makes of logits, in its order."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def assert_warped_alike(logits: Tensor, params: SamplingParams) -> None:
    for made in (warp, warp_by_torch):
        _assert_warped_alike(made(logits, params), logits, params)


def _assert_warped_alike(ours: Tensor, logits: Tensor, params: SamplingParams) -> None:
    """The same tokens kept and the same values as transformers, but for tokens on the very edge of the nucleus."""
    theirs = transformers_warp(logits, params)
    few, many = (
        transformers_warp(logits.double(), replace(params, top_p=min(1.0, params.top_p + e))).isfinite()
        for e in (-ROUNDING, ROUNDING)
    )
    edge = (few != many) & (params.top_p < 1)
    assert edge.sum() <= 0.01 * edge.numel()
    assert torch.equal(ours.masked_fill(edge, 0), theirs.masked_fill(edge, 0))


@settings
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0], ids=["flat", "middling", "peaked"])
@pytest.mark.parametrize("vocab", [50, 5000])
def test_warping_equals_transformers(vocab: int, spread: float, params: SamplingParams) -> None:
    assert_warped_alike(spread * normal(8, vocab, seed=vocab), params)


def test_a_nucleus_wider_than_the_first_sort_equals_transformers() -> None:
    """The tokens sorted at first hold too little of a flat distribution, though enough of the peaked one beside it."""
    logits = torch.cat([0.1 * normal(1, 5000), 6 * normal(1, 5000)])
    params = SamplingParams(temperature=1.0, top_p=0.9)
    flat, peaked = warp(logits, params).isfinite().sum(-1).tolist()
    assert flat > 4000 and peaked < 100
    assert_warped_alike(logits, params)


def test_warping_leaves_its_input_alone() -> None:
    logits = normal(3, 50)
    warp(logits, SETTINGS["all"])
    assert torch.equal(logits, normal(3, 50))


def test_the_most_probable_token_survives_every_setting() -> None:
    logits = normal(20, 50)
    warped = warp(logits, SamplingParams(temperature=1.0, top_k=1, top_p=1e-9, min_p=1.0))
    assert torch.equal(warped.isfinite().nonzero()[:, 1], logits.argmax(-1))


def test_the_noise_of_a_seed_and_position_is_always_the_same() -> None:
    assert torch.equal(gumbel_noise([3, 4], [10, 10], 50), gumbel_noise([3, 4], [10, 10], 50))


def test_the_noise_of_a_row_does_not_depend_on_the_other_rows() -> None:
    seeds, positions = [5, 0, 2**63 - 1, 5], [7, 0, 4000, 8]
    together = gumbel_noise(seeds, positions, 50)
    alone = [gumbel_noise([s], [p], 50) for s, p in zip(seeds, positions, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert torch.equal(gumbel_noise([1], [2], 5000)[:, :50], gumbel_noise([1], [2], 50))


def test_the_noise_is_the_same_in_torch() -> None:
    seeds, positions = [5, 0, 2**63 - 1, 5], [7, 0, 4000, 8]
    keys = [stream_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    noise = gumbel_noise(seeds, positions, 500)
    torch.testing.assert_close(
        torch_scores.gumbel_noise(keys, torch.arange(500).expand(4, -1)), noise, rtol=1e-12, atol=1e-12
    )
    tokens = torch.tensor([[4, 0, 499, 7], [7, 7, 3, 1], [1, 2, 3, 4], [9, 8, 7, 6]])
    torch.testing.assert_close(torch_scores.gumbel_noise(keys, tokens), noise.gather(1, tokens), rtol=1e-12, atol=0)


def splitmix64(state: int) -> Iterator[int]:
    """The generator of Steele, Lea and Flood (OOPSLA 2014), in whole numbers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def test_splitmix64_gives_its_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(islice(splitmix64(1234567), 3)) == published


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 5000])
def test_the_noise_is_a_splitmix64_stream_keyed_by_a_hash_of_seed_and_position(seed: int, position: int) -> None:
    """Pins the numbers, so that a seed gives the same text with the next version too."""
    golden = 0x9E3779B97F4A7C15
    key = next(splitmix64(next(splitmix64(seed)) + (position - 1) * golden))
    bits = islice(splitmix64(key - golden), 100)
    expected = [-math.log(-math.log1p(-((b >> 12) + 0.5) * 2.0**-52)) for b in bits]
    assert gumbel_noise([seed], [position], 100)[0].tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_every_seed_and_position_has_noise_of_its_own() -> None:
    """Also where seed and position add up to the same number, or change places."""
    pairs = [(s, p) for s in [*range(12), 2**32, 2**63 - 1] for p in range(12)]
    noise = gumbel_noise([s for s, _ in pairs], [p for _, p in pairs], 20)
    assert len(noise.unique()) > 0.999 * noise.numel()


def kolmogorov(sample: Tensor) -> float:
    """Kolmogorov's statistic against the standard Gumbel distribution: above 2.23 with probability 1e-4."""
    x = sample.double().flatten().sort().values
    distribution = (-(-x).exp()).exp()
    steps = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    return math.sqrt(len(x)) * max(float((distribution - steps[:-1]).max()), float((steps[1:] - distribution).max()))


def along(axis: str) -> Tensor:
    """A long run of noise along one of its keys."""
    n = 100_000
    if axis == "tokens":
        return gumbel_noise([1], [2], n)
    keys = [stream_key(1, i) if axis == "positions" else stream_key(i, 9) for i in range(n)]
    return torch_scores.gumbel_noise(keys, torch.ones(n, 1, dtype=torch.int64))[:, 0]


axes = pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])


@axes
def test_noise_follows_the_standard_gumbel_distribution(axis: str) -> None:
    assert kolmogorov(along(axis)) < 2.23


@axes
def test_noise_has_the_mean_and_variance_of_the_standard_gumbel_distribution(axis: str) -> None:
    noise = along(axis).double()
    n, variance = noise.numel(), math.pi**2 / 6
    assert abs(float(noise.mean()) - 0.5772156649) < 4 * math.sqrt(variance / n)
    assert abs(float(noise.var()) - variance) < 4 * variance * math.sqrt(4.4 / n)  # its kurtosis is 5.4


@axes
def test_neighbouring_noise_is_uncorrelated(axis: str) -> None:
    noise = along(axis).flatten().double()
    assert abs(float(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1])) < 4 / math.sqrt(len(noise))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    draw([SETTINGS["all"]] * 3, normal(3, 50))
    assert torch.equal(before, torch.get_rng_state())


def draw(
    params: Sequence[SamplingParams], logits: Tensor, histories: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> Tensor:
    """One draw a row; row b has seed ``seed + b``."""
    each = [Draws(p, seed + b, histories[b] if histories else [1, 2, 3]) for b, p in enumerate(params)]
    return drawn(logits, each, [[]] * len(params))


def drawn(logits: Tensor, draws: Sequence[Draws], before: Sequence[Sequence[int]]) -> Tensor:
    """One draw of each request after tokens of this step."""
    return torch.tensor(draw_at(NumpyScores(logits.numpy(), [1] * len(logits)), range(len(draws)), draws, before))


def frequencies(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] how often each token is drawn from one distribution over ``DRAWS`` seeds."""
    each = [draw([params] * 10_000, logits.expand(10_000, -1), seed=first) for first in range(0, DRAWS, 10_000)]
    return torch.cat(each).bincount(minlength=len(logits))


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p", "all"])
def test_draws_over_seeds_follow_the_warped_distribution(name: str) -> None:
    logits = 1.5 * normal(24, seed=3)
    params = SETTINGS[name]
    expected = transformers_warp(logits[None], params)[0].double().softmax(-1)
    assert chi_square(frequencies(logits, params), expected) > REFUSED


def test_the_chi_square_test_sees_a_distribution_that_is_a_little_off() -> None:
    logits = 1.5 * normal(24, seed=3)
    counts = frequencies(logits, SamplingParams(temperature=1.0))
    assert chi_square(counts, (logits / 1.04).softmax(-1)) < REFUSED


def test_draws_over_positions_follow_the_distribution() -> None:
    logits, params = normal(12, seed=4), SamplingParams(temperature=1.0)
    draws = Draws(params, 7, [0])
    keys = [draws.key(depth) for depth in range(DRAWS // 10)]
    counts = torch.tensor([warping.draw(logits.numpy(), key) for key in keys]).bincount(minlength=12)
    assert chi_square(counts, logits.softmax(-1)) > REFUSED


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, -1)], ids=["next position", "next seed", "same sum"])
def test_two_draws_with_neighbouring_keys_are_independent(step: tuple[int, int]) -> None:
    vocab, p = 5, normal(5, seed=5)
    distribution = p.double().softmax(-1)
    counts = torch.zeros(vocab * vocab, dtype=torch.int64)
    for first in range(0, DRAWS, 20_000):
        here, there = (
            draw(
                [SamplingParams(temperature=1.0)] * 10_000,
                p.expand(10_000, -1),
                [[0] * (8 + k * step[1])] * 10_000,
                seed=first + k * step[0],
            )
            for k in (0, 1)
        )
        counts += (here * vocab + there).bincount(minlength=vocab * vocab)
    assert chi_square(counts, torch.outer(distribution, distribution).flatten()) > REFUSED


def test_a_draw_depends_on_the_absolute_position_not_on_where_a_step_began() -> None:
    params, logits = SamplingParams(temperature=1.0), normal(1, 5000)
    early = drawn(logits, [Draws(params, 3, [4, 5])], [[6, 7, 8]])
    late = drawn(logits, [Draws(params, 3, [4, 5, 6, 7])], [[8]])
    other = drawn(logits, [Draws(params, 3, [4, 5, 6, 7])], [[8, 9]])
    assert early == late != other


def test_rows_with_settings_of_their_own_draw_what_each_draws_alone() -> None:
    params = [SamplingParams(), *SETTINGS.values(), SamplingParams(), *SETTINGS.values()]
    logits = normal(len(params), 50, seed=6)
    alone = [draw([p], logits[b : b + 1], seed=b) for b, p in enumerate(params)]
    assert torch.equal(draw(params, logits), torch.cat(alone))


def test_at_temperature_zero_a_draw_is_the_argmax_whatever_else_is_set() -> None:
    logits = normal(9, 50)
    assert torch.equal(draw([SamplingParams(top_k=3, top_p=0.5, min_p=0.2)] * 9, logits), logits.argmax(-1))


class Recorder:
    """A processor that notes what it is given and adds ``boost`` to one token."""

    def __init__(self, boosted: int = 0, boost: float = 0.0) -> None:
        self.boosted, self.boost = boosted, boost
        self.ids: list[list[int]] = []
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self.ids.append(ids.tolist())
        self.shapes.append(logits.shape)
        logits[self.boosted] += self.boost
        return logits


def test_a_processor_sees_exactly_the_committed_and_the_drawn_ids_of_its_row() -> None:
    seen = Recorder()
    params = [SamplingParams(), SamplingParams(processors=(seen,)), SamplingParams()]
    draws = [Draws(p, 0, history) for p, history in zip(params, [[1], [2, 3, 4], [5, 6]], strict=True)]
    drawn(normal(3, 10), draws, [[7, 7], [8, 9], [7, 7]])
    assert seen.ids == [[2, 3, 4, 8, 9]]
    assert seen.shapes == [(10,)]


def test_processors_run_in_order_each_on_what_the_one_before_made() -> None:
    def floor(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.minimum(logits, 0)

    logits = torch.zeros(1, 10) - 1
    last_clamps = draw([SamplingParams(processors=(Recorder(4, 9.0), Recorder(5, 3.0), floor))], logits)
    last_boosts = draw([SamplingParams(processors=(floor, Recorder(4, 2.0), Recorder(5, 3.0)))], logits)
    assert (last_clamps.tolist(), last_boosts.tolist()) == ([4], [5])


def test_a_processor_changes_its_own_row_alone_and_not_the_models_logits() -> None:
    logits = normal(2, 10)
    given = logits.clone()
    found = draw([SamplingParams(processors=(Recorder(3, 99.0),)), SamplingParams()], logits)
    assert found.tolist() == [3, int(given[1].argmax())]
    assert torch.equal(logits, given)


def test_processors_come_before_temperature() -> None:
    """A bonus of 10 at temperature 100 is one of 0.1: too little to decide a draw."""
    params = SamplingParams(temperature=100.0, processors=(Recorder(0, 10.0),))
    found = draw([params] * 300, torch.zeros(300, 10))
    assert int((found == 0).sum()) < 60


def test_a_large_nucleus_is_exact() -> None:
    """Summed in float32, the edge of a top-p set over a large vocabulary was off by several tokens."""
    logits = 4 * normal(4, 150_000)
    ranked = logits.double().softmax(-1).sort(-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    kept = warp(logits, SamplingParams(temperature=1.0, top_p=0.999)).isfinite().sum(-1)
    assert kept.tolist() == (before < 0.999).sum(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-39, 9e-5])
def test_a_temperature_at_which_logits_overflow_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        SamplingParams(temperature=temperature)
