"""A model without some of its layers, on the same weights: a cheaper model of the same kind, untrained.

Leaving out the last layers is early exit; others may be left out as well (Zhang et al., *Draft & Verify*, ACL 2024).
The embedding, the final norm and the output layer stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError, UnsupportedModelError


def decoder_layers(model: PreTrainedModel, name: str) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        UnsupportedModelError: there is none.
    """
    return _find(model, name)[1]


def _find(model: PreTrainedModel, name: str) -> tuple[str, nn.ModuleList]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, module
    raise UnsupportedModelError(
        f"{name} ({type(model).__name__}) has no list of {count} layers to leave some out of: use another drafter"
    )


def fewer_layers(model: PreTrainedModel, kept: Sequence[int], name: str) -> PreTrainedModel:
    """A copy of a model with some of its layers; nothing of what it holds is copied.

    Args:
        model: the whole model.
        kept: numbers of the layers that are left, from 0, ascending.
        name: what people call the model.

    Raises:
        ConfigError: there are no such layers.
        UnsupportedModelError: its layers cannot be told apart.
    """
    path, layers = _find(model, name)
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < len(layers):
        raise ConfigError(
            f"layers {list(kept)} of {name}, which has {len(layers)}: give numbers from 0 to {len(layers) - 1}, "
            "ascending, at least one"
        )
    top = _shallow(model)
    module = top
    *above, last = path.split(".")
    for part in above:
        inner = _shallow(module.get_submodule(part))
        module._modules[part] = inner
        module = inner
    module._modules[last] = nn.ModuleList(layers[i] for i in kept)
    return cast(PreTrainedModel, top)


def _shallow(module: nn.Module) -> nn.Module:
    """A copy that shares its parts, but can be given others; hooks stay with the original."""
    made = copy(module)
    made._modules = dict(module._modules)
    made._forward_hooks = OrderedDict()
    return made
