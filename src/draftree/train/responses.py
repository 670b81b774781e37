"""Prompts to learn from, out of files that a user names, and the target's responses to them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts import LARGEST_DATA, read_bytes, reason, text_of, user_path
from ..config import SamplingParams
from ..drafters.base import Drafter
from ..engine.engine import Engine
from ..engine.replay import Replay
from ..engine.speculation import EngineRequest, Speculation
from ..errors import PromptError, UnknownNameError
from ..models.base import FINAL_STATE, FeatureSpec, LanguageModel, Row
from ..models.huggingface.cache import FeatureRow
from ..models.huggingface.inspection import torch_dtype
from ..models.protocols import FeatureModel
from ..progress import err
from ..text.encoding import Conversation, encode, user

PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""The prompts that ship, of all kinds: what a head learns from where a user names no others."""
LONGEST_PROMPT = 512
"""Tokens; longer prompts are left out: prefill would take most of the time."""
_DAY = "2026-01-01"
"""That chat templates write: prompts are the same on the day on which a training goes on."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts.

    Attributes:
        name: without its folder.
        digest: SHA-256 of its bytes.
        licence: as the user states it, or None.
    """

    name: str
    count: int
    digest: str
    licence: str | None = None


def shuffled(files: Sequence[Sequence[str]], seed: int) -> list[str]:
    """All prompts of some files once each, in an order that the seed gives."""
    prompts = list(dict.fromkeys(prompt for file in files for prompt in file))
    random.Random(seed).shuffle(prompts)  # noqa: S311 - an order, not a secret
    return prompts


