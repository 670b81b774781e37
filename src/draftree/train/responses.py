"""The target's responses to prompts, with its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..config import SamplingParams
from ..engine.engine import Engine, Handle
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import Observer, Speculation
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel, Row
from ..models.huggingface.features import FeatureRow
from ..models.protocols import FeatureModel
from ..request import Outcome, Request

MAX_ROWS = 1 << 16
"""Responses that may be decoded together: far beyond what pays on any device."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of the first response to prompt i: entry i modulo 4. Half of these are greedy, as most decoding; the rest leads off
the greedy paths."""
AGAIN = (0.7, 1.0)
"""Of further responses, in turn: another greedy one would be the same."""
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


def row_features(row: Row) -> Tensor | None:
    """[n, F] hidden states that the row itself keeps of its committed tokens; None: it keeps none."""
    return row.last_features() if isinstance(row, FeatureRow) and row.features else None


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
    states: Callable[[Row], Tensor | None] = row_features,
) -> Generator[Response]:
    """Responses to the prompts of these numbers, in the order in which they end.

    A response depends on its number and the seed alone, not on its neighbours (near-ties aside).

    Args:
        target: tracks its hidden states where they are wanted.
        prompts: token ids of all P prompts; response n is to prompt n modulo P.
        numbers: which are still to do; read one by one, as rows become free.
        rows: responses that are decoded together.
        max_tokens: most tokens of a response.
        states: gives a row's hidden states.
    """
    target.reserve(rows, max(map(len, prompts)) + max_tokens)
    ended = _EndedFeatures(states)
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
                yield Response(number, *own, target.tracked)
    finally:
        for handle in running.values():
            handle.cancel()
        if isinstance(target, FeatureModel) and not target.rows:
            target.free_cache()  # training on them needs the memory


class _EndedFeatures(Observer):
    """Keeps the hidden states of requests that have ended, as a ``Response`` has them."""

    def __init__(self, states: Callable[[Row], Tensor | None]) -> None:
        self._states = states
        self.features: dict[Request, Tensor] = {}

    def opened(self, request: Request) -> None:
        self._keep(request)

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._keep(outcome.request)

    def _keep(self, request: Request) -> None:
        if request.finish_reason is None or request.row is None:
            return
        states = self._states(request.row)
        none = torch.zeros(len(request.ids) - 1, 0, dtype=torch.float16)
        self.features[request] = none if states is None else _halved(states).cpu()


def _halved(states: Tensor) -> Tensor:
    """[..., F] float16; what is beyond its range, as some channels of first tokens may be, is its largest."""
    most = torch.finfo(torch.float16).max
    return states.half().clamp(-most, most)


def rounded_up(size: int) -> int:
    """To a multiple of 64: kernels are chosen for each shape, and kept."""
    return -(-size // _GRAIN) * _GRAIN
