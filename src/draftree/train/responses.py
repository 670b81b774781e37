"""Responses of the target, with hidden states, to learn from."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..config import SamplingParams
from ..engine import Engine
from ..errors import ModelFileError, RunError
from ..models.huggingface import HFModel
from ..request import Request
from .lockstep import respond_in_step

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


TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of the first response to prompt i: entry i modulo 4. Half of these are greedy, as most decoding; the rest leads off
the greedy paths."""
AGAIN = (0.7, 1.0)
"""Of further responses, in turn: another greedy one would be the same."""

SHARD_TOKENS = 1 << 15
_COLUMNS = ("numbers", "lengths", "prompt_lengths", "temperatures")


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One prompt with the target's response.

    Attributes:
        number: of the prompt; the further responses of P prompts go on from P, 2 P, ...
        temperature: at which it was drawn.
        prompt_length: tokens of the prompt.
        tokens: [L] int64, prompt and response.
        features: [L - 1, H] float16, the target's hidden states after its final norm at all tokens but the last; H is 0
            where the target does not track them.
    """

    number: int
    temperature: float
    prompt_length: int
    tokens: Tensor
    features: Tensor

    @property
    def gained(self) -> int:
        """Tokens of the response."""
        return self.tokens.shape[0] - self.prompt_length


def seed_of(number: int, seed: int) -> int:
    """Of response ``number``."""
    return (seed + number) % 2**63


def temperature_of(number: int, prompts: int) -> float:
    """Of response ``number`` to so many prompts."""
    again, prompt = divmod(number, prompts)
    return AGAIN[(prompt + again) % len(AGAIN)] if again else TEMPERATURES[prompt % len(TEMPERATURES)]


@dataclass(slots=True)
class ResponseStore:
    """Shards of responses in a folder.

    Attributes:
        folder: where they are; made when the first one is written.
        paths: of the shards.
        numbers: of the responses that are there.
        tokens: response tokens that are there.
    """

    folder: Path
    paths: list[Path] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    tokens: int = 0
    _waiting: list[Response] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> ResponseStore:
        """What is in a folder; nothing where there is none.

        Raises:
            ModelFileError: a shard cannot be read.
        """
        store = cls(folder)
        for path in sorted(folder.glob("responses-*.safetensors")):
            numbers, lengths, prompts, _ = _read_columns(path)
            store.paths.append(path)
            store.numbers.update(numbers.tolist())
            store.tokens += int((lengths - prompts).sum())
        return store

    def add(self, response: Response) -> None:
        """Keep a response; it is on disk once its shard is full, or after ``flush``."""
        self._waiting.append(response)
        self.numbers.add(response.number)
        self.tokens += response.gained
        if sum(r.tokens.shape[0] for r in self._waiting) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        if not self._waiting:
            return
        kept, self._waiting = self._waiting, []
        columns = {
            "numbers": torch.tensor([r.number for r in kept]),
            "lengths": torch.tensor([r.tokens.shape[0] for r in kept]),
            "prompt_lengths": torch.tensor([r.prompt_length for r in kept]),
            "temperatures": torch.tensor([r.temperature for r in kept], dtype=torch.float64),
            "tokens": torch.cat([r.tokens for r in kept]).int(),
            "features": torch.cat([r.features for r in kept]),
        }
        path = self.folder / f"responses-{len(self.paths):05d}.safetensors"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(save(columns))
            part.replace(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise RunError(f"cannot write {path}: {error}: free some disk space; the same command goes on") from None
        self.paths.append(path)

    def responses(self) -> list[Response]:
        """All responses on disk in the order of their numbers; features are read from disk when they are used."""
        found: list[Response] = []
        for path in self.paths:
            columns = [column.tolist() for column in _read_columns(path)]
            with safe_open(path, framework="pt") as file:
                tokens, features = file.get_tensor("tokens").long(), file.get_tensor("features")
            at, row = 0, 0
            for number, length, prompt, temperature in zip(*columns, strict=True):
                own = features[row : row + length - 1]
                found.append(Response(number, temperature, prompt, tokens[at : at + length], own))
                at, row = at + length, row + length - 1
        return sorted(found, key=lambda r: r.number)


def _read_columns(path: Path) -> list[Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name) for name in _COLUMNS]
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot read {path}: {error}: remove it; its responses will be drawn again") from None
