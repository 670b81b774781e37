"""A device beside the host that is the CPU in truth: it knows which tensors lie there, and counts what passes between.

Stands for a GPU in tests of what a step transfers and waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SYNCHRONOUS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
_READS = {Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}


class Accelerator:
    """While it is entered, tensors made with ``device=`` or moved by ``to`` lie on it, and what is computed of them.

    Attributes:
        uploads: transfers from the host.
        downloads: transfers to the host (``Tensor.cpu``).
        strays: names of operations that transfer or wait otherwise: a number or a list read off a tensor, an index
            that the host makes, a choice by flags, whose number the host must know.
    """

    def __init__(self) -> None:
        self._there: dict[int, Any] = {}  # storages, so that none is made anew at the address of another
        self._stack = ExitStack()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.uploads, self.downloads, self.strays = 0, 0, list[str]()

    def take(self, tensors: Iterable[Tensor]) -> None:
        """These lie on it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._there[storage._cdata] = storage

    def has(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._there

    def __enter__(self) -> Self:
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A function of torch."""
        if function is Tensor.cpu and self.has(args[0]):
            self.downloads += 1
            return torch.from_numpy(args[0].numpy().copy())
        if function in _READS and self.has(args[0]):
            self.strays.append(function.__name__)
        places = [x for x in (*args[1:], options.get("device")) if isinstance(x, (str, torch.device))]
        found = function(*args, **options)
        if function is Tensor.to and places and not self.has(args[0]):
            self.uploads += 1
            found = found.clone()
        if places:
            self.take([found])
        return found

    def operated(self, operation: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """An operation on tensors."""
        given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        there = [x for x in given if self.has(x)]
        found = operation(*args, **options)
        if not there:
            return found
        others = [x for x in given if x.dim() and not self.has(x)]
        if others and operation is torch.ops.aten.copy_.default:
            self.uploads += 1
        elif others or operation in _SYNCHRONOUS or ("index" in str(operation) and _flags(args[1:])):
            self.strays.append(str(operation))
        self.take(x for x in tree_leaves(found) if isinstance(x, Tensor))
        return found


def _flags(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[0]))


class _Calls(TorchFunctionMode):
    def __init__(self, of: Accelerator) -> None:
        super().__init__()
        self._of = of

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self._of.called(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __init__(self, of: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self._of.operated(func, args, kwargs or {})
