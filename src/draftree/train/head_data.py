"""What a draft head is trained on: responses in a folder, drawn prompt by prompt, and which are kept apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import repeat
from pathlib import Path

import torch

from ..errors import RunError
from ..models.base import FINAL_STATE, FeatureSpec
from ..models.protocols import FeatureModel
from .responses import DataRecipe, Response, respond
from .shards import Shards

SHARD_TOKENS, SHARD_SECONDS = 1 << 15, 60.0
"""A shard is written after so many tokens, or so much time: a kill loses no more."""
_BATCHES = 8
"""So many batches' prompts are put in order of length: a batch's attention is as long as its longest row."""
_COUNTS = ("numbers", "lengths", "prompt_lengths")


def by_length(lengths: Sequence[int], count: int) -> list[int]:
    """Numbers of all prompts, ``count`` of them at a time, from short to long and from long to short in turn."""
    order: list[int] = []
    for start in range(0, len(lengths), count):
        part = range(start, min(start + count, len(lengths)))
        order += sorted(part, key=lengths.__getitem__, reverse=start // count % 2 == 1)
    return order


class HeadData:
    """Responses in a folder: shards of some thousand tokens.

    Args:
        recipe: how they are drawn.
        prompts: token ids, in order.
        tracked: the hidden states that they come with.

    Attributes:
        numbers: of the responses that are there.
        tokens: of these responses, prompts left out.
        seconds: spent drawing them so far, over all runs.

    Raises:
        ConfigError: the folder is of another recipe, or comes with other hidden states.
        ModelFileError: a shard cannot be read.
    """

    def __init__(
        self, folder: Path, recipe: DataRecipe, prompts: list[list[int]], tracked: FeatureSpec = FINAL_STATE
    ) -> None:
        self.folder, self.recipe, self.prompts, self.tracked = folder, recipe, prompts, tracked
        self.numbers, self.tokens, self.seconds = set[int](), 0, 0.0
        self._waiting: list[Response] = []
        self._shards = Shards(folder, "responses", {**asdict(recipe), "layers": [*tracked.layers]})
        self._shards.check("choose another --out")
        for file in self._shards.files.values():
            numbers, lengths, prompt_lengths, seconds = self._shards.read(file, *_COUNTS, "seconds")
            self.numbers.update(numbers.tolist())
            self.tokens += int((lengths - prompt_lengths).sum())
            self.seconds += float(seconds)

    def collect(
        self,
        target: FeatureModel,
        *,
        tokens: int,
        seconds: float,
        rows: int,
        progress: Callable[[int], None],
        answers: int = 1,
        held_out: int = 0,
    ) -> None:
        """Draw responses until there are so many tokens, or so much time is spent, or all prompts are done.

        Interrupted, it keeps what is finished.

        Args:
            rows: responses that are drawn together.
            progress: called with how many tokens there are.
            answers: to a prompt, the second ones after the first ones to all.
            held_out: prompts at the front that are answered once.

        Raises:
            RunError: a device has too little memory for the rows, or the disk is full.
        """
        began = time.monotonic() - self.seconds
        order = by_length([*map(len, self.prompts)], _BATCHES * rows)

        def wanted() -> Iterator[int]:
            for again in range(answers):
                for prompt in order:
                    if self.tokens >= tokens or time.monotonic() - began >= seconds:
                        return
                    number = again * len(self.prompts) + prompt
                    if number not in self.numbers and not (again and prompt < held_out):
                        yield number

        recipe = self.recipe
        drawn = respond(
            target,
            self.prompts,
            wanted(),
            rows=rows,
            max_tokens=recipe.max_tokens,
            seed=recipe.seed,
            states=target.hidden_states,
        )
        try:
            with closing(drawn):
                for response in drawn:
                    self._waiting.append(response)
                    self.numbers.add(response.number)
                    self.tokens += response.gained
                    progress(self.tokens)
                    waiting, spent = sum(r.tokens.shape[0] for r in self._waiting), time.monotonic() - began
                    if waiting >= SHARD_TOKENS or spent - self.seconds >= SHARD_SECONDS:
                        self._save(spent)
        except torch.OutOfMemoryError:
            raise RunError(f"{rows} rows do not fit the memory: the same command goes on with fewer --rows") from None
        finally:
            self._save(time.monotonic() - began)

    def _save(self, seconds: float) -> None:
        """Write the responses that are not on disk yet; drawing them has taken the time since the last shard."""
        if not self._waiting:
            return
        responses = self._waiting
        columns = {
            "numbers": torch.tensor([r.number for r in responses]),
            "lengths": torch.tensor([r.tokens.shape[0] for r in responses]),
            "prompt_lengths": torch.tensor([r.prompt_length for r in responses]),
            "temperatures": torch.tensor([r.temperature for r in responses], dtype=torch.float64),
            "tokens": torch.cat([r.tokens for r in responses]).int(),
            "features": torch.cat([r.features for r in responses]),
            "seconds": torch.tensor(seconds - self.seconds),
        }
        self._shards.write(1 + max(self._shards.files, default=-1), columns)
        self.seconds = seconds
        responses.clear()

    def responses(self) -> list[Response]:
        """All responses on disk in the order of their numbers; features are read from disk when they are used."""
        read: list[Response] = []
        for file in self._shards.files.values():
            *counts, tokens, features = self._shards.read(file, *_COUNTS, "temperatures", "tokens", "features")
            numbers, lengths, prompt_lengths, temperatures = (column.tolist() for column in counts)
            texts, states = tokens.long().split(lengths), features.split([length - 1 for length in lengths])
            read += map(Response, numbers, temperatures, prompt_lengths, texts, states, repeat(self.tracked))
        return sorted(read, key=lambda r: r.number)

    def split(self, held_out: int) -> tuple[list[Response], list[Response]]:
        """Responses to train on, and those to the first ``held_out`` prompts, which are kept apart."""
        responses, prompts = self.responses(), len(self.prompts)
        return [r for r in responses if r.number % prompts >= held_out], [r for r in responses if r.number < held_out]
