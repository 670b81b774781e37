"""How one token is drawn from logits: warping, position-keyed noise, pick; and the most probable tokens.

Pure functions on tensors, except ``Draws``, which remembers whose logits it is given. Knows nothing of trees.

The draw at absolute position t under seed s is argmax(warped logits + Gumbel noise(s, t)): a fixed function of the
distribution and of (s, t). That is what makes speculative output equal AR output token for token: whichever tree was
drafted, whichever batch the request is in, position t sees the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .config import SamplingParams
from .constraint import ConstraintState, followed, masked

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BELOW_1 = 1 - 2.0**-24
"""The largest float32 below 1."""
_ACCEPTANCE = 1
"""Label of the acceptance draws."""
DRAFT_NOISE = 2
"""Label of the streams that drafted children are drawn with."""
_NUCLEUS = 1024
"""Tokens that are sorted at first to find a top-p set on a CPU; the whole vocabulary when they hold too little mass."""


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p and min-p in transformers' order; dropped tokens become -inf.

    Args:
        logits: [R, V] float32.
        params: ``temperature`` must be positive.

    Returns:
        [R, V] float32 warped logits (not normalised).
    """
    x = logits / params.temperature
    if 0 < params.top_k < x.shape[-1]:
        x = _drop_below(x, x.topk(params.top_k).values[:, -1:])
    if params.top_p < 1:
        x = _drop_below(x, _nucleus_edge(x, params.top_p))
    if params.min_p > 0:
        # p >= min_p * p_max  <=>  x >= x_max + ln(min_p)
        x = _drop_below(x, x.amax(-1, keepdim=True) + torch.tensor(params.min_p).log().item())
    return x


def warp_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """``warp`` with each row's own params, in new memory; rows at temperature 0 come back as they are."""
    warpings = {p.warping for p in params}
    if len(warpings) == 1 and params[0].temperature:
        return warp(logits, params[0])
    out = logits.clone()
    for warping in {p.warping for p in params if p.temperature}:
        rows = [r for r, p in enumerate(params) if p.warping == warping]
        out[rows] = warp(logits[rows], params[rows[0]])
    return out


def _drop_below(x: Tensor, edge: Tensor) -> Tensor:
    return x.masked_fill(x < edge, float("-inf"))


def _nucleus_edge(x: Tensor, top_p: float) -> Tensor:
    """[R, 1] smallest logit of the smallest set whose probability reaches ``top_p``."""
    total = x.double().logsumexp(-1, keepdim=True)
    vocab = x.shape[-1]
    width = vocab if x.is_cuda else min(_NUCLEUS, vocab)
    while True:
        top = x.topk(width).values
        mass = (top - total).exp().cumsum(-1)
        if width == vocab or bool((mass[:, -1] >= top_p).all()):
            break
        width = vocab
    # A token stays iff the mass of the tokens before it is below top_p; the first always stays.
    kept = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True)
    return top.gather(-1, kept - 1)


