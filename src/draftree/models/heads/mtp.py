"""Multi-token prediction (MTP): layers of the target's own checkpoint that draft for it.

DeepSeek-AI, *DeepSeek-V3 Technical Report* (2024), equations 21 to 23. With f_p the target's final hidden state at
position p, e the target's embeddings, M_k a projection and TRM_k a decoder layer of the target's kind:

    h_p^k = TRM_k(M_k [RMSNorm(e(x_p)); RMSNorm(h_{p-1}^{k-1})]),    h_p^{-1} = f_p,    k = 0, ..., n - 1

Layer k attends to what it has read itself. The target's output layer of h_p^k is the distribution after x_p, as layer k
predicts it. transformers' ``MtpModel`` has the layers and reads them; here they run over rows, trees and a cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache
from transformers.modeling_layers import MtpModel

from ...errors import ModelFileError, UnsupportedModelError, first_line
from ..abilities import HeadRow, TrainableModel, feature_model
from ..base import FINAL_STATE, LanguageModel
from ..huggingface.attention import NAME, laid_out, takes_packed_rows
from ..huggingface.inspection import torch_dtype
from ..huggingface.pretrained import quiet
from .eagle_head import DraftNetwork
from .eagle_model import HeadModel

KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""How configs name the number of MTP layers."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError)
"""What transformers raises for checkpoints that are not whole, or of another kind."""
_NAMED = 3
"""Tensors that a message names."""


class MtpNetwork(nn.Module):
    """The MTP layers of a target: what ``MtpHead`` needs of a network. Embeddings and rotations are the target's.

    A token's state is h^k for k from the first layer that has read it, f, to the last one, side by side, and zeros for
    those that are missing: [h^f, h^{f+1}, ..., h^{n-1}, 0, ...]. So the layers that read the token after it find what
    they read in the same order, and the first part is what the output layer reads.

    Args:
        source: has the weights, and the target's embeddings and rotations.
        numbers: that a token takes in the cache of a layer.
        lm_head: shares the target's output layer; None: the target gives rows of it.
    """

    features, predicts_features = FINAL_STATE, False

    def __init__(self, source: Any, numbers: int, lm_head: nn.Linear | None) -> None:
        super().__init__()
        self.layers: nn.ModuleList = source.layers
        self.shared_post_norm = source.shared_post_norm if source.use_shared_post_norm else None
        self.lm_head = lm_head
        self._size, self._numbers = int(source.config.hidden_size), numbers
        self._shared = (source.embed_tokens, source.rotary_emb)  # the target's: no modules of this one
        self._kinds = source.config.layer_types if source.has_per_layer_rope else None

    @property
    def slot(self) -> tuple[int, int, int]:
        """Layers, and what a token takes in the cache of one, as if of one key head."""
        return len(self.layers), 1, self._numbers // 2

    @property
    def sizes(self) -> tuple[int, int]:
        """Of a state, and H of the target's hidden states."""
        return len(self.layers) * self._size, self._size

    def fused(self, features: Tensor) -> Tensor:
        """[..., H] final hidden states of the target -> [..., n x H] states that the first layer reads."""
        return pad(features, (0, (len(self.layers) - 1) * self._size))

    def readout(self, states: Tensor) -> Tensor:
        """[..., n x H] states -> [..., H], what the output layer reads."""
        return states[..., : self._size]

    def embedded(self, tokens: Tensor) -> Tensor:
        """[T] tokens -> [T, H]."""
        return self._shared[0](tokens)  # type: ignore[no-any-return]

    def through(
        self, number: int, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """[1, T, H] outputs of a layer.

        Args:
            number: k.
            embedded, states: [1, T, H] embeddings of tokens, and h^{k-1} of the tokens before them.
            positions: [1, T] int64.
            mask: [B, 1, width, S], added to attention scores; None: causal.
            cache: of n layers, placed.
        """
        rotary, turns = self._shared[1], None
        if rotary is not None:
            kind = {} if self._kinds is None else {"layer_type": self._kinds[number]}
            turns = rotary(embedded, position_ids=positions, **kind)
        found: Tensor = self.layers[number](
            embedded,
            states,
            position_embeddings=turns,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        return found if self.shared_post_norm is None else self.shared_post_norm(found)


class MtpHead(HeadModel):
    """MTP layers that draft for their target.

    The token that the target has predicted last is read by layer 0, a drafted node of depth d by layer d, and beyond
    the last layer by that one, so that one layer drafts any depth. Of the target's own tokens each layer reads all, as
    far as it has a state of the token before: layer k none of the first k.

    A node is read by the layers below it as well, whose keys its descendants need. Where the target's hidden state at a
    row's last token is known (beams), layer 0 reads all that follows, until the target's tokens go on.

    Raises:
        UnsupportedModelError: the target's hidden states cannot be read.
    """

    def __init__(self, network: MtpNetwork, target: LanguageModel, *, causal: bool) -> None:
        # It has all of a DraftNetwork but what is needed to run layers, which is overridden here.
        super().__init__(cast(DraftNetwork, network), torch.arange(target.capabilities.vocab_size), target, "mtp")
        self._mtp, self._causal = network, causal

    def know(self, row: HeadRow, features: Tensor) -> None:
        """Layer 0 reads what follows (``DraftHead.know``); what the others have given at the last token is kept."""
        given = self._given(row)
        super().know(row, features)
        row.predicted = torch.cat([features, given], dim=-1)

    def _given(self, row: HeadRow) -> Tensor:
        """[1, (n - 1) x H] what all layers but the last have given at a row's last committed token."""
        size = self._mtp.sizes[1]
        return row.predicted[:1, size:] if row.is_known else row.predicted[:1, :-size]

    def _read_text(
        self, rows: Sequence[HeadRow], counts: Sequence[int], inputs: Tensor, states: Tensor
    ) -> Sequence[Tensor]:
        """Each layer reads all tokens, and at each what the layer before it has given at the token before."""
        at, size = self._rows.cache.placement, self._mtp.sizes[1]
        tokens, positions = inputs.to(self.capabilities.device, non_blocking=True)
        embedded, slots = self._mtp.embedded(tokens)[None], torch.arange(at.end, device=positions.device)
        seen = None
        if not (self._causal and at.count == 1 and at.start == 0):
            own = positions if at.sources is None else positions[at.sources]
            seen = slots <= own.view(at.count, 1, at.width, 1)
        before = [self._given(row).split(size, dim=-1) for row in rows]
        last = torch.tensor([end - 1 for end in accumulate(counts)]).to(positions.device, non_blocking=True)
        fed, lasts = states[:, :size], list[Tensor]()
        for number in range(len(self._mtp.layers)):
            if number and seen is None:
                seen = slots <= positions.view(1, 1, -1, 1)
            found = self._run(number, embedded, fed, positions, seen)
            lasts.append(found[last])
            if number + 1 < len(self._mtp.layers):
                parts = zip(before, found.split(list(counts)), strict=True)
                fed = torch.cat([piece for given, own in parts for piece in (given[number], own[:-1])])
        found_last: Sequence[Tensor] = torch.cat(lasts, dim=-1).split(1)
        return found_last

    def _read_nodes(
        self, rows: Sequence[HeadRow], counts: Sequence[int], inputs: Tensor, states: Tensor, mask: Tensor
    ) -> Tensor:
        """Each node is read by the layers from its depth on: one pass for each of them."""
        tokens, positions = inputs.to(self.capabilities.device, non_blocking=True)
        embedded, (width, size) = self._mtp.embedded(tokens)[None], self._mtp.sizes
        parts = states.unflatten(-1, (width // size, size))
        found = torch.zeros_like(parts)
        layers = self._layers_of(rows, counts, inputs[1].tolist())
        for number in sorted(set().union(*layers)):
            own = [node for node, some in enumerate(layers) if number in some]
            columns = [number - layers[node].start for node in own]
            if len(own) == len(layers) and len(set(columns)) == 1:
                found[:, columns[0]] = self._run(number, embedded, parts[:, columns[0]], positions, mask)
            else:
                fed = torch.zeros_like(parts[:, 0])
                fed[own] = parts[own, columns]
                found[own, columns] = self._run(number, embedded, fed, positions, mask)[own]
        return found.flatten(1)

    def _layers_of(self, rows: Sequence[HeadRow], counts: Sequence[int], positions: Sequence[int]) -> list[range]:
        """Which layers read each of the rows' new nodes."""
        last, found = len(self._mtp.layers) - 1, list[range]()
        for row, count in zip(rows, counts, strict=True):
            for position in positions[len(found) : len(found) + count]:
                depth = position - row.length + 1
                found.append(range(1) if row.is_known else range(min(depth, last), last + 1))
        return found

    def _run(self, number: int, embedded: Tensor, states: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        """[T, H] outputs of a layer.

        Args:
            number: k.
            embedded: [1, T, H] of the tokens.
            states: [T, H] of the tokens before them.
            positions: [T] in the row, whose first token is the text's second.
            seen: [B, 1, width, S] bool; None: one row that was empty reads a chain, so that attention is causal.
        """
        cache, mask = self._rows.cache, None
        if seen is not None:
            hidden = ~seen
            hidden[..., :number] = True  # tokens that this layer has not read
            mask = torch.zeros(seen.shape, dtype=embedded.dtype, device=seen.device)
            mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        with laid_out(cache.placement):
            return self._mtp.through(number, embedded, states[None], positions[None] + 1, mask, cache)[0]


def mtp_layers(target: LanguageModel) -> int:
    """MTP layers that a target's config promises, of a kind that transformers reads; 0: none."""
    if not isinstance(target, TrainableModel):
        return 0
    return int(getattr(target.model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0)


def load_mtp(target: LanguageModel) -> MtpHead:
    """The MTP layers in the checkpoint that a target was read from.

    Raises:
        UnsupportedModelError: it has none, or its hidden states cannot be read.
        ModelFileError: its config promises some that its checkpoint lacks, or that cannot be read.
    """
    can, given, count = target.capabilities, feature_model(target), mtp_layers(target)
    way_out = "use drafter 'auto', or one of 'draftree methods'"
    if not count:
        raise UnsupportedModelError(
            f"{can.name} has no MTP layers to draft with (its config names none: {', '.join(KEYS)}): {way_out}"
        )
    model = cast(TrainableModel, target).model
    if not takes_packed_rows(model):
        raise UnsupportedModelError(f"attention {can.attention!r} cannot share a pass among rows: {way_out}")
    try:
        with quiet():
            source = MtpModel.from_pretrained(model, device_map={"": can.device}).eval()
    except _UNREADABLE as error:
        raise ModelFileError(
            f"cannot read the MTP layers of {can.name}: its config promises {count}, and {_flaw(error)}: copy its "
            f"checkpoint again, whole, or {way_out}"
        ) from None
    numbers = can.slot_bytes // (given.layers * torch_dtype(can).itemsize)
    network = MtpNetwork(source, numbers, _output(model))
    return MtpHead(network, target, causal=can.attention == NAME)


def _flaw(error: Exception) -> str:
    """What is wrong with a checkpoint, by what transformers raises."""
    if "missing" in (text := str(error)) and (names := re.findall(r"'(\S+?)'", text)):
        more = ", ..." if len(names) > _NAMED else ""
        return f"its checkpoint lacks {len(names)} tensors of them ({', '.join(names[:_NAMED])}{more})"
    if "ignore_mismatched_sizes" in text:
        return "its tensors have other shapes than its config says"
    return first_line(error)


def _output(model: Any) -> nn.Linear | None:
    """A model's output layer on the same weights; None: it is of another kind."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        return None
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return made
