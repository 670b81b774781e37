"""The target's responses to prompts, with its hidden states: by the engine, or on a GPU with all rows in step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config import SamplingParams
from ..engine.engine import Engine, Handle
from ..engine.observer import Observer
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import Speculation
from ..models.abilities import TrainableModel, tracked
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel
from ..models.huggingface.features import FeatureRow
from ..models.huggingface.torch_sampling import gumbel_noise_at, signed
from ..request import Outcome, Request
from ..sampling.noise import GOLDEN, mix

MAX_ROWS = 1 << 16
"""Responses that may be decoded together: far beyond what pays on any device."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of the first response to prompt i: entry i modulo 4. Half of these are greedy, as most decoding; the rest leads off
the greedy paths."""
AGAIN = (0.7, 1.0)
"""Of further responses, in turn: another greedy one would be the same."""
_PASSES = 16
"""In step: passes from one look at what has ended to the next."""
_GRAIN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One prompt with the target's response.

    Attributes:
        number: of the prompt; the further responses of P prompts go on from P, 2 P, ...
        temperature: at which it was drawn.
        prompt_length: tokens of the prompt.
        tokens: [L] int64, prompt and response.
        features: [L - 1, F] float16, the target's hidden states at all tokens but the last; F is 0 where it keeps none.
        kept: which hidden states these are.
    """

    number: int
    temperature: float
    prompt_length: int
    tokens: Tensor
    features: Tensor
    kept: FeatureSpec = FINAL_STATE

    @property
    def gained(self) -> int:
        """Tokens of the response."""
        return self.tokens.shape[0] - self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    """What responses are drawn; equal ones may be added to one another.

    Attributes:
        target: its name.
        prompts: digest of all prompts in order.
        max_tokens: most tokens of a response.
        seed: of the order of the prompts, and of the responses.
        dtype: of the target.
    """

    target: str
    prompts: str
    max_tokens: int
    seed: int
    dtype: str


def seed_of(number: int, seed: int) -> int:
    """Of response ``number``."""
    return (seed + number) % 2**63


def temperature_of(number: int, prompts: int) -> float:
    """Of response ``number`` to so many prompts."""
    again, prompt = divmod(number, prompts)
    return AGAIN[(prompt + again) % len(AGAIN)] if again else TEMPERATURES[prompt % len(TEMPERATURES)]


def respond(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    numbers: Iterable[int],
    *,
    rows: int,
    max_tokens: int,
    seed: int,
    alone: bool = True,
) -> Generator[Response]:
    """Responses to the prompts of these numbers, in the order in which they end.

    On a CPU the engine decodes them, elsewhere they go on in step. A response depends on its number and the seed alone,
    not on its neighbours (near-ties aside).

    Args:
        target: tracks its hidden states where they are wanted.
        prompts: token ids of all P prompts; response n is to prompt n modulo P.
        numbers: which are still to do; read one by one, as rows become free.
        rows: responses that are decoded together.
        max_tokens: most tokens of a response.
        alone: no other row of the target is opened meanwhile: it would overwrite one of those in step.
    """
    options = {"rows": rows, "max_tokens": max_tokens, "seed": seed}
    if alone and target.capabilities.device != "cpu" and isinstance(target, TrainableModel):
        return respond_in_step(target, prompts, numbers, **options)
    return _respond_by_engine(target, prompts, numbers, **options)


def _respond_by_engine(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    numbers: Iterable[int],
    *,
    rows: int,
    max_tokens: int,
    seed: int,
) -> Generator[Response]:
    target.reserve(rows, max(map(len, prompts)) + max_tokens)
    ended = _EndedFeatures()
    engine = Engine(target, Speculation(nodes=1), observers=[ended], scheduling=SchedulerParams(rows=rows, queue=rows))
    waiting, running = iter(numbers), dict[int, Handle]()
    try:
        while True:
            for number in islice(waiting, rows - len(running)):
                prompt, temperature = prompts[number % len(prompts)], temperature_of(number, len(prompts))
                limit = min(max_tokens, target.capabilities.max_length - len(prompt) - 1)
                params = SamplingParams(max_tokens=limit, temperature=temperature, seed=seed_of(number, seed))
                running[number] = engine.submit(prompt, params)
            if not running:
                return
            engine.wait(lambda: any(handle.done for handle in running.values()))
            for number in [n for n, handle in running.items() if handle.done]:
                handle = running.pop(number)
                handle.result()  # raises what ended it
                request = handle.request
                ids, features = torch.tensor(request.ids), ended.features.pop(request)
                own = request.params.temperature, request.prompt_length, ids, features
                yield Response(number, *own, tracked(target))
    finally:
        for handle in running.values():
            handle.cancel()


class _EndedFeatures(Observer):
    """Keeps the hidden states of requests that have ended, as a ``Response`` has them."""

    def __init__(self) -> None:
        self.features: dict[Request, Tensor] = {}

    def opened(self, request: Request) -> None:
        self._keep(request)

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._keep(outcome.request)

    def _keep(self, request: Request) -> None:
        if request.finish_reason is None or request.row is None:
            return
        if isinstance(request.row, FeatureRow) and request.row.features:
            self.features[request] = _halved(request.row.waiting_features()).cpu()
        else:
            self.features[request] = torch.zeros(len(request.ids) - 1, 0, dtype=torch.float16)


