"""What is learned from: prompts that a user gives in files, and the target's responses with hidden states."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..artifacts import user_path
from ..config import SamplingParams
from ..engine import Engine
from ..errors import ModelFileError, PromptError, RunError, UnknownNameError
from ..models.huggingface import HFModel
from ..request import Request
from ..sampling import gumbel_noise_at, stream_start

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
        numbers: which are still to do; read one by one, as rows become free.
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
            target.free_cache()  # training on them needs the memory


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


KEYS = ("prompt", "text", "question", "instruction")
"""Where a JSON object has its prompt; the first that it has counts."""
CONTEXTS = ("context", "input")
"""Where it has what the prompt is about; added below it."""

_WAY_OUT = "give a text file with one prompt a line, .jsonl or .csv"
_LONGEST_CELL = 1 << 24


def read_prompts(name: str) -> list[str]:
    """The prompts of a text file, one a line; a .jsonl file, one object a line; or a .csv file, column "prompt".

    An object has its prompt under one of ``KEYS``, and may have more text for it under one of ``CONTEXTS``, itself or
    in the first of its "instances": the formats of Dolly, GSM8K, MBPP and Self-Instruct.

    Raises:
        UnknownNameError: there is no such file.
        PromptError: it cannot be read, or holds no prompts; the message says which line.
    """
    path = user_path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnknownNameError(f"no prompt file {name!r}: {_WAY_OUT}") from None
    except UnicodeError:
        raise PromptError(f"{name} is not valid UTF-8: convert it, for example with iconv") from None
    except OSError as error:
        raise PromptError(f"cannot read {name}: {error.strerror}: {_WAY_OUT}") from None
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt(line, f"{name} line {at}") for at, line in lines]
    elif path.suffix == ".csv":
        prompts = list(_column(text, name))
    else:
        prompts = [line.strip() for _, line in lines]
    if not prompts:
        raise PromptError(f"{name} has no prompts: {_WAY_OUT}")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} is not JSON: write one object a line") from None
    found = _first(item, KEYS)
    if found is None:
        *others, last = (f'"{key}"' for key in KEYS)
        raise PromptError(f"{where} has no {', '.join(others)} or {last} with at least one character: add one")
    cases = item.get("instances")
    about = _first(item, CONTEXTS) or _first(cases[0] if isinstance(cases, list) and cases else None, CONTEXTS)
    return found if about is None else f"{found}\n\n{about}"


def _first(item: object, keys: tuple[str, ...]) -> str | None:
    """The text under the first key that is there; None where it is no text, or empty."""
    found = next((item[key] for key in keys if key in item), None) if isinstance(item, dict) else None
    return found if isinstance(found, str) and found.strip() else None


def _column(text: str, name: str) -> Iterator[str]:
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if "prompt" not in (rows.fieldnames or ()):
            raise PromptError(f'{name} line 1 has no column "prompt": name one so')
        for row in rows:
            if not (row["prompt"] or "").strip():
                raise PromptError(f"{name} line {rows.line_num} has no prompt: fill its column, or take the line out")
            yield row["prompt"]
    except csv.Error as error:
        raise PromptError(
            f"{name} line {rows.line_num + 1} is not CSV ({error}): put texts of several lines into quotes"
        ) from None