def _mix(x: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The same 64 bits as a signed integer, which is what int64 tensors hold."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical (not arithmetic) right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _shaken(x: Tensor, bits: int) -> Tensor:
    """``x`` itself, combined in place with its upper bits."""
    return x.bitwise_xor_(_shift(x, bits))


def _mixed(x: Tensor) -> Tensor:
    """``_mix`` of int64, in place."""
    return _shaken(_shaken(_shaken(x, 30).mul_(_signed(_MIX1)), 27).mul_(_signed(_MIX2)), 31)


def stream_start(seed: int) -> int:
    """Where the streams of a seed start, for ``gumbel_noise_at``."""
    return _signed(_mix(seed + _GOLDEN))


def _key(seed: int, position: int) -> int:
    """Where the stream of (seed, position) starts."""
    return _mix(stream_start(seed) + position * _GOLDEN)


def derive_seed(seed: int, *labels: int) -> int:
    """A seed whose streams are independent of those of ``seed`` and of those of other labels."""
    for label in labels:
        seed = _mix(_mix(seed + _MIX1) + label * _MIX2)
    return seed


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), both ends excluded: a pure function of (seed, position)."""
    return ((_mix(_key(seed, position)) >> 12) + 0.5) * 2.0**-52


@lru_cache(maxsize=8)
def _counters(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device) * _signed(_GOLDEN)


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str = "cpu"
) -> Tensor:
    """[R, vocab] float32 standard Gumbel noise, a pure function of (seed, position, token).

    Row r is a SplitMix64 stream that starts at a hash of (seeds[r], positions[r]); no generator state is kept or
    touched, and the integers are the same on every device.
    """
    return _gumbel(_keys(seeds, positions, torch.device(device)), _counters(vocab, torch.device(device)))


def gumbel_noise_at(starts: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """``gumbel_noise`` of [R] ``stream_start`` of the seeds and [R] positions that only the device knows."""
    keys = _mixed(starts + positions * _signed(_GOLDEN))
    return _gumbel(keys, _counters(vocab, keys.device))


def gumbel_noise_of(seeds: Sequence[int], positions: Sequence[int], tokens: Tensor) -> Tensor:
    """[R, K] float32: of ``gumbel_noise`` that of some tokens alone, [R, K] int64."""
    return _gumbel(_keys(seeds, positions, tokens.device), tokens * _signed(_GOLDEN))


def _keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """[R] int64."""
    keys = [_signed(_key(s, p)) for s, p in zip(seeds, positions, strict=True)]
    return torch.tensor(keys).to(device, non_blocking=True)


def _gumbel(keys: Tensor, counters: Tensor) -> Tensor:
    uniform = _shift(_mixed(counters + keys[:, None]), 12).float().add_(0.5).mul_(2.0**-52).clamp_(max=_BELOW_1)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # of 1 - uniform: float32 is finest near 0, where winners are


def first_largest(values: Tensor) -> Tensor:
    """[...] the first index of the largest of [..., V] values; of float32 on a CPU by numpy, in a tenth of the time."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return torch.from_numpy(np.asarray(values.numpy().argmax(-1)))
    return values.argmax(-1)


@dataclass(slots=True)
class KeyedUniformDraws:
    """``verify.rejection.UniformDraws`` of one request in one step, keyed.

    Acceptance draws are keyed by (seed, position of the step's root, number of the draw), and by a label that no other
    noise has: no step sees an acceptance draw or draft noise of another one, so nothing that an earlier step gave up
    can come back. Tokens take the target's own position-keyed noise, as in ``Draws``.

    Attributes:
        history: committed token ids; the first draw is at position ``len(history)``.
        state: of the request's constraint there, if it has one.
    """

    params: SamplingParams
    seed: int
    history: Sequence[int]
    state: ConstraintState | None = None
    _drawn: int = 0

    def warped(self, logits: Tensor, drawn: Sequence[int]) -> Tensor:
        """[V] the target's warped logits after ``drawn``; only constrained and processed at temperature 0."""
        row = logits[None].float()
        if self.state is not None:
            row = masked(row, [followed(self.state, drawn)])
        if self.params.processors:
            ids = torch.tensor([[*self.history, *drawn]]).to(logits.device, non_blocking=True)
            for processor in self.params.processors:
                row = processor(ids, row)
        return (warp(row, self.params) if self.params.temperature else row)[0]

    def accepts(self, chance: float) -> bool:
        self._drawn += 1
        return uniform(derive_seed(self.seed, _ACCEPTANCE, self._drawn), len(self.history)) <= chance

    def draw(self, logits: Tensor, depth: int) -> int:
        """The argmax at temperature 0."""
        if self.params.temperature:
            logits = logits + gumbel_noise([self.seed], [len(self.history) + depth], len(logits), logits.device)[0]
        return int(first_largest(logits))


