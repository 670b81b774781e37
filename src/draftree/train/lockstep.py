"""Responses of many rows in step, for an accelerator: a pass takes one token of every row, prompts included.

The host launches passes and looks only every ``_LOOK`` of them which responses have ended. A step of a thousand rows
costs it what a step of one row does, where decoding by the engine costs it more with each row.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..models.huggingface import HFModel
from ..sampling import gumbel_noise_at, stream_start
from .responses import Response, seed_of, temperature_of

_LOOK = 16
"""Passes from one look at what has ended to the next."""
_GRAIN = 64
"""Attention looks at a multiple of so many positions."""


def respond_in_step(
    target: HFModel, prompts: Sequence[Sequence[int]], numbers: Iterable[int], *, rows: int, max_tokens: int, seed: int
) -> Generator[Response]:
    """``draw.respond`` in step; the same responses (near-ties aside). No row of the target may be open meanwhile."""
    try:
        yield from _drawn(target, prompts, iter(numbers), rows=rows, max_tokens=max_tokens, seed=seed)
    finally:
        if not target.rows:
            target.cache.clear()  # whoever trains on them next wants the memory


def _drawn(
    target: HFModel, prompts: Sequence[Sequence[int]], waiting: Iterator[int], *, rows: int, max_tokens: int, seed: int
) -> Generator[Response]:
    lanes = _Lanes(target, rows, max(map(len, prompts)) + max_tokens)
    while True:
        fresh = []
        for lane in lanes.free:
            if (number := next(waiting, None)) is None:
                break
            fresh.append((lane, number, temperature_of(number, len(prompts)), seed_of(number, seed)))
        lanes.fill(fresh, [prompts[number % len(prompts)] for _, number, *_ in fresh], max_tokens)
        if len(lanes.free) == rows:
            return
        lanes.step(_LOOK)
        yield from lanes.ended()


@dataclass(slots=True)
class _Lane:
    """What the host knows of a lane in use."""

    number: int
    temperature: float
    prompt_length: int
    position: int = 0


class _Lanes:
    """Rows of the cache that go on together; each holds a text whose first tokens are given.

    Attributes:
        free: lanes that are not in use.
    """

    def __init__(self, target: HFModel, rows: int, longest: int) -> None:
        can = target.capabilities
        target.reserve(rows, -(-longest // _GRAIN) * _GRAIN)
        self._target, self._used = target, dict[int, _Lane]()
        device, width = can.device, target.hidden_size if target.tracks_features else 0
        self._text = torch.zeros((rows, longest + 1), dtype=torch.int64, device=device)
        self._states = torch.zeros((rows, longest + 1, width), dtype=torch.float16, device=device)
        self._position, self._given, self._last, self._start = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._going = torch.zeros(rows, dtype=torch.bool, device=device)
        self._lanes = torch.arange(rows, device=device)
        self._eos = torch.tensor(sorted(can.eos_ids), dtype=torch.int64, device=device)
        self._arrange()

    @torch.inference_mode()
    def fill(
        self, fresh: Sequence[tuple[int, int, float, int]], prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        """Put prompts into free lanes: for each its lane, its number, temperature and seed."""
        if not fresh:
            return
        device, longest = self._text.device, self._target.capabilities.max_length
        text = torch.zeros((len(fresh), self._text.shape[1]), dtype=torch.int64)
        for row, prompt in zip(text, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        numbers = torch.stack(
            [
                torch.zeros_like(lengths),
                lengths,
                lengths + torch.minimum(torch.tensor(max_tokens), longest - lengths - 1) - 1,
                torch.tensor([stream_start(seed) for *_, seed in fresh]),
            ]
        ).to(device)
        lanes = torch.tensor([lane for lane, *_ in fresh], device=device)
        self._text[lanes] = text.to(device)
        for part, new in zip((self._position, self._given, self._last, self._start), numbers, strict=True):
            part[lanes] = new
        self._going[lanes] = True
        for (lane, number, temperature, _), prompt in zip(fresh, prompts, strict=True):
            self._used[lane] = _Lane(number, temperature, len(prompt))
        self._arrange()

    def _arrange(self) -> None:
        self.free = [lane for lane in range(len(self._lanes)) if lane not in self._used]
        sampled = [lane for lane, used in sorted(self._used.items()) if used.temperature]
        self._sampled = torch.tensor(sampled, dtype=torch.int64).to(self._text.device)
        heat = torch.tensor([self._used[lane].temperature for lane in sampled])
        self._heat = heat.to(self._text.device)[:, None]

    @torch.inference_mode()
    def step(self, passes: int) -> None:
        """So many passes over all lanes; those that have ended stand still."""
        furthest = max(used.position for used in self._used.values())
        for ahead in range(1, passes + 1):
            end = min(-(-(furthest + ahead) // _GRAIN) * _GRAIN, self._target.cache.placement.slots)
            self._pass(end)

    def _pass(self, end: int) -> None:
        lanes, at, sampled = self._lanes, self._position, self._sampled
        logits, states = self._target.feed(self._text[lanes, at], at, end)
        self._states[lanes, at] = states.half()
        drawn = logits.argmax(-1)
        if len(sampled):
            noise = gumbel_noise_at(self._start[sampled], at[sampled] + 1, logits.shape[1])
            drawn[sampled] = (logits[sampled].float() / self._heat).add_(noise).argmax(-1)
        own = self._going & (at + 1 >= self._given)
        self._text[lanes, at + 1] = torch.where(own, drawn, self._text[lanes, at + 1])
        ended = own & (torch.isin(drawn, self._eos) | (at + 1 >= self._last))
        self._going &= ~ended
        self._position = at + self._going

    @torch.inference_mode()
    def ended(self) -> list[Response]:
        """Look at the lanes; what has ended leaves them."""
        going, positions = torch.stack([self._going.long(), self._position]).tolist()
        found = []
        for lane, used in self._used.items():
            used.position = positions[lane]
            if not going[lane]:
                found.append(lane)
        if not found:
            return []
        longest = max(positions[lane] for lane in found) + 2
        lanes = torch.tensor(found, device=self._text.device)
        text, states = self._text[lanes, :longest].cpu(), self._states[lanes, :longest].cpu()
        responses = []
        for row, lane in enumerate(found):
            used, length = self._used.pop(lane), positions[lane] + 2
            part = text[row, :length].clone(), states[row, : length - 1].clone()
            responses.append(Response(used.number, used.temperature, used.prompt_length, *part))
        self._arrange()
        return responses
