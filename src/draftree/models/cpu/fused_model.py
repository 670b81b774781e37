"""A whole Llama model as one TorchScript function."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit.frontend import FrontendError
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from ..attention import NAME, attend, grouped_sdpa
from ..cache import TreeCache, write
from .fused_layers import NOT_ALIKE, TOLERANCE, Forward, Norm, Rotation

_OF_ALL = frozenset(vars(nn.Module()))
"""What every module holds for PyTorch's own ends."""


NOT_TAKEN = (FrontendError, RuntimeError, TypeError, AttributeError, ValueError, AssertionError, OSError)
"""What ends the trial of a module that TorchScript does not take; OSError: its source is not there."""


def scripted(module: nn.Module) -> nn.Module:
    """``module`` in TorchScript, on the same tensors.

    Raises:
        any of NOT_TAKEN: TorchScript does not take it.
    """
    with _quiet():
        made: nn.Module = torch.jit.script(module)
    return made


def all_scripted(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules of one structure in TorchScript; the first alone is compiled, which takes 30 milliseconds.

    Raises:
        any of NOT_TAKEN: TorchScript does not take them, or they differ in more than what they hold.
    """
    like = scripted(modules[0])
    return [like, *(_refilled(like, module) for module in modules[1:])]


def _refilled(like: nn.Module, module: nn.Module) -> nn.Module:
    """A copy of a scripted module that holds what ``module`` does."""
    made = copy(like)
    for name, value in vars(module).items():
        if name not in _OF_ALL and hasattr(like, name):
            setattr(made, name, value)
    for name, part in module.named_children():
        setattr(made, name, part if isinstance(part, torch.jit.ScriptModule) else _refilled(getattr(like, name), part))
    return made


@contextmanager
def one_plan() -> Iterator[None]:
    """What is called for the first time in here keeps one plan for tensors of all shapes.

    Otherwise its second call compiles another for the shapes of the first, and calls with other shapes do so again.
    """
    with _quiet():
        before = torch.jit.set_fusion_strategy([])
    try:
        yield
    finally:
        with _quiet():
            torch.jit.set_fusion_strategy(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """No word of TorchScript's end in a future PyTorch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield


_PROMPT, _STARTS, _NEW = 3, (3, 2), 2
"""Of the trial: tokens of its prompts, slots where its next pass begins, and new tokens there."""


class Stack:
    """Merged layers, called as one.

    Raises:
        any of NOT_TAKEN: TorchScript does not take them.
    """

    def __init__(self, layers: Sequence[Forward]) -> None:
        self._like = [(layer.number, layer.merged.empty()) for layer in layers]
        self._script = scripted(_Layers(all_scripted([layer.merged for layer in layers]))).forward

    def __call__(self, states: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: TreeCache) -> Tensor:
        """[B, n, width] after the embedding -> after the last layer.

        Args:
            states: the former.
            turn: of a ``Rotation``.
            mask: [B, 1, n, S], added to attention scores; None: causal, S = n.
            cache: takes the keys and values.
        """
        at = cache.placement
        keys, values = cache.storage(self._like)
        out: Tensor = self._script(states, *turn, mask, keys, values, at.first, at.starts[0], at.end, at.index)
        return out


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def forward(
        self,
        states: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        keys: list[Tensor],
        values: list[Tensor],
        first: int,
        start: int,
        end: int,
        index: Tensor | None,
    ) -> Tensor:
        for i, layer in enumerate(self.layers):
            query, key, value = layer.before(states, cos, sin)
            key, value = write(keys[i], values[i], key, value, first, start, end, index)
            states = layer.after(states, attend(query, key, value, mask, layer.scaling))
        return states


@torch.inference_mode()
def stacked(layers: Sequence[Forward]) -> Stack | None:
    """A stack of ``layers`` if TorchScript takes them and gives the same bits as one after the other."""
    try:
        stack = Stack(layers)
        with one_plan():
            return stack if _same(stack, layers) else None
    except NOT_TAKEN:
        return None


def _same(stack: Stack, layers: Sequence[Forward]) -> bool:
    """Do both give the same states, behind no context and behind one whose rows differ in length?"""
    noise = torch.Generator().manual_seed(0)
    count, width, head = len(_STARTS), layers[0].merged.width, layers[0].merged.empty().shape[-1]
    caches = [TreeCache(1 + max(layer.number for layer in layers)) for _ in range(2)]
    for starts, n, mask in (
        ((0,) * count, _PROMPT, None),
        (_STARTS, _NEW, torch.zeros((count, 1, _NEW, max(_STARTS) + _NEW))),
    ):
        states = torch.randn((count, n, width), generator=noise)
        turn = torch.randn((count, n, 1, head), generator=noise), torch.randn((count, n, 1, head), generator=noise)
        for cache in caches:
            cache.place(0, starts, n, states.device)
        want = states
        for layer in layers:
            want = layer.run(want, turn, mask, caches[0], grouped_sdpa, {})
        if not torch.equal(stack(states, turn, mask, caches[1]), want):
            return False
    return True


class Decoder:
    """A causal model of merged layers, on its own parts.

    Raises:
        any of NOT_ALIKE: the model has other parts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self._embeddings: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        self._layers: list[Forward] = [layer.forward for layer in base.layers]
        self._norm, self._rotary, self._rotation = Norm(base.norm), base.rotary_emb, Rotation()
        self._output: nn.Module = model.get_output_embeddings()
        self._stack: Stack | None = stacked(self._layers)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One pass over [B, n] tokens at [B, n] positions.

        Args:
            tokens, positions: int64.
            mask: [B, 1, n, S], added to attention scores; None: causal.
            cache: takes the keys and values.
            last_only: logits after the last token alone.

        Returns:
            [B, n, H] hidden states after the final norm; [B, n or 1, V] logits.
        """
        states = embedding(tokens, self._embeddings)
        turn, used = self._rotation(self._rotary.forward(states, positions)), self._layers[0].implementation
        if self._stack is not None and used == NAME:
            states = self._stack(states, turn, mask, cache)
        else:
            states = self._one_by_one(states, turn, mask, cache)
        states = self._norm.forward(states)
        return states, self._output.forward(states[:, -1:] if last_only else states)

    def _one_by_one(self, states: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: TreeCache) -> Tensor:
        """The layers, with another attention, or where TorchScript does not take them."""
        if mask is None and self._layers[0].implementation == "eager":  # the others take none for causal
            mask = states.new_full((states.shape[1],) * 2, torch.finfo(states.dtype).min).triu_(1)[None, None]
        attend = self._layers[0].attention
        for layer in self._layers:
            states = layer.run(states, turn, mask, cache, attend, {})
        return states


@torch.inference_mode()
def direct(model: PreTrainedModel) -> Decoder | None:
    """A decoder for ``model`` if all of its layers are merged and nothing else is done in a pass of it."""
    ids = torch.tensor([[11, 7, 5, 3, 2], [2, 3, 5, 7, 11]]) % model.config.get_text_config(decoder=True).vocab_size
    cache = TreeCache(model.config.get_text_config(decoder=True).num_hidden_layers)
    cache.place(0, [0, 0], ids.shape[1], ids.device)
    try:
        decoder = Decoder(model)
        got = decoder(ids, torch.arange(ids.shape[1])[None], None, cache)[1]
    except NOT_ALIKE:
        return None
    want = model(input_ids=ids, use_cache=False).logits
    alike = want.shape == got.shape and float((want - got).abs().max() / want.std()) <= TOLERANCE
    return decoder if alike else None