def encoded(target: LanguageModel, prompts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of the prompts that are short enough, through the target's chat template unless they are taken raw.

    It says how many are not.

    Raises:
        PromptError: none is.
    """
    longest = min(LONGEST_PROMPT, target.capabilities.max_length // 2)
    given = [prompt if raw else Conversation(user(prompt), day=_DAY) for prompt in prompts]
    texts = [encode(target.tokenizer, prompt) for prompt in given]
    if not (short := [ids for ids in texts if len(ids) <= longest]):
        raise PromptError(f"all prompts are longer than {longest} tokens: give shorter ones")
    if left_out := len(texts) - len(short):
        err.print(f"{left_out} of {len(texts)} prompts are longer than {longest} tokens and left out")
    return short


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Identifies a list of prompts by their token ids."""
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()[:16]


_KEYS = ("prompt", "text", "question", "instruction")
"""Where an object has its prompt; the first that it has counts."""
_CONTEXTS = ("context", "input")
"""Where it has what the prompt is about; added below it."""

_WAY_OUT = "give a text file with one prompt a line, .jsonl or .csv"


def read_prompts(name: str) -> tuple[list[str], str]:
    """The prompts of a text file, one a line; a .jsonl file, one object a line; or a .csv file, one object a row.

    With them comes the SHA-256 of the file's bytes, in hexadecimal digits: a pipe can be read only once.

    An object has its prompt under one of ``_KEYS``, and may have more text for it under one of ``_CONTEXTS``, itself or
    in the first of its "instances": the formats of Dolly, GSM8K, MBPP and Self-Instruct.

    Raises:
        UnknownNameError: there is no such file.
        PromptError: it cannot be read, or holds no prompts; the message says which line.
    """
    path = user_path(name)
    try:
        content = read_bytes(path, LARGEST_DATA)
        text = text_of(content)
    except FileNotFoundError:
        raise UnknownNameError(f"no prompt file {name!r}: {_WAY_OUT}") from None
    except (OSError, UnicodeError) as error:
        raise PromptError(f"cannot read {name}: {reason(error)}: {_WAY_OUT}") from None
    prompts = [_prompt(item, f"{name} line {at}") for at, item in _objects(text, path.suffix, name)]
    if not prompts:
        raise PromptError(f"{name} has no prompts: {_WAY_OUT}")
    return prompts, hashlib.sha256(content).hexdigest()


def _objects(text: str, suffix: str, name: str) -> Iterator[tuple[int, Any]]:
    """The objects of a file and their lines; a line of text is an object with a prompt."""
    if suffix == ".csv":
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            yield from ((rows.line_num, row) for row in rows)
        except csv.Error as error:
            at = rows.line_num + 1
            raise PromptError(
                f"{name} line {at} is not CSV ({error}): put texts of several lines into quotes"
            ) from None
        return
    for at, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield at, json.loads(line) if suffix == ".jsonl" else {"prompt": line.strip()}
            except (ValueError, RecursionError):
                raise PromptError(f"{name} line {at} is not JSON: write one object a line") from None


def _prompt(item: Any, where: str) -> str:
    if (text := _first(item, _KEYS)) is None:
        raise PromptError(f"{where} has no text under any of {', '.join(_KEYS)}: add one, or take the line out")
    cases = item.get("instances")
    about = _first(item, _CONTEXTS) or _first(cases[0] if isinstance(cases, list) and cases else None, _CONTEXTS)
    return text if about is None else f"{text}\n\n{about}"


def _first(item: object, keys: tuple[str, ...]) -> str | None:
    """The text under the first key that is there; None where it is no text, or empty."""
    value = next((item[key] for key in keys if key in item), None) if isinstance(item, dict) else None
    return value if isinstance(value, str) and value.strip() else None


MAX_ROWS = 1 << 16
"""Responses that may be decoded together: far beyond what pays on any device."""
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of the first response to prompt i: entry i modulo 4. Half of these are greedy, as most decoding; the rest leads off
the greedy paths."""
AGAIN = (0.7, 1.0)
"""Of further responses, in turn: another greedy one would be the same."""
_LARGEST = torch.finfo(torch.float16).max
"""Some channels of first tokens may be beyond it."""
_READ = 512
"""Most tokens of prompts that a step reads: bounds the memory of a pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One prompt with the target's response.

    Attributes:
        number: of the prompt; the further responses of P prompts go on from P, 2 P, ...
        temperature: at which it was drawn.
        prompt_length: tokens of the prompt.
        tokens: [L] int64, prompt and response.
        features: [L - 1, F] float16, the target's hidden states at all tokens but the last; F is 0 where it keeps none.
        tracked: which hidden states these are.
    """

    number: int
    temperature: float
    prompt_length: int
    tokens: Tensor
    features: Tensor
    tracked: FeatureSpec = FINAL_STATE

    @property
    def gained(self) -> int:
        """Tokens of the response."""
        return self.tokens.shape[0] - self.prompt_length


def replayed(drafter: Drafter, response: Response, seed: int, model: LanguageModel) -> Replay:
    """A response that is decoded again with a drafter.

    Args:
        seed: with which it was drawn.
        model: the target, or a head for it, which has its device and dtype; the target makes its passes all the same
            where the drafter reads hidden states that the response has not.
    """
    ids, start, can = response.tokens.tolist(), response.prompt_length, model.capabilities
    params = SamplingParams(temperature=response.temperature, seed=seed_of(response.number, seed))
    states = response.features.to(can.device, torch_dtype(can)) if response.features.shape[1] else None
    target = model if states is None and model.tracked else None
    return Replay(drafter, ids[:start], ids[start:], params, states, target, response.tracked)


def row_features(row: Row) -> Tensor | None:
    """[n, F] hidden states that the row itself keeps of its committed tokens; None: it keeps none."""
    return row.last_features() if isinstance(row, FeatureRow) and row.features else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecipe:
    """What responses are drawn; equal ones may be added to one another.

    Attributes:
        target: fingerprint of its weights.
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
    return (seed + number) % 2**63


def temperature_of(number: int, prompts: int) -> float:
    """The temperature of response ``number``, if there are ``prompts`` prompts."""
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
    temperature: float | None = None,
    states: Callable[[Row], Tensor | None] = row_features,
) -> Generator[Response]:
    """Responses to the prompts of these numbers, in the order in which they end.

    A response depends on its number and the seed alone, not on its neighbours (near-ties aside). As many are decoded
    together as the cache holds.

    Args:
        target: tracks its hidden states where they are wanted.
        prompts: token ids of all P prompts; response n is to prompt n modulo P.
        numbers: which are still to do; read one by one, as rows become free.
        rows: most responses that are decoded together.
        max_tokens: most tokens of a response.
        temperature: of all; None: ``temperature_of`` each.
        states: gives a row's hidden states.
    """
    most = target.capabilities.max_length
    limits = [min(max_tokens, most - len(prompt) - 1) for prompt in prompts]
    longest = min(max(map(len, prompts)) + max_tokens, most)
    held = bisect_left(range(1, rows + 1), True, key=lambda count: not target.holds([longest] * count))
    target.reserve(max(1, held), longest)
    engine = Engine(target, Speculation(nodes=1))
    engine.inputs.tokenizer = None  # nobody reads the texts
    stepper, waiting, running = engine.stepper, iter(numbers), dict[int, EngineRequest]()

    def fits(number: int) -> bool:
        prompt_numbers = [n % len(prompts) for n in (*running, number)]
        return not running or target.holds([len(prompts[n]) + limits[n] + 1 for n in prompt_numbers])

    coming: int | None = None
    try:
        while True:
            while len(running) < rows:
                if coming is None and (coming := next(waiting, None)) is None:
                    break
                if not fits(coming):
                    break
                number, coming = coming, None
                at = temperature_of(number, len(prompts)) if temperature is None else temperature
                limit = limits[number % len(prompts)]
                params = SamplingParams(max_tokens=limit, temperature=at, seed=seed_of(number, seed))
                running[number] = engine.request(prompts[number % len(prompts)], params)
                stepper.open_row(running[number])
            if not running:
                return
            stepper.step([*running.values()], _READ)
            for number in [n for n, request in running.items() if request.finish_reason is not None]:
                request = running.pop(number)
                hidden = None if request.row is None else states(request.row)
                features = torch.zeros(len(request.ids) - 1, 0) if hidden is None else hidden
                stepper.close(request)
                ids, drawn_at = torch.tensor(request.ids), (request.params.temperature, request.prompt_length)
                yield Response(number, *drawn_at, ids, features.half().clamp(-_LARGEST, _LARGEST).cpu(), target.tracked)
    finally:
        for request in running.values():
            stepper.close(request)
        if isinstance(target, FeatureModel) and not target.rows:
            target.free_cache()  # training on them needs the memory
