"""RMS norms as one kernel each: modeling code makes six or seven of one, and a GPU's pass over few tokens is as long as
its kernels are many."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def fuse(model: nn.Module) -> int:
    """Give PyTorch's own norm to modules that compute the same; others, such as Gemma's, stay as they are.

    Returns:
        how many have it.
    """
    found = [module for module in model.modules() if _is_plain(module)]
    for module in found:
        module.forward = partial(_normed, module)
    return len(found)


def _normed(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight.shape, module.weight, _eps(module))


def _eps(module: nn.Module) -> float | None:
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.inference_mode()
def _is_plain(module: nn.Module) -> bool:
    """An RMS norm by its name that is one by what it computes, of large inputs and of some that epsilon outweighs."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or _eps(module) is None:
        return False
    x = torch.linspace(-1, 1, 4 * len(weight), device=weight.device).view(4, -1) ** 3
    x = (x * torch.tensor([[8.0], [1.0], [1e-2], [1e-3]], device=weight.device)).to(weight.dtype)
    close = 1e-4 if weight.dtype == torch.float32 else 3e-2
    wanted: Tensor = module(x)
    return wanted.dtype == x.dtype and torch.allclose(wanted, _normed(module, x), rtol=close, atol=close)