def respond_in_step(
    target: TrainableModel,
    prompts: Sequence[Sequence[int]],
    numbers: Iterable[int],
    *,
    rows: int,
    max_tokens: int,
    seed: int,
) -> Generator[Response]:
    """``respond`` with one token of each row a pass, prompts included; no row of the target may be open meanwhile.

    The host reads which rows have ended after some passes only: between them a GPU does not wait for it.
    """
    waiting = iter(numbers)
    try:
        lanes = _Lanes(target, prompts, rows, max_tokens, seed)
        while lanes.fill(waiting):
            lanes.step()
            yield from lanes.ended()
    finally:
        if not target.rows:
            target.free_cache()  # training on them needs the memory


class _Lanes:
    """Rows of the cache that go on together; each holds a prompt and as much of its response as is drawn."""

    def __init__(
        self, target: TrainableModel, prompts: Sequence[Sequence[int]], rows: int, max_tokens: int, seed: int
    ) -> None:
        longest, device = max(map(len, prompts)) + max_tokens, target.capabilities.device
        target.reserve(rows, rounded_up(longest))
        width = target.hidden_size * len(target.tracked.layers)
        self._target, self._prompts, self._max_tokens, self._seed = target, prompts, max_tokens, seed
        self._numbers: dict[int, int] = {}  # of the responses, by lanes that are in use
        self._text = torch.zeros((rows, longest + 1), dtype=torch.int64, device=device)
        self._states = torch.zeros((rows, longest + 1, width), dtype=torch.float16, device=device)
        self._position, self._given, self._last, self._start = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._temperature = torch.zeros(rows, device=device)
        self._going = torch.zeros(rows, dtype=torch.bool, device=device)
        self._lanes = torch.arange(rows, device=device)
        self._eos = torch.tensor(sorted(target.capabilities.eos_ids), dtype=torch.int64, device=device)

    @torch.inference_mode()
    def fill(self, waiting: Iterator[int]) -> bool:
        """Begin responses in the lanes that are free; false where none is in use then."""
        free = [lane for lane in range(len(self._lanes)) if lane not in self._numbers]
        fresh = dict(zip(free, waiting, strict=False))
        if fresh:
            self._numbers |= fresh
            self._begin(list(fresh), list(fresh.values()))
        return bool(self._numbers)

    def _begin(self, free: list[int], numbers: list[int]) -> None:
        device, count = self._lanes.device, len(self._prompts)
        lanes = torch.tensor(free, device=device)
        prompts = [torch.tensor(self._prompts[number % count]) for number in numbers]
        text = pad_sequence(prompts, batch_first=True)
        self._text[lanes, : text.shape[1]] = text.to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        left = self._target.capabilities.max_length - lengths - 1
        starts = torch.tensor([signed(mix(seed_of(number, self._seed) + GOLDEN)) for number in numbers])
        self._given[lanes] = lengths.to(device)
        self._last[lanes] = (lengths + left.clamp(max=self._max_tokens) - 1).to(device)
        self._start[lanes] = starts.to(device)
        self._temperature[lanes] = torch.tensor([temperature_of(number, count) for number in numbers], device=device)
        self._going[lanes] = True

    @torch.inference_mode()
    def step(self) -> None:
        """Some passes over all lanes; those that have ended stand still."""
        sampled = self._temperature.nonzero()[:, 0]
        furthest, slots = int(self._position.max()), self._target.slots
        for end in range(furthest + 1, furthest + 1 + _PASSES):
            self._pass(min(rounded_up(end), slots), sampled)

    def _pass(self, end: int, sampled: Tensor) -> None:
        lanes, at = self._lanes, self._position
        logits, states = self._target.feed(self._text[lanes, at], at, end)
        self._states[lanes, at] = _halved(states)
        drawn = logits.argmax(-1)
        if len(sampled):
            noise = gumbel_noise_at(self._start[sampled], at[sampled] + 1, logits.shape[1])
            scaled = logits[sampled].float() / self._temperature[sampled, None]
            drawn[sampled] = noise.add_(scaled).argmax(-1)
        own = self._going & (at + 1 >= self._given)
        self._text[lanes, at + 1] = torch.where(own, drawn, self._text[lanes, at + 1])
        ended = own & (torch.isin(drawn, self._eos) | (at + 1 >= self._last))
        self._going &= ~ended
        self._position = at + self._going

    @torch.inference_mode()
    def ended(self) -> list[Response]:
        """The responses that have ended; their lanes are free then."""
        going, positions = torch.stack([self._going.long(), self._position]).tolist()
        found = [lane for lane in self._numbers if not going[lane]]
        if not found:
            return []
        lanes = torch.tensor(found, device=self._lanes.device)
        longest = max(positions[lane] for lane in found) + 2
        texts, states = self._text[lanes, :longest].cpu(), self._states[lanes, :longest].cpu()
        self._position[lanes] = 0
        self._temperature[lanes] = 0.0
        responses, count = [], len(self._prompts)
        for lane, text, features in zip(found, texts, states, strict=True):
            number, length = self._numbers.pop(lane), positions[lane] + 2
            prompt, temperature = self._prompts[number % count], temperature_of(number, count)
            own = text[:length].clone(), features[: length - 1].clone(), self._target.tracked
            responses.append(Response(number, temperature, len(prompt), *own))
        return responses


def _halved(states: Tensor) -> Tensor:
    """[..., F] float16; what is beyond its range, as some channels of first tokens may be, is its largest."""
    most = torch.finfo(torch.float16).max
    return states.half().clamp(-most, most)


def rounded_up(size: int) -> int:
    """To a multiple of 64: kernels are chosen for each shape, and kept."""
    return -(-size // _GRAIN) * _GRAIN
