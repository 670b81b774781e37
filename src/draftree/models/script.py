"""TorchScript without its announcements and its slow first passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy

import torch
from torch import nn
from torch.jit.frontend import FrontendError

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
