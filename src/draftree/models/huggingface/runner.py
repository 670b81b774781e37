"""One pass of a model over the new tokens of many rows, and what makes it.

The tokens of all rows are packed, one row's behind another's, so that everything but attention computes what is new and
no padding; where their keys and values go, and how attention lays them out, is the cache's ``Placement``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import ConfigError
from ..base import EAGER, FeatureSpec, M, P, T
from ..base import exclusive as one_thread
from .attention import laid_out
from .cache import GRAIN, Placement, TreeCache
from .inspection import HiddenStates


def exclusive(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """``base.exclusive`` without autograd."""
    return one_thread(torch.inference_mode()(method))


NO_FEATURES = FeatureSpec()


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass computes.

    Attributes:
        tokens, positions: [T] int64 on the device.
        wanted: of which tokens the logits are wanted: so many last ones, or [W] int64 of them.
        mask: [B, 1, width, S], added to attention scores; None: one row that was empty reads a chain, so that attention
            is plain causal.
        features: which hidden states are wanted, of all tokens.
        states: [T, H] of a draft head: what it reads of the token before each.
    """

    tokens: Tensor
    positions: Tensor
    wanted: int | Tensor
    mask: Tensor | None = None
    features: FeatureSpec = NO_FEATURES
    states: Tensor | None = None


Made = tuple[Tensor | None, Tensor]
"""What a pass makes: hidden states and logits (``Runner.forward``)."""


class Runner(Protocol):
    """Makes passes of one model."""

    def forward(self, step: Pass, cache: TreeCache) -> Made:
        """Make a pass; its keys and values go to where the cache is placed.

        Returns:
            [T, F] hidden states, None where none are wanted; [W, V] logits, of a draft head [W, H] states.
        """


class EagerRunner(Runner, Protocol):
    """Makes passes of any shape.

    Attributes:
        masks: dtype of masks: of the model, added to scores, or bool, true where a token attends.
        device: of the model.
    """

    masks: torch.dtype
    device: torch.device


