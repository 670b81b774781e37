"""LongRoPE (arXiv 2402.13753) with one set of factors in all passes: that of a model's longest text.

transformers chooses a set in each forward, for all its positions, by the largest of them. Keys that are cached would
keep the other set, and a row beyond the length that was trained on would choose for the rows beside it. Its own
``generate`` drops the cache there. So here each forward gets one position more, the model's last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_UNDER_WAY = local()


@contextmanager
def one_set() -> Iterator[None]:
    """Passes that are made in here, in this thread, take the set of the model's longest text (``settle``)."""
    _UNDER_WAY.is_one = True
    try:
        yield
    finally:
        _UNDER_WAY.is_one = False


def settle(model: PreTrainedModel, longest: int) -> None:
    """Let rotary modules with LongRoPE take the set for ``longest`` tokens in ``one_set``; call it once for a model.

    Elsewhere they compute as before: its owner may train it, or use its own ``generate``.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)  # one, or one for each kind of layer
        if "longrope" in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            module.register_forward_pre_hook(partial(_add, longest - 1), with_kwargs=True)
            module.register_forward_hook(_drop)


def _add(last: int, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The arguments of a rotary module, hidden states and positions [..., T], with one more position."""
    if not getattr(_UNDER_WAY, "is_one", False):
        return None
    others = {name: given for name, given in options.items() if name != "position_ids"}
    positions: Tensor = options["position_ids"] if "position_ids" in options else args[1]
    further = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)
    return (args[0], further, *args[2:]), others


def _drop(module: nn.Module, args: object, turns: tuple[Tensor, ...]) -> Any:
    """Cosines and sines [..., T, D], without those of the further position."""
    return tuple(turn[..., :-1, :] for turn in turns) if getattr(_UNDER_WAY, "is_one", False) else None
