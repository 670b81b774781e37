"""The loss of an EAGLE head over several drafting steps, on the inputs that it has when it drafts.

Step 1 reads the target's hidden states, step j the head's own predictions of step j - 1 in their place, as nodes of
depth j - 1 do (training-time test: Li et al., *EAGLE-3*, Section 3.2; what a network reads and gives is its own). Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, smooth_l1_loss

from ..models.base import FINAL_STATE, FeatureSpec
from ..models.heads.eagle_network import EagleNetwork
from ..models.huggingface.features import feature_part
from .responses import Response, rounded_up


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B responses with N positions at most, of which R at most are learned from; N and R are rounded up.

    A response of L tokens has positions 1 to L - 2: position p has token p and the hidden state at p - 1, and the one
    at p is known. Those from the last one of the prompt on are learned from.

    Attributes:
        tokens: [B, N] int64.
        features: [B, N, F], hidden states at the token before.
        truth: [B, R, H], final hidden states at the learned positions; on padding they mean nothing.
        at: [B, R] int64, column of each learned position.
        valid: [B, R] bool, false on padding.
    """

    tokens: Tensor
    features: Tensor
    truth: Tensor
    at: Tensor
    valid: Tensor

    @classmethod
    def of(cls, responses: Sequence[Response], device: torch.device, read: FeatureSpec = FINAL_STATE) -> Batch:
        """Pad responses to one shape.

        Args:
            responses: with the same hidden states, the final ones among them.
            read: which of these ``features`` are.
        """
        firsts = torch.tensor([max(r.prompt_length - 2, 0) for r in responses])
        counts = torch.tensor([len(r.features) - 1 for r in responses]) - firsts
        width = rounded_up(max(len(r.features) - 1 for r in responses))
        tokens = _padded([r.tokens[1:-1] for r in responses], width).to(device)
        states = _padded([r.features for r in responses], width + 1).to(device).float()
        columns = torch.arange(rounded_up(int(counts.max())))
        valid = columns < counts[:, None]
        at = torch.where(valid, firsts[:, None] + columns, 0).to(device)
        kept, rows = responses[0].kept, torch.arange(len(at), device=device)[:, None]
        truth = feature_part(kept, states, FINAL_STATE)[rows, at + 1]
        return cls(tokens, feature_part(kept, states[:, :-1], read), truth, at, valid.to(device))


def _padded(parts: Sequence[Tensor], length: int) -> Tensor:
    """[B, length, ...] the parts, with zeros behind them."""
    whole = parts[0].new_zeros((len(parts), length, *parts[0].shape[1:]))
    for row, part in zip(whole, parts, strict=True):
        row[: len(part)] = part
    return whole


def unrolled(network: EagleNetwork, embeddings: Tensor, batch: Batch, steps: int) -> list[Tensor]:
    """Predicted states of each drafting step, [B, R, H]; step j means nothing in its first j - 1 columns.

    Args:
        network: of one layer.
        embeddings: [V, E] that it reads.
    """
    (layer,), rows = network.blocks, torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None]
    embedded = embeddings[batch.tokens]
    inputs = network.read(embedded, network.fused(batch.features))
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    queries, keys, values = layer.attend_with(inputs, network.turns(positions)[None])
    turns, embedded = network.turns(batch.at), embedded[rows, batch.at]
    inputs, queries = inputs[rows, batch.at], queries[rows, batch.at]
    group, width = queries.shape[2] // keys.shape[2], queries.shape[3]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of the steps after the first
    predicted: list[Tensor] = []
    for step in range(1, steps + 1):
        if step > 1:
            before = torch.roll(predicted[-1], 1, dims=1)
            inputs = network.read(embedded, before.to(embedded.dtype))
            queries, *fresh = layer.attend_with(inputs, turns)
            own.append((fresh[0], fresh[1]))
        scaled = queries.unflatten(2, (-1, group)) * width**-0.5  # [B, R, kv, group, D]
        seen = positions <= (batch.at - (step - 1))[..., None]
        scores = torch.einsum("brkgd,bnkd->brkgn", scaled, keys).float()
        scores = scores.masked_fill(~seen[:, :, None, None], torch.finfo(torch.float32).min)
        # Above a node of depth step - 1 are one node of each depth from 1 on: the columns just before its own.
        above = [(torch.roll(k, step - i, dims=1), torch.roll(v, step - i, dims=1)) for i, (k, v) in enumerate(own, 2)]
        extra = [torch.einsum("brkgd,brkd->brkg", scaled, k).float()[..., None] for k, _ in above]
        weights = torch.cat([scores, *extra], dim=-1).softmax(-1).to(values.dtype)
        found = torch.einsum("brkgn,bnkd->brkgd", weights[..., : len(positions)], values)
        for i, (_, v) in enumerate(above):
            found = found + weights[..., len(positions) + i, None] * v[:, :, :, None]
        predicted.append(network.predicted(layer.finish(inputs, found.flatten(2))))
    return predicted


def loss(
    network: EagleNetwork,
    predicted: Sequence[Tensor],
    batch: Batch,
    weight: Tensor,
    bias: Tensor | None,
    *,
    decay: float,
    feature_weight: float,
) -> Tensor:
    """Cross-entropy with the target distribution over the draft vocabulary, plus smooth L1 between hidden states where
    the network predicts these.

    Args:
        predicted: of ``unrolled``.
        weight, bias: [D, H] and [D], the target's output layer for the draft vocabulary.
        decay: weight of each further step.
        feature_weight: of the second part.
    """
    with torch.no_grad():
        target = linear(batch.truth, weight, bias).float().softmax(-1)
    total = batch.truth.new_zeros(())
    for step, states in enumerate(predicted):
        valid = batch.valid.clone()
        valid[:, :step] = False
        chosen = valid.flatten().nonzero()[:, 0]
        if not len(chosen):
            break
        share = torch.ones_like(chosen, dtype=torch.float32) / len(chosen)
        spare = rounded_up(len(chosen)) - len(chosen)
        chosen, share = pad(chosen, (0, spare)), pad(share, (0, spare))  # padding has no share in the mean
        own, truth = states.flatten(0, 1)[chosen], batch.truth.flatten(0, 1)[chosen]
        read, output = network.readout(own), network.lm_head
        logits = linear(read, weight, bias) if output is None else output.forward(read)
        each = -(target.flatten(0, 1)[chosen] * logits.float().log_softmax(-1)).sum(-1)
        if network.predicts_features:
            each = each + feature_weight * smooth_l1_loss(own.float(), truth, reduction="none").mean(-1)
        total = total + decay**step * (share * each).sum()
    return total
