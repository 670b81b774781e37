"""A run: contestants over a suite, resumable; and the joules that the machine takes meanwhile, where it has a meter.

NVML (through ``nvidia-ml-py``, extra "energy") counts for whole accelerators, RAPL for whole processor packages: what
else runs there is counted in. RAPL's counters are read where the system lets this user read them.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch

from ..config import SamplingParams
from ..errors import PromptError
from ..models.huggingface import HFModel
from ..text import Prompt, encode
from .contestants import Contestant, Entry, Models
from .results import AnswerRecord, RunFolder, Turn
from .suites import Item


class Interrupts:
    """Counts Ctrl-C while it is entered; does nothing outside the main thread, which alone receives signals.

    Attributes:
        pressed: once.

    Args:
        notify: called at the first.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.pressed = False
        self._notify = notify
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._notify()


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


class Meter(Protocol):
    """A counter of energy."""

    def start(self) -> None:
        """Count from now on."""

    def read(self) -> float:
        """Joules since ``start``."""


WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunPlan:
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
        other: seconds that the rest took: prompts, records, files.

    Args:
        plan: what to decode.
        models: loads contestants.
        folder: open for writing.
        meter: of energy; None: there is none.
    """

    def __init__(self, plan: RunPlan, models: Models, folder: RunFolder, meter: Meter | None = None) -> None:
        self._plan, self._models, self._folder, self._meter = plan, models, folder, meter
        self._contestants: dict[str, Contestant] = {}
        self._peak = Peak(models.target.capabilities.device)
        self.decoding = self.other = 0.0

    def decode(self, stop: Callable[[], bool], notify: Callable[[int], None]) -> bool:
        """Decode all that is missing.

        Args:
            stop: called before each answer; true ends the run there.
            notify: called after each with how many are done in all.

        Returns:
            whether all is done.

        Raises:
            RunError: a line cannot be written.
            PromptError: a prompt does not fit the model.
        """
        missing = self._plan.missing({r.key for r in self._folder.records})
        for entry in {entry.label: entry for _, _, entry in missing}.values():
            if stop():
                return False
            self._contestants[entry.label] = self._models.contestant(entry)
            self._warm(entry)
        for repeat, item, entry in missing:
            if stop():
                return False
            began, before = time.perf_counter(), self.decoding
            self._folder.append(self._answer(item, entry, repeat))
            self.other += time.perf_counter() - began - (self.decoding - before)
            notify(len(self._folder.records))
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

    def _answer(self, item: Item, entry: Entry, repeat: int) -> AnswerRecord:
        target, turns = self._models.target, list[Turn]()
        self._peak.start()
        if self._meter is not None:
            self._meter.start()
        for number in range(len(item.turns)):
            earlier = [x for i in range(number) for x in (item.turns[i], turns[i].text)]
            prompt = encode_turns(target, [*earlier, item.turns[number]])
            left = target.capabilities.max_length - len(prompt)
            if left < 1 and turns:
                break  # the conversation has outgrown the model
            params = self._params(entry, repeat)
            if left < self._plan.max_tokens:
                params = replace(params, max_tokens=max(1, left))
            turns.append(self._contestants[entry.label].decode(prompt, params))
            self.decoding += turns[-1].seconds.total
        return AnswerRecord(
            prompt=item.id,
            category=item.category,
            method=entry.label,
            drafter=entry.drafter,
            temperature=entry.temperature,
            repeat=repeat,
            seed=self._plan.seed + repeat,
            turns=turns,
            peak_memory=self._peak.read(),
            joules=None if self._meter is None else self._meter.read(),
        )


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


_RAPL = Path("/sys/class/powercap")


class NvmlMeter:
    """One accelerator's own counter (NVIDIA, from Volta on).

    Args:
        nvml: the module ``pynvml``.
        uuid: of the device; its number among those that this process may see is not NVML's.

    Raises:
        the module's ``NVMLError``: the device has none.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._before = self._count()

    def _count(self) -> int:
        """Millijoules since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))

    def start(self) -> None:
        self._before = self._count()

    def read(self) -> float:
        return (self._count() - self._before) / 1e3


class RaplMeter:
    """The processor packages' counters, in microjoules, which begin again at their ranges' ends.

    Args:
        zones: their folders, with ``energy_uj`` and ``max_energy_range_uj``.

    Raises:
        OSError: one cannot be read.
    """

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._before = self._counts()

    def _counts(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]

    def start(self) -> None:
        self._before = self._counts()

    def read(self) -> float:
        pairs = zip(self._counts(), self._before, self._ranges, strict=True)
        return sum((now - before) % most for now, before, most in pairs) / 1e6


def find_meter(device: torch.device, folder: Path = _RAPL) -> Meter | None:
    """The meter of what a model on this device takes; None: the machine has none that this user may read.

    Args:
        device: where the target computes.
        folder: of the system's RAPL zones.
    """
    if device.type == "cuda":
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
        with contextlib.suppress(nvml.NVMLError):
            return NvmlMeter(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return None
    packages = sorted(p for p in folder.glob("intel-rapl:*") if p.name.count(":") == 1)
    if packages:
        with contextlib.suppress(OSError, ValueError):
            return RaplMeter(packages)
    return None
