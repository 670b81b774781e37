"""Responses drawn from the target alone, many at a time; rows that end early are replaced at once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import torch

from ..config import SamplingParams
from ..engine import Engine
from ..models.huggingface import HFModel
from ..request import Request
from .lockstep import respond_in_step
from .responses import Response, seed_of, temperature_of

MAX_ROWS = 1 << 16
"""Responses that may be decoded together: far beyond what pays on any device."""


def respond(
    target: HFModel, prompts: Sequence[Sequence[int]], numbers: Iterable[int], *, rows: int, max_tokens: int, seed: int
) -> Generator[Response]:
    """Responses to the prompts of these numbers, in the order in which they end.

    On a CPU the engine decodes them, elsewhere they go on in step (``lockstep``). A response depends on its number and
    the seed alone, not on its neighbours (near-ties aside).

    Args:
        target: tracks its hidden states where they are wanted.
        prompts: token ids of all P prompts; response n is to prompt n modulo P.
        numbers: which are still to do; asked for one by one, as rows become free.
        rows: responses that are decoded together.
        max_tokens: most tokens of a response.
    """
    draw = _respond if target.capabilities.device.type == "cpu" else respond_in_step
    return draw(target, prompts, numbers, rows=rows, max_tokens=max_tokens, seed=seed)


def _respond(
    target: HFModel, prompts: Sequence[Sequence[int]], numbers: Iterable[int], *, rows: int, max_tokens: int, seed: int
) -> Generator[Response]:
    target.reserve(rows, max(map(len, prompts)) + max_tokens)
    engine = Engine(target, nodes=1)
    waiting = iter(numbers)
    running: dict[int, Request] = {}
    try:
        while True:
            while len(running) < rows and (number := next(waiting, None)) is not None:
                prompt, temperature = prompts[number % len(prompts)], temperature_of(number, len(prompts))
                limit = min(max_tokens, target.capabilities.max_length - len(prompt) - 1)
                params = SamplingParams(max_tokens=limit, temperature=temperature, seed=seed_of(number, seed))
                running[number] = engine.open(prompt, params)
            if not running:
                return
            going = [s for s in running.values() if s.finish_reason is None]
            if going:
                engine.step(sorted(going, key=lambda s: s.row.slot if s.row else -1))
            for number in [n for n, s in running.items() if s.finish_reason is not None]:
                yield _finished(engine, number, running.pop(number))
    finally:
        for request in running.values():
            engine.close(request)


def _finished(engine: Engine, number: int, request: Request) -> Response:
    assert request.row is not None  # noqa: S101 - an open request has a row
    before = len(request.ids) - 1
    tracked = request.row.waiting_features()[:before] if request.row.features else torch.zeros(before, 0)
    features = tracked.to("cpu", torch.float16)
    engine.close(request)
    return Response(number, request.params.temperature, request.prompt_length, torch.tensor(request.ids), features)
