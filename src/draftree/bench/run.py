"""A run: contestants over a suite, resumable."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from ..config import SamplingParams
from ..errors import PromptError
from ..models.base import LanguageModel
from ..models.protocols import tokenizer_of
from ..text.encoding import Prompt, encode
from .contestants import Contestant, Entry, Models
from .results import AnswerRecord, RunFolder, Turn
from .suites import Item

_RESET_PEAK = "5"
"""What /proc/self/clear_refs takes to let the peak of resident memory start anew (proc(5), Linux 4.0)."""


def reset_peak(device: str) -> None:
    """Let ``peak_memory`` start anew; outside Linux and CUDA the peak is that of the whole life of the process."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def peak_memory(device: str) -> int | None:
    """Most bytes since ``reset_peak``: allocated on the accelerator, or resident of the process; None: not known."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run decodes: an answer of each contestant to each prompt in each repeat.

    Attributes:
        max_tokens: most tokens of an answer.
        seed: of the first repeat; each repeat has its own, the same for all contestants.
    """

    items: Sequence[Item]
    entries: Sequence[Entry]
    max_tokens: int
    repeats: int = 1
    seed: int = 11

    @property
    def answers(self) -> int:
        return self.repeats * len(self.items) * len(self.entries)

    def missing(self, done: Collection[tuple[str, int, str]]) -> list[tuple[int, Item, Entry]]:
        """Repeat, prompt and contestant of the answers that are left, in order; each contestant is first in turn."""
        left = []
        for at, (repeat, item) in enumerate(product(range(self.repeats), self.items)):
            first = at % len(self.entries)
            for entry in (*self.entries[first:], *self.entries[:first]):
                if (item.id, repeat, entry.label) not in done:
                    left.append((repeat, item, entry))
        return left


class Run:
    """Decodes what a folder lacks of a plan."""

    def __init__(self, plan: RunPlan, models: Models, folder: RunFolder) -> None:
        self._plan, self._models, self._folder = plan, models, folder
        self._contestants: dict[str, Contestant] = {}

    def decode(self, notify: Callable[[int], None]) -> float:
        """Decode all that is missing.

        Args:
            notify: called after each answer with how many are done in all.

        Returns:
            seconds of all else (prompts, records, files) over seconds of decoding.

        Raises:
            RunError: a line cannot be written.
            PromptError: a prompt does not fit the model.
        """
        missing = self._plan.missing({r.key for r in self._folder.records})
        for entry in {entry.label: entry for _, _, entry in missing}.values():
            self._contestants[entry.label] = self._models.contestant(entry)
            self._warm(entry)
        elapsed = decoding = 0.0
        for repeat, item, entry in missing:
            began = time.perf_counter()
            record = self._answer(item, entry, repeat)
            self._folder.append(record)
            elapsed += time.perf_counter() - began
            decoding += record.seconds
            notify(len(self._folder.records))
        return elapsed / decoding - 1

    def _params(self, entry: Entry, repeat: int, most: int) -> SamplingParams:
        max_tokens = max(1, min(most, self._plan.max_tokens))
        return SamplingParams(max_tokens=max_tokens, temperature=entry.temperature, seed=self._plan.seed + repeat)

    def _warm(self, entry: Entry) -> None:
        """A few tokens that do not count: memory is allocated, kernels are chosen, costs are measured."""
        prompt = encode_turns(self._models.target, ["Hello"])
        self._contestants[entry.label].decode(prompt, self._params(entry, 0, _WARM_TOKENS))

    def _answer(self, item: Item, entry: Entry, repeat: int) -> AnswerRecord:
        target, can = self._models.target, self._models.target.capabilities
        turns: list[Turn] = []
        texts: list[str] = []
        reset_peak(can.device)
        for question in item.turns:
            prompt = encode_turns(target, [*texts, question])
            left = can.max_length - len(prompt)
            if left < 1 and turns:
                break  # the conversation has outgrown the model
            turns.append(self._contestants[entry.label].decode(prompt, self._params(entry, repeat, left)))
            texts += [question, turns[-1].text]
        return AnswerRecord(
            prompt=item.id,
            category=item.category,
            method=entry.label,
            drafter=entry.drafter,
            temperature=entry.temperature,
            repeat=repeat,
            seed=self._plan.seed + repeat,
            turns=turns,
            peak_memory=peak_memory(can.device),
        )


def encode_turns(target: LanguageModel, texts: Sequence[str]) -> list[int]:
    """Token ids of a conversation that the user began: through the chat template, or as plain text without one."""
    tokenizer = tokenizer_of(target)
    prompt: Prompt = "\n\n".join(texts)
    if tokenizer is not None and tokenizer.chat_template:
        prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return encode(tokenizer, prompt)


def check_lengths(target: LanguageModel, items: Sequence[Item], skip_bad: bool) -> list[Item]:
    """The items whose first turn fits the model.

    Raises:
        PromptError: one does not, and is not to be skipped; or none does.
    """
    limit, fit = target.capabilities.max_length, list[Item]()
    for item in items:
        length = len(encode_turns(target, item.turns[:1]))
        if length < limit:
            fit.append(item)
        elif not skip_bad:
            raise PromptError(
                f"prompt {item.id} has {length} tokens but {target.capabilities.name} takes {limit}, generated ones "
                "included: leave such prompts out with --skip-bad"
            )
    if not fit:
        raise PromptError(f"no prompt of the suite fits the {limit} tokens of {target.capabilities.name}")
    return fit
