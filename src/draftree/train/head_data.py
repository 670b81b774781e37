"""What a draft head is trained on: prompts in a fixed order, responses to them on disk, and which are kept apart."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from ..artifacts import write_whole
from ..errors import ConfigError, PromptError, RunError
from ..models.huggingface import HFModel
from ..text import encode, user
from .responses import Response, ResponseStore, respond

LONGEST_PROMPT = 512
"""Longer prompts are left out: prefill would take most of the time."""
_BATCHES = 8
"""So many batches' prompts are put in order of length: a batch's attention is as long as its longest row."""


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


def shuffled(files: Sequence[Sequence[str]], seed: int) -> list[str]:
    """All prompts of some files once each, in an order that the seed gives."""
    prompts = list(dict.fromkeys(prompt for file in files for prompt in file))
    random.Random(seed).shuffle(prompts)  # noqa: S311 - an order, not a secret
    return prompts


def encoded(target: HFModel, prompts: Sequence[str], *, raw: bool) -> list[list[int]]:
    """Token ids of the prompts that are short enough, through the target's chat template unless they are taken raw.

    Raises:
        PromptError: none is.
    """
    longest = min(LONGEST_PROMPT, target.capabilities.max_length // 2)
    found = [encode(target.tokenizer, prompt if raw else user(prompt)) for prompt in prompts]
    if not (short := [ids for ids in found if len(ids) <= longest]):
        raise PromptError(f"all prompts are longer than {longest} tokens: give shorter ones")
    return short


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Tells lists of prompts apart."""
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()[:16]


def by_length(lengths: Sequence[int], some: int) -> list[int]:
    """Numbers of all prompts, ``some`` of them at a time, from short to long and from long to short in turn."""
    order: list[int] = []
    for start in range(0, len(lengths), some):
        part = range(start, min(start + some, len(lengths)))
        order += sorted(part, key=lengths.__getitem__, reverse=start // some % 2 == 1)
    return order


@dataclass(slots=True)
class HeadData:
    """Responses in a folder.

    Attributes:
        folder: holds the shards and ``recipe.json``.
        recipe: how they are drawn.
        prompts: token ids, in order.
        store: what is there.
        seconds: spent drawing them so far, over all runs.
    """

    folder: Path
    recipe: DataRecipe
    prompts: list[list[int]]
    store: ResponseStore
    seconds: float = 0.0

    @classmethod
    def open(cls, folder: Path, recipe: DataRecipe, prompts: list[list[int]]) -> HeadData:
        """What is in a folder.

        Raises:
            ConfigError: it is of another recipe.
            ModelFileError: a shard cannot be read.
        """
        seconds, path = 0.0, folder / "recipe.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same, seconds = found["recipe"] == asdict(recipe), float(found["seconds"])
        except FileNotFoundError:
            same = not folder.exists()
        except (OSError, ValueError, TypeError, KeyError):
            same = False
        if not same:
            raise ConfigError(
                f"{folder} holds responses of another target, other prompts or other settings: repeat that command to "
                "go on with them, or choose another --out"
            )
        return cls(folder, recipe, prompts, ResponseStore.open(folder), seconds)

    def bytes_needed(self, tokens: int, hidden_size: int) -> int:
        """Bytes on disk for responses of so many tokens in all, at most: tokens and hidden states, prompts included."""
        left = max(0, tokens - self.store.tokens)
        responses = left / self.recipe.max_tokens * 2  # many end early
        prompt = sum(map(len, self.prompts)) / len(self.prompts)
        return int((left + responses * prompt) * (2 * hidden_size + 4))

    def check_room(self, tokens: int, hidden_size: int) -> None:
        """Make sure that the disk can hold them.

        Raises:
            ConfigError: it cannot.
        """
        needed = self.bytes_needed(tokens, hidden_size)
        free = shutil.disk_usage(next(p for p in (self.folder, *self.folder.parents) if p.exists())).free
        if needed > free:
            raise ConfigError(
                f"responses of {tokens} tokens need {needed} bytes on disk and {self.folder.parent} has {free} free: "
                "ask for fewer --tokens, or choose another --out"
            )

    def collect(
        self,
        target: HFModel,
        *,
        tokens: int,
        seconds: float,
        rows: int,
        progress: Callable[[int], None],
        each: int = 1,
        held_out: int = 0,
    ) -> None:
        """Draw responses until there are so many tokens, or so much time is spent, or all prompts are done.

        Interrupted, it keeps what is finished.

        Args:
            rows: responses that are drawn together.
            each: responses to a prompt, the second ones after the first ones to all.
            held_out: prompts at the front that are answered once.

        Raises:
            RunError: a device has too little memory for the rows, or the disk is full.
        """
        began = time.monotonic() - self.seconds
        order = by_length([*map(len, self.prompts)], _BATCHES * rows)

        def wanted() -> Iterator[int]:
            for again, prompt in product(range(each), order):
                if self.store.tokens >= tokens or time.monotonic() - began >= seconds:
                    return
                number = again * len(self.prompts) + prompt
                if number not in self.store.numbers and not (again and prompt < held_out):
                    yield number

        limits = {"rows": rows, "max_tokens": self.recipe.max_tokens, "seed": self.recipe.seed}
        try:
            with closing(respond(target, self.prompts, wanted(), **limits)) as drawn:
                for response in drawn:
                    shards = len(self.store.paths)
                    self.store.add(response)
                    progress(self.store.tokens)
                    if len(self.store.paths) > shards:
                        self._note(time.monotonic() - began)
        except torch.OutOfMemoryError:
            raise RunError(f"{rows} rows do not fit the memory: the same command goes on with fewer --rows") from None
        finally:
            self.store.flush()
            self._note(time.monotonic() - began)

    def _note(self, seconds: float) -> None:
        self.seconds = seconds
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"recipe": asdict(self.recipe), "seconds": round(seconds, 1)}
        write_whole(self.folder / "recipe.json", json.dumps(content, indent=1) + "\n")

    def split(self, held_out: int) -> tuple[list[Response], list[Response]]:
        """Responses to train on, and those to the first ``held_out`` prompts, which are kept apart."""
        found, prompts = self.store.responses(), len(self.prompts)
        return [r for r in found if r.number % prompts >= held_out], [r for r in found if r.number < held_out]
