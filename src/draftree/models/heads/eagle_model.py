"""HeadModel: a draft head behind the ``LanguageModel`` seam, with rows, tree masks and a cache of its own.

Tokens that the target has committed come with the target's hidden states (``advance``); drafted nodes take what was
predicted for their parent. Logits are over a row's draft vocabulary: the head's own, and what other tokens the row has
seen, for a text repeats itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils import skip_init

from ...errors import CacheError
from ..abilities import HeadRow, feature_model
from ..attention import attend_as_one
from ..base import LanguageModel, Nodes, Row
from ..cache import NO_NODES, Rows, bytes_of, packed, padded
from ..cpu.quantization import AUTO, STOCK, convert, summary
from ..probe import fingerprint, free_bytes
from .eagle_head import HeadNetwork

_GRAIN = 64
"""Logits come in multiples of this, filled up with -inf: their largest are found faster, chunk by chunk."""


class HeadModel:
    """A head that drafts for one target, as a ``LanguageModel``.

    Where the target has a weight format it computes in the fastest one, whichever the target's is: what it drafts need
    not be the target's to the last bit. The network is the model's own from then on: its layers get other kernels.

    Attributes:
        vocabulary: [D] int64 ascending ids that it always drafts from.
        layers: "network", the trained part, and "output", the target's output layer for the vocabulary.
        capabilities: as the target's, whose tokens it takes.
        cache_bytes: memory that its cache may use (``holds``); by default half of what was free at load.
        pass_seconds: wall-clock seconds inside its passes so far (on an accelerator, of launching them).

    Raises:
        UnsupportedModelError: the target's hidden states cannot be read.
    """

    def __init__(self, network: HeadNetwork, vocabulary: Tensor, target: LanguageModel, name: str) -> None:
        self._target = feature_model(target)
        self._target.track_features()
        can = target.capabilities
        self.vocabulary = vocabulary.to(can.device)
        weight, bias = self._target.output_rows(self.vocabulary)
        sizes, place = (weight.shape[1], len(vocabulary)), {"device": can.device, "dtype": can.dtype}
        output = skip_init(nn.Linear, *sizes, bias is not None, **place)
        with torch.no_grad():
            output.weight.copy_(weight)
            if bias is not None:
                output.bias.copy_(bias)
        self.layers = nn.ModuleDict({"network": network.to(can.device, can.dtype), "output": output})
        self.layers.eval().requires_grad_(False)
        self.capabilities = replace(
            can,
            name=name,
            architecture=type(self).__name__,
            parameters=sum(p.numel() for p in network.parameters()),
            attention="sdpa",
            trees="",
            slot_bytes=2 * network.config.kv_heads * network.config.head_dim * can.dtype.itemsize,
            fingerprint=fingerprint(network.parameters()),
        )
        if can.weight_format != STOCK:
            self.capabilities = replace(self.capabilities, weight_format=convert(self.layers, AUTO))
        self.capabilities = replace(self.capabilities, linear_layers=summary(self.layers))
        self._known = torch.zeros(can.vocab_size, dtype=torch.bool)
        self._known[vocabulary] = True
        self._turns = self.network.turns(torch.arange(0, device=can.device))
        self._rows: Rows[HeadRow] = Rows(1)
        self.cache_bytes, self.pass_seconds = free_bytes(can.device) // 2, 0.0

    @property
    def network(self) -> HeadNetwork:
        """The trained part."""
        return cast(HeadNetwork, self.layers["network"])

    def own(self, row: Row) -> HeadRow:
        """``row``, if it is open and this model's; else a ``CacheError``."""
        return self._rows.own(row)

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens at once."""
        self._rows.cache.reserve(rows, tokens)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``."""
        return bytes_of(lengths, self.capabilities.slot_bytes) <= self.cache_bytes

    def open(self) -> HeadRow:
        """A new row (``LanguageModel.open``)."""
        row = HeadRow(
            slot=len(self._rows),
            length=0,
            logits=self._zeros(0),
            parents=NO_NODES,
            predicted=self._zeros(1, self.network.config.hidden_size),
            tokens=self.vocabulary,
            extra=self.nothing,
            extra_bias=None if self.layers["output"].bias is None else self._zeros(0),
            known=self._known.clone(),
        )
        self._rows.add(row)
        return row

    @property
    def nothing(self) -> Tensor:
        """[0, H] no hidden states."""
        return self._zeros(0, self.network.config.hidden_size)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.capabilities.dtype, device=self.capabilities.device)

    @torch.inference_mode()
    def advance(self, rows: Sequence[HeadRow], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """Commit tokens of the target, in one pass (``DraftHead.advance``)."""
        began = time.perf_counter()
        for row in rows:
            self.commit(row, [])
        fresh = [b for b, new in enumerate(tokens) if len(new)]
        if fresh:
            self._feed([rows[b] for b in fresh], [tokens[b] for b in fresh], [features[b] for b in fresh])
        logits = self._logits(rows, [row.predicted for row in rows])[:, 0]
        self.pass_seconds += time.perf_counter() - began
        return logits

    def _feed(self, rows: Sequence[HeadRow], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        """Append tokens to each row, with the hidden states before them, in one pass."""
        device, counts = self.capabilities.device, [len(new) for new in tokens]
        self._rows.place(rows, counts, device)
        at = self._rows.cache.placement
        positions = [torch.arange(row.length, row.length + n) for row, n in zip(rows, counts, strict=True)]
        inputs = torch.stack([torch.cat(list(tokens)), torch.cat(positions)])
        states, queries, keys, values = self._read(inputs, torch.cat(list(features)))
        # Only the last token of each row is scored: no others need their queries.
        lasts, total = torch.zeros((2, at.count), dtype=torch.int64), 0
        for row, n in zip(rows, counts, strict=True):
            total += n
            lasts[:, row.slot - at.first] = torch.tensor([total - 1, row.length + n - 1])
        last, end = lasts.to(device, non_blocking=True)
        mask = torch.arange(keys.shape[2], device=device) <= end[:, None, None, None] if at.count > 1 else None
        found = attend_as_one(queries[0, last][:, :, None], keys, values, mask, None)
        predicted = self._finish(states[0, last][:, None], found)
        for row, new in zip(rows, tokens, strict=True):
            row.predicted = predicted[row.slot - at.first]
            row.length += len(new)
            self._learn(row, new)

    @torch.inference_mode()
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes], features: Sequence[Tensor] | None = None) -> Tensor:
        """Append uncommitted nodes to each row in one pass (``DraftHead.extend``)."""
        began = time.perf_counter()
        own, device, are_text = [self.own(row) for row in rows], self.capabilities.device, features is not None
        if features is None and not any(row.length for row in own):
            features = [self._zeros(len(new.tokens), self.network.config.hidden_size) for new in nodes]
        elif features is None:
            for row, new in zip(own, nodes, strict=True):
                if bool((new.parents >= row.parents.shape[0]).any()):
                    raise CacheError("the parent of a node comes with it: its hidden state is not predicted yet")
            befores = [(new.parents + 1).to(device, non_blocking=True) for new in nodes]
            features = [row.predicted.index_select(0, before) for row, before in zip(own, befores, strict=True)]
        grown, inputs, (mask,) = self._rows.place_nodes(own, nodes, device)
        states, queries, keys, values = self._read(inputs, torch.cat(list(features)))
        at = self._rows.cache.placement
        lines = padded(queries.transpose(1, 2), at.count, at.sources)
        found = attend_as_one(lines, keys, values, mask.to(device, non_blocking=True), None)
        predicted = self._finish(states, packed(found, at.index, at.sources))[0]
        fresh = predicted.split([new.tokens.shape[0] for new in nodes])
        for row, parents, part in zip(own, grown, fresh, strict=True):
            row.parents, row.predicted = parents, torch.cat([row.predicted, part])
        if are_text:
            for row, new in zip(own, nodes, strict=True):
                self._learn(row, new.tokens)
        logits = self._logits(own, [part[len(part) - new.logits :] for part, new in zip(fresh, nodes, strict=True)])
        self.pass_seconds += time.perf_counter() - began
        return logits

    def _read(self, inputs: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the layer computes before attention.

        Args:
            inputs: [2, T] tokens and positions, on the CPU.
            features: [T, H] hidden states before them.

        Returns:
            [1, T, H] its input; [1, T, heads, D] queries; [B, kv_heads, S, D] keys and values of all slots.
        """
        cache, device = self._rows.cache, self.capabilities.device
        if self._turns.shape[0] < cache.placement.slots:
            self._turns = self.network.turns(torch.arange(cache.placement.slots, device=device))
        tokens, positions = inputs.to(device, non_blocking=True)
        states = self.network.read(self._target.embeddings(tokens)[None], features[None])
        queries, keys, values = self.network.attend_with(states, self._turns[positions[None]])
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2), 0)
        return states, queries, keys, values

    def _finish(self, inputs: Tensor, found: Tensor) -> Tensor:
        """[B, n, H] predictions, of the layer's input and what attention gave [B, n, heads, D]."""
        return self.network.finish(inputs, found.flatten(2))

    def _logits(self, rows: Sequence[HeadRow], predicted: Sequence[Tensor]) -> Tensor:
        """[B, n, K] logits of [n, H] predictions, each over its row's draft vocabulary; -inf beyond it."""
        height, width = max(p.shape[0] for p in predicted), max(row.tokens.shape[0] for row in rows)
        width, output = -(-width // _GRAIN) * _GRAIN, self.layers["output"].forward
        parts = []
        for row, states in zip(rows, predicted, strict=True):
            logits = output(states)
            if row.extra.shape[0]:
                logits = torch.cat([logits, linear(states, row.extra, row.extra_bias)], dim=-1)
            parts.append(pad(logits, (0, width - logits.shape[1], 0, height - logits.shape[0]), value=float("-inf")))
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def _learn(self, row: HeadRow, tokens: Tensor) -> None:
        """Add a text's tokens to its row's draft vocabulary."""
        new = tokens[~row.known[tokens]].unique()
        if len(new):
            row.known[new] = True
            ids = new.to(self.capabilities.device)
            row.tokens = torch.cat([row.tokens, ids])
            weight, bias = self._target.output_rows(ids)
            row.extra = torch.cat([row.extra, weight.to(row.extra)])
            if bias is not None and row.extra_bias is not None:
                row.extra_bias = torch.cat([row.extra_bias, bias.to(row.extra)])

    @torch.inference_mode()
    def commit(self, row: Row, path: Sequence[int]) -> None:
        """Keep uncommitted nodes as they were drafted (``LanguageModel.commit``)."""
        own = self.own(row)
        last = self._rows.commit(own, path)
        own.predicted = own.predicted[last + 1 : last + 2]

    @torch.inference_mode()
    def fork(self, row: Row, length: int | None = None) -> HeadRow:
        """A new row with the same committed tokens (``LanguageModel.fork``).

        Raises:
            CacheError: fewer are wanted, whose last prediction is not kept.
        """
        own = self.own(row)
        if length not in (None, own.length):
            raise CacheError(f"cannot fork {length} tokens of a row of {own.length} in a head: read them again")
        other = replace(own, parents=NO_NODES, predicted=own.predicted[:1], known=own.known.clone())
        self._rows.fork(own, other)
        return other

    @torch.inference_mode()
    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``)."""
        self._rows.close(self.own(row))
