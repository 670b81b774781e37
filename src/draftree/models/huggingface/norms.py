"""RMS norms as one kernel each: modeling code makes six or seven of one, and a GPU's pass over few tokens is as long as
its kernels are many."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel


def fuse(model: PreTrainedModel) -> int:
    """Give PyTorch's own norm, for good, to modules that compute the same; others, such as Gemma's, stay as they are.

    Returns:
        how many have it.
    """
    plain = [module for module in model.modules() if _is_plain(module, model.dtype)]
    for module in plain:
        module.forward = partial(_normed, module)
    return len(plain)


def _normed(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight.shape, module.weight, _eps(module))


def _eps(module: nn.Module) -> float | None:
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.inference_mode()
def _is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """An RMS norm by its name that is one by what it computes, of large inputs and of some that epsilon outweighs."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or _eps(module) is None:
        return False
    if weight.dim() != 1 or weight.dtype != dtype or "forward" in vars(module):  # its forward may be another's hook
        return False
    x = torch.linspace(-1, 1, 4 * len(weight), device=weight.device).view(4, -1) ** 3
    x = (x * torch.tensor([[8.0], [1.0], [1e-2], [1e-3]], device=weight.device)).to(dtype)
    try:
        wanted: Tensor = module(x)
    except (TypeError, RuntimeError):  # it takes something else besides
        return False
    if wanted.dtype != dtype or wanted.shape != x.shape:
        return False
    apart, largest = (wanted - _normed(module, x)).abs().amax(-1), wanted.abs().amax(-1)
    return bool((apart <= (1e-5 if dtype == torch.float32 else 2e-2) * largest).all())