class StockRunner:
    """Passes by the model's own forward (``EagerRunner``).

    Attributes:
        hidden: reads hidden states; None: no pass wants any.
    """

    def __init__(self, model: PreTrainedModel, hidden: HiddenStates | None = None) -> None:
        self._model, self.hidden, self.masks, self.device = model, hidden, model.dtype, model.device
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, step: Pass, cache: TreeCache) -> Made:
        """One pass (``Runner.forward``)."""
        last = step.wanted if isinstance(step.wanted, int) else None
        options = {"logits_to_keep": step.wanted if last is None else last or 1} if self._selects else {}
        with laid_out(cache.placement):
            out = self._model(
                input_ids=step.tokens[None],
                attention_mask=step.mask,
                position_ids=step.positions[None],
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        logits: Tensor = out.logits[0]
        if last is not None:
            logits = logits[len(logits) - last :]
        elif not self._selects:
            logits = logits[step.wanted]
        return self.hidden.read(step.features) if self.hidden and step.features else None, logits


Capture = Callable[[Callable[[], Made]], Callable[[], Made]]
"""Takes what makes a pass, and gives what makes it again: the same kernels on the same addresses."""


class GraphRunner:
    """Passes of a model, or of a draft head, in few shapes, from inputs that stay where they are: on a GPU CUDA graphs.

    Tokens are filled up to a power of two, beyond 64 to a multiple of it, and slots to 64 times a power of two. Tokens
    that fill up write to the slot behind all others, to which nothing attends. So a pass of a shape that has been is
    the same kernels on the same inputs, whatever the tree. The second pass of a shape is captured, and those after it
    are one launch each. Where nothing can be captured, passes are the same without it.

    Attributes:
        shapes: of the passes so far, (tokens, rows, width, slots, logits).
        uncaptured: why passes are not captured; "": they are.

    Args:
        eager: makes the passes.
        capture: makes graphs; by default CUDA's, on a device that has them.
    """

    def __init__(self, eager: EagerRunner, capture: Capture | None = None) -> None:
        self._eager = eager
        self._inputs: dict[tuple[int, ...], _StaticInputs] = {}
        self._graphs: WeakKeyDictionary[TreeCache, _Graphs] = WeakKeyDictionary()
        self._capture, self.uncaptured = capture, ""
        if capture is None and eager.device.type == "cuda":
            self._capture = partial(cuda_graph, torch.cuda.graph_pool_handle())
        elif capture is None:
            self.uncaptured = f"device {eager.device.type} has no CUDA graphs"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return list(self._inputs)

    def forward(self, step: Pass, cache: TreeCache) -> Made:
        """One pass (``Runner.forward``)."""
        at, total = cache.placement, len(step.tokens)
        logits = step.wanted if isinstance(step.wanted, int) else len(step.wanted)
        tokens, slots = _filled(total), GRAIN
        while slots < at.end:
            slots *= 2
        width = tokens if at.count == 1 else _filled(at.width)
        shape = tokens, at.count, width, slots, _filled(logits)
        if shape not in self._inputs:
            self._inputs[shape] = _StaticInputs(*shape, step, self._eager.masks)
        cache.reserve(at.first + at.count, slots + 1)
        filled = self._inputs[shape].filled(step, at)
        key = *shape, at.first, *step.features.layers
        states, found = self._replayed(key, lambda: self._eager.forward(filled, cache), cache)
        return None if states is None else states[:total], found[:logits]

    def _replayed(self, key: tuple[int, ...], make: Callable[[], Made], cache: TreeCache) -> Made:
        """A pass of a shape, from a row on, with some hidden states, by its graph where there is one."""
        at = cache.placement
        graphs = self._graphs.get(cache)
        if graphs is None or graphs.size != (at.rows, at.slots):  # the storage that they write to is gone
            graphs = self._graphs[cache] = _Graphs((at.rows, at.slots))
        if self._capture is None or self.uncaptured or graphs.first_time(key):
            return make()
        replay = graphs.by_key.get(key)
        if replay is None:
            try:
                replay = self._capture(make)
            except RuntimeError as error:
                self.uncaptured = f"a pass of shape {key[:5]} cannot be captured: {error}"
                graphs.by_key.clear()
                return make()
            graphs.keep(key, replay)
        states, logits = replay()
        return None if states is None else states.clone(), logits.clone()  # the next replay writes over them


_KEPT = 64
"""Most graphs of a cache: each holds its logits, 12 MiB of them for 64 tokens and a vocabulary of 49,152."""


@dataclass(slots=True)
class _Graphs:
    """Of one cache, while its storage is of one size: shape, first row, hidden states -> what makes the pass again."""

    size: tuple[int, int]
    by_key: dict[tuple[int, ...], Callable[[], Made]] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def first_time(self, key: tuple[int, ...]) -> bool:
        """It has not been asked for: a pass that comes but once would cost more with a capture, which takes two."""
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def keep(self, key: tuple[int, ...], replay: Callable[[], Made]) -> None:
        """Keep a graph, and forget the oldest one where there are too many."""
        if len(self.by_key) >= _KEPT:
            del self.by_key[next(iter(self.by_key))]
        self.by_key[key] = replay


def cuda_graph(pool: Any, make: Callable[[], Made]) -> Callable[[], Made]:
    """A pass as a CUDA graph (``Capture``); what it returns lies where the next replay writes.

    Args:
        pool: of the memory that all graphs of a model share.

    Raises:
        RuntimeError: the pass does something that no graph can hold, such as a transfer to the host.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = make()

    def replay() -> Made:
        graph.replay()
        return made

    return replay


def _filled(count: int) -> int:
    """Tokens of a static pass over ``count``."""
    return -(-count // 64) * 64 if count > 64 else 1 << max(0, count - 1).bit_length()


class _StaticInputs:
    """The inputs of passes of one shape (``GraphRunner.shapes``)."""

    def __init__(
        self, tokens: int, count: int, width: int, slots: int, logits: int, like: Pass, masks: torch.dtype
    ) -> None:
        device = like.tokens.device
        self._hidden: float = False if masks == torch.bool else torch.finfo(masks).min
        self._seen: float = True if masks == torch.bool else 0.0
        self._tokens, self._positions = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        self._index = torch.zeros((3, tokens), dtype=torch.int64, device=device)
        self._sources = torch.zeros((count, width), dtype=torch.int64, device=device)
        self._wanted = torch.zeros(logits, dtype=torch.int64, device=device)
        self._mask = torch.zeros((count, 1, width, slots), dtype=masks, device=device)
        self._states = None if like.states is None else like.states.new_zeros(tokens, like.states.shape[1])
        self._slots, self._every = slots, torch.arange(tokens, device=device)

    def filled(self, step: Pass, at: Placement) -> Pass:
        """The inputs of a pass, and its placement made to fit them."""
        total, every = len(step.tokens), self._every[: len(step.tokens)]
        self._tokens[:total], self._positions[:total] = step.tokens, step.positions
        self._index.zero_()[1] = self._slots
        if at.index is None:
            self._index[0, :total], self._index[2, :total] = every // at.width, every % at.width
            self._index[1, :total] = self._index[2, :total] + at.start
        else:
            self._index[:, :total] = at.index
        self._sources[self._index[0, :total], self._index[2, :total]] = every
        self._mask.fill_(self._hidden)[..., 0] = self._seen
        if step.mask is not None:
            self._mask[:, :, : step.mask.shape[2], : at.end] = step.mask
        else:
            causal = every[:, None] < every
            self._mask[0, 0, :total, :total].fill_(self._seen).masked_fill_(causal, self._hidden)
        if self._states is not None and step.states is not None:
            self._states[:total] = step.states
        wanted = every[total - step.wanted :] if isinstance(step.wanted, int) else step.wanted
        self._wanted[: len(wanted)] = wanted
        at.width, at.end, at.index = self._sources.shape[1], self._slots, self._index
        at.sources = None if at.count == 1 else self._sources.view(-1)
        static = {"tokens": self._tokens, "positions": self._positions, "wanted": self._wanted}
        return replace(step, **static, mask=self._mask, states=self._states)


RUNNERS = (EAGER, "graph")
"""What makes passes."""


def runner_of(name: str, eager: EagerRunner) -> Runner:
    """Makes passes as a name of ``RUNNERS`` has it, by ``eager``.

    Raises:
        ConfigError: there is no such runner.
    """
    check_runner(name)
    return eager if name == EAGER else GraphRunner(eager)


def check_runner(name: str) -> None:
    """Raise ConfigError unless there is such a runner."""
    if name not in RUNNERS:
        raise ConfigError(f"runner is {name!r}: choose from {', '.join(RUNNERS)}")
