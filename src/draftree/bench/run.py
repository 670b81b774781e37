"""A run: contestants over a suite, resumable."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ..config import SamplingParams
from ..errors import PromptError
from ..models.base import Nodes
from ..models.huggingface import HFModel
from ..text import Prompt, encode
from .contestants import PLAIN, Contestant, Entry, Models
from .energy import find_meter
from .quality.scores import Score
from .results import Record, RunFolder, Turn
from .suites import Item


class Interrupts:
    """Counts Ctrl-C while it is entered; outside the main thread, which alone is told of it, it does nothing.

    Attributes:
        asked: it was pressed once.

    Args:
        tell: called at the first.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.asked = False
        self._tell = tell
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell()


_RESET_PEAK = "5"
"""What /proc/self/clear_refs takes to let the peak of resident memory start anew (proc(5), Linux 4.0)."""


class Peak:
    """Measures from ``start`` to ``read``, on the device of a model.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """From now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # elsewhere the peak is that of the whole life of the process
                Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def read(self) -> int | None:
        """Most bytes since ``start``: allocated on the accelerator, or resident of the process; None: nobody knows."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
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


WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run decodes.

    Attributes:
        items: prompts.
        entries: contestants.
        max_tokens: most tokens of an answer.
        repeats: how often each contestant answers each prompt.
        seed: of the first repeat; each repeat has its own, the same for all contestants.
    """

    items: Sequence[Item]
    entries: Sequence[Entry]
    max_tokens: int
    repeats: int = 1
    seed: int = 11

    def rounds(self) -> Iterator[tuple[int, Item, list[Entry]]]:
        """(repeat, prompt, contestants in their order)."""
        at = 0
        for repeat in range(self.repeats):
            for item in self.items:
                start = at % len(self.entries)
                yield repeat, item, [*self.entries[start:], *self.entries[:start]]
                at += 1

    def missing(self, done: set[tuple[str, int, str]]) -> list[tuple[int, Item, Entry]]:
        """What is left to decode, in order."""
        return [
            (repeat, item, entry)
            for repeat, item, order in self.rounds()
            for entry in order
            if (item.id, repeat, entry.label) not in done
        ]


class Run:
    """Decodes what a folder lacks of a plan.

    Attributes:
        decoding: seconds that contestants took.
        scoring: seconds that scores took.
        other: seconds that the rest took: prompts, records, files.

    Args:
        plan: what to decode.
        models: loads contestants.
        folder: open for writing.
        score: what answers are worth; None: they are not scored.
    """

    def __init__(self, plan: Plan, models: Models, folder: RunFolder, score: Score | None = None) -> None:
        self._plan, self._models, self._folder, self._score = plan, models, folder, score
        self._contestants: dict[str, Contestant] = {}
        self._peak = Peak(models.target.capabilities.device)
        self._meter = find_meter(models.target.capabilities.device)
        self.decoding = self.scoring = self.other = 0.0

    def decode(self, wait: Callable[[], bool], tell: Callable[[int], None]) -> bool:
        """Decode all that is missing.

        Args:
            wait: asked before each decoding; true ends the run there.
            tell: called after each with how many are done in all.

        Returns:
            whether all is done.

        Raises:
            RunError: a line cannot be written.
            PromptError: a prompt does not fit the model.
        """
        missing = self._plan.missing({r.key for r in self._folder.records})
        for entry in {entry.label: entry for _, _, entry in missing}.values():
            if wait():
                return False
            self._contestants[entry.label] = self._models.contestant(entry)
            self._warm(entry)
        for repeat, item, entry in missing:
            if wait():
                return False
            began, before = time.perf_counter(), self.decoding + self.scoring
            self._folder.append(self._answer(item, entry, repeat))
            self.other += time.perf_counter() - began - (self.decoding + self.scoring - before)
            tell(len(self._folder.records))
        return True

    def _params(self, entry: Entry, repeat: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._plan.max_tokens, temperature=entry.temperature, seed=self._plan.seed + repeat
        )

    def _warm(self, entry: Entry) -> None:
        """A few tokens that do not count: memory is allocated, kernels are chosen, costs are measured."""
        prompt = encode_turns(self._models.target, ["Hello"])
        params = replace(self._params(entry, 0), max_tokens=min(WARM_TOKENS, self._plan.max_tokens))
        self._contestants[entry.label].decode(prompt, params)

    def _answer(self, item: Item, entry: Entry, repeat: int) -> Record:
        target, turns = self._models.target, list[Turn]()
        self._peak.start()
        self._meter.start()
        for number in range(len(item.turns)):
            said = [x for i in range(number) for x in (item.turns[i], turns[i].text)]
            prompt = encode_turns(target, [*said, item.turns[number]])
            room = target.capabilities.max_length - len(prompt)
            if room < 1 and turns:
                break  # the conversation has outgrown the model
            params = self._params(entry, repeat)
            if room < self._plan.max_tokens:
                params = replace(params, max_tokens=max(1, room))
            turns.append(self._contestants[entry.label].decode(prompt, params))
            self.decoding += turns[-1].seconds.total
        joules, peak, score = self._meter.read(), self._peak.read(), None
        if self._score is not None:
            began = time.perf_counter()
            score = self._score(item, [t.text for t in turns])
            if entry.method == PLAIN:
                turns = [self._with_entropy(item, turns, i) for i in range(len(turns))]
            self.scoring += time.perf_counter() - began
        return Record(
            prompt=item.id,
            category=item.category,
            method=entry.label,
            drafter=entry.drafter,
            temperature=entry.temperature,
            repeat=repeat,
            seed=self._plan.seed + repeat,
            turns=turns,
            peak_memory=peak,
            joules=joules,
            score=score,
        )

    def _with_entropy(self, item: Item, turns: Sequence[Turn], number: int) -> Turn:
        """A turn with the mean entropy of the target's laws that its tokens were drawn from; not timed."""
        said = [x for i in range(number) for x in (item.turns[i], turns[i].text)]
        prompt = encode_turns(self._models.target, [*said, item.turns[number]])
        return replace(turns[number], entropy=answer_entropy(self._models.target, prompt, turns[number].ids))


def encode_turns(target: HFModel, texts: Sequence[str]) -> list[int]:
    """Token ids of a conversation that the user began: through the chat template, or as plain text without one."""
    tokenizer = target.tokenizer
    prompt: Prompt = "\n\n".join(texts)
    if tokenizer is not None and tokenizer.chat_template:
        prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return encode(tokenizer, prompt)


def check_lengths(target: HFModel, items: Sequence[Item], skip_bad: bool) -> list[Item]:
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


@torch.inference_mode()
def answer_entropy(target: HFModel, prompt: list[int], answer: list[int]) -> float:
    """Mean entropy (nats, at temperature 1) of the target's law at each token of an answer, by one pass over it."""
    target.reserve(1, len(prompt) + len(answer))
    row = target.open(prompt)
    laws = row.logits[None]
    if len(answer) > 1:
        laws = torch.cat([laws, target.extend([row], [Nodes.chain(answer[:-1])])[0]])
    target.close(row)
    logs = laws.float().log_softmax(-1)
    return float(-(logs.exp() * logs).sum(-1).mean())
