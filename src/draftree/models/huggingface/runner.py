"""One pass of a model over the new tokens of many rows, and what makes it.

The tokens of all rows are packed, one row's behind another's, so that everything but attention computes what is new and
no padding; where their keys and values go, and how attention lays them out, is the cache's ``Placement``.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import ConfigError, DraftreeWarning
from ..base import EAGER, FeatureSpec, M, P, T
from ..base import exclusive as one_thread
from .attention import laid_out
from .cache import TreeCache
from .inspection import HiddenStates
from .long_rope import one_set
from .masks import Windows, additive
from .pass_inputs import DeviceInputs, PassInputs, Shape, on_device, rounded, staged


def exclusive(method: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """``base.exclusive`` without autograd."""
    return one_thread(torch.inference_mode()(method))


NO_FEATURES = FeatureSpec()


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass computes.

    Attributes:
        inputs: its new tokens.
        features: which hidden states are wanted, of all tokens.
        states: [P, H] of a draft head: line ``BEFORE`` of the inputs' table has which of them each token reads.
    """

    inputs: PassInputs
    features: FeatureSpec = NO_FEATURES
    states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DevicePass:
    """A pass whose inputs are on the device.

    Attributes:
        states: [T, H] of a draft head: what it reads of the token before each.
        is_causal: attention needs no mask.
    """

    inputs: DeviceInputs
    features: FeatureSpec
    states: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass makes, valid until the runner's next pass.

    Attributes:
        states: [T, F] hidden states, of a draft head [T, H] those that it predicts; None: none are wanted.
        logits: [W, V].
        ids: of a draft head [W, V] the tokens of the logits.
        best: of a draft head [W, 2k + 1], as of ``HeadScores``; None: they are not looked for in the pass.
    """

    states: Tensor | None
    logits: Tensor
    ids: Tensor | None = None
    best: Tensor | None = None

    def first(self, tokens: int, wanted: int) -> PassOutput:
        """Of so many tokens, and of so many wanted ones."""
        states = None if self.states is None else self.states[:tokens]
        ids, best = (None if each is None else each[:wanted] for each in (self.ids, self.best))
        return PassOutput(states, self.logits[:wanted], ids, best)


class EagerRunner(ABC):
    """Makes passes of any shape.

    Attributes:
        device: of the model.
    """

    device: torch.device

    def forward(self, step: Pass, cache: TreeCache) -> PassOutput:
        """One pass; its keys and values go to where the cache is placed."""
        at, new = cache.placement, step.inputs
        shape = Shape(new.count, at.count, at.width, at.end, len(new.wanted), new.words, *new.further.sizes)
        (numbers,) = on_device(self.device, new.filled(shape))
        inputs = DeviceInputs(numbers, shape)
        at.index, at.sources = inputs.index, inputs.sources
        states = None if step.states is None else step.states.index_select(0, inputs.before)
        return self.make(DevicePass(inputs, step.features, states, new.is_causal), cache)

    def slots(self, tokens: int) -> int:
        """To allot for a row of so many tokens, so that storage need not grow while they come: one a token."""
        return tokens

    @abstractmethod
    def make(self, step: DevicePass, cache: TreeCache) -> PassOutput:
        """One pass whose inputs are on the device."""


class StockRunner(EagerRunner):
    """Passes by the model's own forward.

    Attributes:
        hidden: reads hidden states; None: no pass wants any.

    Args:
        windows: of its sliding layers; None: all layers take one mask, of whole paths.
    """

    def __init__(
        self, model: PreTrainedModel, hidden: HiddenStates | None = None, windows: Windows | None = None
    ) -> None:
        self._model, self.hidden, self.device, self._windows = model, hidden, model.device, windows
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def make(self, step: DevicePass, cache: TreeCache) -> PassOutput:
        options = {"logits_to_keep": step.inputs.wanted} if self._selects else {}
        with laid_out(cache.placement), one_set():
            out = self._model(
                input_ids=step.inputs.tokens[None],
                attention_mask=self._mask(step),
                position_ids=step.inputs.positions[None],
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        logits: Tensor = out.logits[0] if self._selects else out.logits[0, step.inputs.wanted]
        return PassOutput(self.hidden.read(step.features) if self.hidden and step.features else None, logits)

    def _mask(self, step: DevicePass) -> Tensor | dict[str, Tensor] | None:
        """None: the model makes its own, windows included: in a row that was empty a slot is a position."""
        if step.is_causal:
            return None
        seen, dtype = step.inputs.mask(), self._model.dtype
        return self._windows.masks(seen, dtype) if self._windows else additive(seen, dtype)


Capture = Callable[[Callable[[], PassOutput]], Callable[[], PassOutput]]
"""Takes what makes a pass, and gives what makes it again: the same kernels on the same addresses."""


class GraphRunner:
    """Passes of a model, or of a draft head, in few shapes, from inputs that stay where they are: on a GPU CUDA graphs.

    Tokens are filled up to a power of two, beyond 64 to a multiple of it, and slots to 64 times a power of two. Tokens
    that fill up write to the slot behind all others, to which nothing attends. So a pass of a shape that has been is
    the same kernels on the same inputs, whatever the tree. The second pass of a shape is captured, and those after it
    are one launch each. Where nothing can be captured, passes are the same without it.

    Where memory ends in a capture, passes of that shape are made without it until the storage moves; after any other
    error all passes are.

    Attributes:
        uncaptured: why some passes, or all, are not captured; "": all are.

    Args:
        eager: makes the passes.
        captures: gives what makes graphs of one storage; by default CUDA's, on a device that has them.
    """

    def __init__(self, eager: EagerRunner, captures: Callable[[], Capture] | None = None) -> None:
        self._eager, self._captures = eager, captures
        if captures is None and eager.device.type == "cuda":  # each stream takes workspaces of its own: one for all
            self._captures = partial(cuda_graphs, torch.cuda.Stream(eager.device))
        self._inputs: dict[Shape, tuple[DeviceInputs, Tensor | None]] = {}
        self._graphs: WeakKeyDictionary[TreeCache, _Graphs] = WeakKeyDictionary()
        self.uncaptured = "" if self._captures else f"device {eager.device.type} has no CUDA graphs"

    def forward(self, step: Pass, cache: TreeCache) -> PassOutput:
        at, new, total = cache.placement, step.inputs, step.inputs.count
        tokens, slots = _filled(total), rounded(at.end)
        width, words = tokens if at.count == 1 else _filled(at.width), max(_WORDS, _filled(new.words))
        shape = Shape(tokens, at.count, width, slots, _filled(len(new.wanted)), words, *new.further.sizes)
        cache.reserve(at.first + at.count, self.slots(at.end))
        if shape not in self._inputs:
            numbers = torch.zeros(sum(shape.sizes), dtype=torch.int64, device=self._eager.device)
            buffer = None if step.states is None else step.states.new_zeros(tokens, step.states.shape[1])
            self._inputs[shape] = DeviceInputs(numbers, shape), buffer
        inputs, states = self._inputs[shape]
        inputs.numbers.copy_(staged(new.filled(shape), self._eager.device), non_blocking=True)
        if states is not None and step.states is not None:
            torch.index_select(step.states, 0, inputs.before[:total], out=states[:total])
        at.width, at.end, at.index, at.sources = width, slots, inputs.index, inputs.sources
        filled = DevicePass(inputs, step.features, states, is_causal=False)
        key = *shape, at.first, *step.features.layers
        result = self._replayed(key, lambda: self._eager.make(filled, cache), cache)
        return result.first(total, len(new.wanted))

    def slots(self, tokens: int) -> int:
        """Those of a pass over the last of them, and one for what fills it up: graphs live as long as the storage."""
        return rounded(tokens) + 1

    def _replayed(self, key: tuple[int, ...], make: Callable[[], PassOutput], cache: TreeCache) -> PassOutput:
        """A pass of a shape, from a row on, with some hidden states, by its graph where there is one."""
        if self._captures is None:
            return make()
        moves, graphs = cache.moves, self._graphs.get(cache)
        if graphs is None or graphs.moves != moves:  # the storage that they write to is gone
            graphs = self._graphs[cache] = _Graphs(moves, self._captures())
        if key in graphs.refused or key not in graphs.seen:
            graphs.seen.add(key)  # a pass that comes but once would cost more with a capture, which takes two
            return make()
        if key not in graphs.by_key:
            try:
                replay = graphs.capture(make)
            except RuntimeError as error:
                if "out of memory" in str(error):  # torch's or CUDA's own
                    graphs.refused.add(key)
                    graphs.capture = self._captures()  # what began a capture that failed may take no other
                else:  # others would fail too, and each leaves memory behind that nobody frees
                    self._captures = None
                    self._graphs.clear()
                self._complain(f"a pass of shape {key[:8]} cannot be captured: {error}")
                return make()
            if len(graphs.by_key) >= _KEPT:
                del graphs.by_key[next(iter(graphs.by_key))]  # the one that was replayed longest ago
            graphs.by_key[key] = replay
        graphs.by_key[key] = replay = graphs.by_key.pop(key)  # behind all others
        return replay()

    def _complain(self, why: str) -> None:
        if not self.uncaptured:
            warnings.warn(f"{why}: kernels are launched one by one instead", DraftreeWarning, stacklevel=2)
        self.uncaptured = why


_WORDS = 4
"""Fewest lines of bits of a shape: one more is another shape, and these are enough for 192 uncommitted nodes."""
_KEPT = 64
"""Most graphs of a cache: each holds its logits, 12 MiB of them for 64 tokens and a vocabulary of 49,152."""


@dataclass(slots=True)
class _Graphs:
    """Of one cache, while its storage lies where it is: shape, first row, hidden states -> what makes the pass again.

    Attributes:
        capture: makes them.
        refused: of which passes no graph can be made.
        by_key: the one that was replayed last comes last.
        seen: which passes have been made.
    """

    moves: int
    capture: Capture
    refused: set[tuple[int, ...]] = field(default_factory=set)
    by_key: dict[tuple[int, ...], Callable[[], PassOutput]] = field(default_factory=dict)
    seen: set[tuple[int, ...]] = field(default_factory=set)


def cuda_graphs(stream: torch.cuda.Stream) -> Capture:
    """What captures passes as CUDA graphs that share their memory: graphs of one storage, which are gone together.

    PyTorch frees that memory with the last of them, and takes no further graph into it then.

    Args:
        stream: as in ``cuda_graph``.
    """
    return partial(cuda_graph, torch.cuda.graph_pool_handle(), stream)


def cuda_graph(pool: Any, stream: torch.cuda.Stream, make: Callable[[], T]) -> Callable[[], T]:
    """What makes a pass again, as a CUDA graph; what it returns lies where the next replay writes.

    The current device and stream are afterwards those from before.

    Args:
        pool: of the memory that graphs share.
        stream: captures; it is of the device that the pass computes on, and for all graphs of a pool the same.

    Raises:
        RuntimeError: the pass does something that no graph can hold, such as a transfer to the host.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(stream.device),
        torch.cuda.stream(stream),  # where a capture fails, torch.cuda.graph leaves its stream the current one
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        result = make()

    def replay() -> T:
        with torch.cuda.device(stream.device):
            graph.replay()
        return result

    return replay


def _filled(count: int) -> int:
    """Tokens of a static pass over ``count``."""
    return -(-count // 64) * 64 if count > 64 else 1 << max(0, count - 1).bit_length()


GRAPH = "graph"
RUNNERS = (EAGER, GRAPH)
"""What makes passes."""


Runner = EagerRunner | GraphRunner


def runner_of(name: str, eager: EagerRunner) -> Runner:
    """Makes passes as a name of ``RUNNERS`` has it, by ``eager``."""
    return eager if name == EAGER else GraphRunner(eager)


def chosen_runner(name: str | None, device: str) -> str:
    """``name``, by default graphs on a device that has them: their passes are as exact, and a launch each.

    Raises:
        ConfigError: there is no such runner.
    """
    if name not in (None, *RUNNERS):
        raise ConfigError(f"runner is {name!r}: choose from {', '.join(RUNNERS)}")
    return name or (GRAPH if device.startswith("cuda") else EAGER)