@dataclass(frozen=True, slots=True)
class Draws:
    """The target's own draws for a batch of requests: logits of their next positions in, one token each out.

    Attributes:
        params: [B]; ``processors`` see the request's history.
        seeds: [B].
        histories: [B] committed token ids; the first draw is at position ``len(history)``.
        states: [B] of the requests' constraints there, None where there is none; empty: none has one.
    """

    params: Sequence[SamplingParams]
    seeds: Sequence[int]
    histories: Sequence[Sequence[int]]
    states: Sequence[ConstraintState | None] = ()
    _tensors: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def of(self, rows: Sequence[int]) -> Draws:
        states = [self.states[b] for b in rows] if self.states else ()
        return Draws(
            [self.params[b] for b in rows], [self.seeds[b] for b in rows], [self.histories[b] for b in rows], states
        )

    def uniform(self, b: int) -> KeyedUniformDraws:
        return KeyedUniformDraws(
            self.params[b], self.seeds[b], self.histories[b], self.states[b] if self.states else None
        )

    @property
    def greedy(self) -> bool:
        """Every draw is the argmax of the logits, whatever came before it."""
        plain = all(p.temperature == 0 and not p.processors for p in self.params)
        return plain and not any(self.states)

    def __call__(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Draw each request's next token.

        Args:
            logits: [B, V], the target's logits after the tokens in ``drawn``.
            drawn: [B, d] int64, tokens of this step that each request has passed so far; where the last one is -1, the
                draw is not used, and neither constraint nor processors are asked.

        Returns:
            [B] int64 tokens.
        """
        logits = self.process(logits.float(), drawn)
        random = [b for b, p in enumerate(self.params) if p.temperature]
        if not random:
            return first_largest(logits)
        warped = warp_rows(logits, self.params)
        positions = [len(self.histories[b]) + drawn.shape[1] for b in random]
        noise = gumbel_noise([self.seeds[b] for b in random], positions, logits.shape[-1], logits.device)
        if len(random) == len(self.params):
            warped += noise
        else:
            warped[random] += noise
        return first_largest(warped)

    def process(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Constrain each request and run its processors on its own history (arguments as in ``__call__``); [B, V]."""
        if any(self.states):
            ended = [drawn.shape[1] > 0 and int(row[-1]) < 0 for row in drawn]
            here = [
                None if state is None or over else followed(state, row.tolist())
                for state, over, row in zip(self.states, ended, drawn, strict=True)
            ]
            logits = masked(logits, here)
        if not any(p.processors for p in self.params):
            return logits
        logits = logits.clone()
        for b, p in enumerate(self.params):
            if p.processors and not (drawn.shape[1] and int(drawn[b, -1]) < 0):
                if b not in self._tensors:
                    self._tensors[b] = torch.tensor(self.histories[b]).to(logits.device, non_blocking=True)
                history = self._tensors[b]
                ids, row = torch.cat([history, drawn[b]])[None], logits[b : b + 1]
                for processor in p.processors:
                    row = processor(ids, row)
                logits[b] = row[0]
        return logits


_CHUNK = 256
"""Most tokens whose largest logit is found at once."""
_ROWS = 8
"""Nodes that are looked at together: bounds what is allocated beyond the logits."""


class Successors(NamedTuple):
    """The target's k most probable next tokens after R nodes, most probable first.

    Attributes:
        tokens: [R, k] int64.
        logprobs: [R, k] float32, at temperature 1, nats.
    """

    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> Successors:
        """Of [R, 2 k] on the host, as ``successors`` packs them."""
        tokens, logprobs = packed.tensor_split(2, dim=-1)
        return cls(tokens.long(), logprobs.float())


def successors(logits: Tensor, count: int) -> Tensor:
    """The ``count`` most probable successors by [B, R, V] logits.

    Returns:
        [B, R, 2 count] float64 on the logits' device: tokens, then log-probs, for one transfer to the host.
    """
    rows, count = logits.flatten(0, 1), min(count, logits.shape[-1])
    parts = []
    for some in rows.split(_ROWS):
        best = largest(some, count)
        logprobs = some.log_softmax(-1, dtype=torch.float32).gather(-1, best)
        parts.append(torch.cat([best.double(), logprobs.double()], dim=-1))
    return torch.cat(parts).view(*logits.shape[:2], 2 * count)


def largest(logits: Tensor, count: int) -> Tensor:
    """[R, count] int64 where the largest of [R, V] logits are, the largest first.

    All of them are in the chunks with the ``count`` largest maxima.
    """
    chunk = math.gcd(logits.shape[-1], _CHUNK)
    if min(chunk, logits.shape[-1] // chunk) <= 2 * count:
        return logits.topk(count).indices
    chunks = logits.reshape(len(logits), -1, chunk)
    where = chunks.amax(-1).topk(count).indices
    at = chunks.gather(1, where[..., None].expand(-1, -1, chunk)).flatten(1).topk(count).indices
    return where.gather(-1, at // chunk) * chunk + at % chunk
