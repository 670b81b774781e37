"""Hidden states of a Hugging Face model after its final norm: what its output layer turns into logits.

Read by a hook, so that no modeling code is forked, unless a ``Decoder`` makes the passes, which brings them along; a
model that nobody asks pays nothing.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .probe import tolerance

_PROBE = (11, 7, 5, 3)


def hidden_states(model: PreTrainedModel, name: str) -> HiddenStates:
    """The hidden states of a model, read by one hook however often they are asked for.

    Raises:
        UnsupportedModelError: they cannot be read, or the model's logits are not its output layer's of them.
    """
    if model not in _READ:
        _READ[model] = HiddenStates(model, name)
    return _READ[model]


class HiddenStates:
    """The hidden states of a model's last pass.

    Attributes:
        last: [B, n, H], of all tokens of the last pass, on the model's device.
    """

    last: Tensor

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        body = model.get_decoder()
        if body is None or body is model or model.get_output_embeddings() is None:
            raise _refused(model, name, "its decoder and its output layer are not apart")
        handle = body.register_forward_hook(self._keep)
        try:
            self._check(model, name)
        except UnsupportedModelError:
            handle.remove()
            raise

    def _keep(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.last = output[0].detach()  # what the model's owner trains keeps no graph here

    @torch.inference_mode()
    def _check(self, model: PreTrainedModel, name: str) -> None:
        """Logits = output layer (hidden states), within rounding."""
        ids = torch.tensor([_PROBE], device=model.device) % model.config.get_text_config(decoder=True).vocab_size
        logits = model(input_ids=ids, use_cache=False).logits
        try:
            own = model.get_output_embeddings()(self.last)
        except RuntimeError as error:
            raise _refused(model, name, f"its output layer does not take them ({error})") from None
        difference = float((own.float() - logits.float()).abs().max() / logits.float().std().clamp_min(1e-12))
        if not difference <= tolerance(model.dtype):
            raise _refused(model, name, "its logits are not its output layer's of them (they are scaled or capped)")


_READ: WeakKeyDictionary[PreTrainedModel, HiddenStates] = WeakKeyDictionary()


def _refused(model: PreTrainedModel, name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} ({type(model).__name__}) gives no hidden states to draft from: {why}: use drafter 'lookup' or a model"
    )
