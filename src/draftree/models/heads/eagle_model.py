"""HeadModel: a draft head behind the ``LanguageModel`` seam, with rows, tree masks and a cache of its own.

Tokens that the target has committed come with the target's hidden states (``advance``); drafted nodes take what was
predicted for their parent. Logits are over a row's draft vocabulary: the head's own, and where its output layer is the
target's what other tokens the row has seen, for a text repeats itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils import skip_init

from ...errors import CacheError
from ...scores import LastScores, Scores
from ...tree import ROOT
from ..base import NO_NODES, STOCK, Capabilities, FeatureSpec, LanguageModel, Nodes, Row
from ..huggingface.attention import attend_as_one
from ..huggingface.cache import Rows, TreeCache, bytes_of, packed, padded
from ..huggingface.features import feature_row
from ..huggingface.inspection import computing, fingerprint, free_bytes, torch_dtype
from ..huggingface.runner import Made, Pass, runner_of
from ..huggingface.torch_scores import HeadScores
from ..protocols import FeatureModel, feature_model
from .eagle_network import EagleNetwork

_GRAIN = 64
"""Logits come in multiples of this, filled up with -inf: their largest are found faster, chunk by chunk."""


@dataclass(slots=True, eq=False, kw_only=True)
class HeadRow(Row):
    """A sequence inside a draft head.

    Attributes:
        predicted: [1 + u, H] predicted states: of the last committed token, then of the uncommitted nodes.
        scored: [1, H] state of the last committed token from which its logits are computed.
        tokens: [K] int64 ids of its draft vocabulary.
        extra, extra_bias: [K - D, H] and [K - D] output weights and biases of those that are not in the head's own;
            None: there are no biases.
        known: [V] bool, which ids are in ``tokens``.
    """

    predicted: Tensor
    scored: Tensor
    tokens: Tensor
    extra: Tensor
    extra_bias: Tensor | None
    known: Tensor


class HeadModel(LanguageModel):
    """A head that drafts for one target, as a ``LanguageModel``.

    The network is the model's own from then on: its layers get other kernels (``settled``). Its passes are made as the
    target's are (``Capabilities.runner``), in graphs where those are, but for the output layer, whose vocabulary grows
    with the text.

    Attributes:
        vocabulary: [D] int64 ids that it always drafts from.
        layers: "network", the trained part, and "output", its output layer, or the target's for the vocabulary.
        capabilities: as the target's, whose tokens it takes.
        cache_bytes: memory that its cache may use (``holds``); by default half of what was free at load.
        pass_seconds: wall-clock seconds inside its passes so far (on an accelerator, of launching them).

    Raises:
        UnsupportedModelError: the target's hidden states cannot be read.
    """

    def __init__(self, network: EagleNetwork, vocabulary: Tensor, target: LanguageModel, name: str) -> None:
        self._target, self.network = feature_model(target), network
        self._target.track_features(network.features)
        can, (layers, heads, width) = target.capabilities, network.slot
        self.vocabulary = vocabulary.to(can.device)
        parameters, weights = sum(p.numel() for p in network.parameters()), fingerprint(network.parameters())
        self._extends, output = network.lm_head is None, network.lm_head or output_for(self._target, self.vocabulary)
        network.lm_head = None
        self.layers = nn.ModuleDict({"network": network, "output": output})
        self.capabilities = replace(
            settled(self.layers, target, name),
            architecture=type(self).__name__,
            parameters=parameters,
            slot_bytes=2 * layers * heads * width * torch_dtype(can).itemsize,
            fingerprint=weights,
        )
        self._known = torch.zeros(can.vocab_size, dtype=torch.bool)
        self._known[vocabulary] = True
        self._runner = runner_of(can.runner, HeadPasses(network, self._target, torch.device(can.device)))
        self._rows: Rows[HeadRow] = Rows(layers)
        self._scores = LastScores()
        self.cache_bytes, self.pass_seconds = free_bytes(can.device) // 2, 0.0

    @property
    def _device(self) -> torch.device:
        return torch.device(self.capabilities.device)

    @property
    def features(self) -> FeatureSpec:
        """Which hidden states of the target it reads."""
        return self.network.features

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
            predicted=self._zeros(1, self.network.sizes[0]),
            scored=self._zeros(1, self.network.sizes[0]),
            tokens=self.vocabulary,
            extra=self._zeros(0, self.network.sizes[0]),
            extra_bias=None if self.layers["output"].bias is None else self._zeros(0),
            known=self._known.clone(),
        )
        self._rows.add(row)
        return row

    @property
    def nothing(self) -> Tensor:
        """[0, F] no hidden states."""
        return self._zeros(0, self.network.sizes[1])

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """[n, F] hidden states of the target -> [n, H] states."""
        return self.network.fused(features)

    def vocabulary_of(self, row: Row) -> NDArray[np.int64]:
        """[K] the tokens of a row's logits (``DraftHead.vocabulary_of``)."""
        return self.own(row).tokens.cpu().numpy()

    @torch.inference_mode()
    def read(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], targets: Sequence[Row]) -> Scores:
        """Commit tokens of the target with its hidden states (``DraftHead.read``)."""
        own, features, last = [self.own(row) for row in rows], list[Tensor](), list[Tensor]()
        for row, text, target in zip(own, texts, targets, strict=True):
            ahead = target.length - row.length - len(text)  # the target has read the last token too
            some = len(text) + ahead
            states = feature_row(target).last_features(some, self.features) if some else self.nothing
            features.append(states[: len(text)])
            last.append(states[len(text) :])
        logits = self.advance(own, [torch.tensor(text, dtype=torch.int64) for text in texts], features)
        for row, states in zip(own, last, strict=True):
            if len(states):  # nodes below read them; the next proposal may begin there again
                row.predicted = self.fused(states)
                if self.network.predicts_features:
                    row.scored = row.predicted
        return self._kept(logits, own, [1] * len(own))

    def _kept(self, logits: Tensor, rows: Sequence[HeadRow], counts: Sequence[int]) -> Scores:
        width = logits.shape[1]
        each = [
            pad(row.tokens, (0, width - len(row.tokens))).expand(n, -1) for row, n in zip(rows, counts, strict=True)
        ]
        return self._scores.keep(HeadScores(logits, counts, each[0] if len(each) == 1 else torch.cat(each)))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(self.capabilities), device=self.capabilities.device)

    @torch.inference_mode()
    def advance(self, rows: Sequence[HeadRow], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """Commit tokens of the target, in one pass; uncommitted nodes are dropped.

        Args:
            rows: open rows.
            tokens: for each row [n] int64; none for a row whose last token is scored again.
            features: for each row [n, F], the target's hidden states at the tokens before each of them.

        Returns:
            [B, K] logits after each row's last token, over its draft vocabulary; -inf beyond its tokens.
        """
        began = time.perf_counter()
        for row in rows:
            self.commit(row, [])
        fresh = [b for b, new in enumerate(tokens) if len(new)]
        if fresh:
            self._feed([rows[b] for b in fresh], [tokens[b] for b in fresh], [features[b] for b in fresh])
        logits = self._logits(rows, [row.scored for row in rows])
        self.pass_seconds += time.perf_counter() - began
        return logits

    def _feed(self, rows: Sequence[HeadRow], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        """Append tokens to each row, with the hidden states before them, in one pass."""
        counts = [len(new) for new in tokens]
        self._rows.place(rows, counts, self._device)
        positions = [torch.arange(row.length, row.length + n) for row, n in zip(rows, counts, strict=True)]
        inputs = torch.stack([torch.cat(list(tokens)), torch.cat(positions)])
        predicted = self._read_text(rows, counts, inputs, self.fused(torch.cat(list(features))))
        for row, new, state in zip(rows, tokens, predicted, strict=True):
            row.predicted = row.scored = state
            row.length += len(new)
            self._learn(row, new)

    def _read_text(
        self, rows: Sequence[HeadRow], counts: Sequence[int], inputs: Tensor, states: Tensor
    ) -> Sequence[Tensor]:
        """[1, H] states of each row's last token, of a pass over tokens that the target has committed.

        Only the last token of each row is scored: no others need their queries of the last layer.

        Args:
            rows, counts: placed in the cache, ``counts`` tokens for each.
            inputs: [2, T] their tokens and positions, on the CPU.
            states: [T, H] of the tokens before them.
        """
        at, device = self._rows.cache.placement, self._device
        lasts, total, lines = torch.zeros((2, at.count), dtype=torch.int64), 0, [row.slot - at.first for row in rows]
        for row, line, n in zip(rows, lines, counts, strict=True):
            total += n
            lasts[:, line] = torch.tensor([total - 1, row.length + n - 1])
        last, end = lasts.to(device, non_blocking=True)
        mask = torch.arange(at.end, device=device) <= end[:, None, None, None] if at.count > 1 else None
        tokens, positions = inputs.to(device, non_blocking=True)
        step = Pass(tokens, positions, last, mask, states=states, lasts=True)
        predicted = self._runner.forward(step, self._rows.cache)[1]
        return [predicted[line : line + 1] for line in lines]

    @torch.inference_mode()
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes], states: Sequence[Tensor] | None = None) -> Scores:
        """Append uncommitted nodes to each row in one pass (``LanguageModel.extend``).

        Args:
            states: for each row [n, H], of the tokens before the nodes; None: what was predicted there, and zeros in
                rows that are empty: to measure passes.
        """
        began = time.perf_counter()
        own, device, are_text = [self.own(row) for row in rows], self._device, states is not None
        if states is None and not any(row.length for row in own):
            states = [self._zeros(len(new.tokens), self.network.sizes[0]) for new in nodes]
        elif states is None:
            for row, new in zip(own, nodes, strict=True):
                if (new.parents >= len(row.parents)).any():
                    raise CacheError("the parent of a node comes with it: its hidden state is not predicted yet")
            befores = [torch.from_numpy(new.parents + 1).to(device, non_blocking=True) for new in nodes]
            states = [row.predicted.index_select(0, before) for row, before in zip(own, befores, strict=True)]
        grown, inputs, (mask,) = self._rows.place_nodes(own, nodes, device)
        counts = [len(new.tokens) for new in nodes]
        predicted = self._read_nodes(own, counts, inputs, torch.cat(list(states)), mask.to(device, non_blocking=True))
        fresh = predicted.split(counts)
        for row, parents, part in zip(own, grown, fresh, strict=True):
            row.parents, row.predicted = parents, torch.cat([row.predicted, part])
        if are_text:
            for row, new in zip(own, nodes, strict=True):
                self._learn(row, torch.from_numpy(new.tokens.astype(np.int64)))
        logits = self._logits(own, [part[len(part) - new.scored :] for part, new in zip(fresh, nodes, strict=True)])
        self.pass_seconds += time.perf_counter() - began
        return self._kept(logits, own, [new.scored for new in nodes])

    @torch.inference_mode()
    def extend_below(
        self, rows: Sequence[Row], nodes: Sequence[Nodes], targets: Sequence[tuple[Row, Sequence[int]]]
    ) -> Scores:
        """Append uncommitted nodes, of which the target may have read the parents (``DraftHead.extend_below``)."""
        states = []
        for row, new, (target, read) in zip(map(self.own, rows), nodes, targets, strict=True):
            each = []
            for parent, node in zip(new.parents.tolist(), read, strict=True):
                if node == ROOT:
                    each.append(row.predicted[parent + 1])
                else:
                    state = feature_row(target).pending_feature(node, self.features)
                    each.append(self.fused(state[None])[0])
            states.append(torch.stack(each))
        return self.extend(rows, nodes, states)

    def _read_nodes(
        self, rows: Sequence[HeadRow], counts: Sequence[int], inputs: Tensor, states: Tensor, mask: Tensor
    ) -> Tensor:
        """[T, H] states of nodes, of a pass over them.

        Args:
            rows, counts, inputs, states: as of ``_read_text``.
            mask: [B, 1, width, S] bool, the slots that each node attends to.
        """
        tokens, positions = inputs.to(self._device, non_blocking=True)
        step = Pass(tokens, positions, slice(0, None), mask, states=states)
        return self._runner.forward(step, self._rows.cache)[1]

    def _logits(self, rows: Sequence[HeadRow], predicted: Sequence[Tensor]) -> Tensor:
        """[W, K] logits of the rows' [n, H] states, each over its row's draft vocabulary; -inf beyond it."""
        width, output = max(row.tokens.shape[0] for row in rows), self.layers["output"].forward
        width = -(-width // _GRAIN) * _GRAIN
        parts = []
        for row, states in zip(rows, predicted, strict=True):
            states = self.network.readout(states)
            logits = output(states)
            if row.extra.shape[0]:
                logits = torch.cat([logits, linear(states, row.extra, row.extra_bias)], dim=-1)
            parts.append(pad(logits, (0, width - logits.shape[1]), value=float("-inf")))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _learn(self, row: HeadRow, tokens: Tensor) -> None:
        """Add a text's tokens to its row's draft vocabulary, where they have rows in the output layer."""
        if not self._extends:
            return
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
        if last != ROOT:
            own.scored = own.predicted[last + 1 : last + 2]
        own.predicted = own.predicted[last + 1 : last + 2]

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """Commit a path (``LanguageModel.prune``): no drafted node outlives a proposal.

        Raises:
            CacheError: other nodes are to stay.
        """
        if len(keep) > trunk:
            raise CacheError(f"cannot keep {list(keep)}: a head keeps no drafted nodes, and {trunk} are committed")
        self.commit(row, keep)

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


class HeadPasses:
    """Makes the passes of one head (``EagerRunner``): of each wanted token they give the state that it predicts.

    Args:
        network: the head's network.
        target: whose embeddings it reads where it has none of its own.
        device: the device that it computes on.
    """

    splits, masks = False, torch.bool

    def __init__(self, network: EagleNetwork, target: FeatureModel, device: torch.device) -> None:
        self._network, self._target, self.device = network, target, device
        self._turns: Tensor | None = None

    def forward(self, step: Pass, cache: TreeCache) -> Made:
        """One pass (``Runner.forward``); [W, H] states, of all tokens or of the last ones (``Pass.lasts``)."""
        blocks, at = self._network.blocks, cache.placement
        states, turns = self._read(step, at.slots)
        if not step.lasts:
            for number in range(len(blocks)):
                states = self._through(number, states, turns, step.mask, cache)
            return None, self._network.predicted(states)[0]
        slots = torch.arange(at.end, device=self.device)
        for number in range(len(blocks) - 1):
            seen = slots <= padded(step.positions[None, None, :, None], at.count, at.sources)
            states = self._through(number, states, turns, seen, cache)
        queries, keys, values = self._attend_with(len(blocks) - 1, states, turns, cache)
        found = attend_as_one(queries[0, step.wanted][:, :, None], keys, values, step.mask, None)
        outputs = blocks[-1].finish(states[0, step.wanted][:, None], found.flatten(2))
        return None, self._network.predicted(outputs)[:, 0]

    def _read(self, step: Pass, slots: int) -> tuple[Tensor, Tensor]:
        """[1, T, I] what the first layer reads; [1, T, ...] rotations, of a table for all slots."""
        if self._turns is None or self._turns.shape[0] < slots:
            self._turns = self._network.turns(torch.arange(slots, device=self.device))
        embed = self._network.embed_tokens
        embedded = self._target.embeddings(step.tokens) if embed is None else embed.forward(step.tokens)
        states = self._network.read(embedded[None], step.states[None])  # type: ignore[index]
        return states, self._turns[step.positions[None]]

    def _attend_with(
        self, number: int, states: Tensor, turns: Tensor, cache: TreeCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[1, T, heads, D] queries of a layer; [B, kv_heads, S, D] keys and values of all slots."""
        queries, keys, values = self._network.blocks[number].attend_with(states, turns)
        return queries, *cache.update(keys.transpose(1, 2), values.transpose(1, 2), number)

    def _through(self, number: int, states: Tensor, turns: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
        """[1, T, I] -> [1, T, H] through a layer whose queries see what [B, 1, width, S] allows."""
        queries, keys, values = self._attend_with(number, states, turns, cache)
        at = cache.placement
        lines = padded(queries.transpose(1, 2), at.count, at.sources)
        found = packed(attend_as_one(lines, keys, values, mask, None), at.index, at.sources)
        return self._network.blocks[number].finish(states, found.flatten(2))


def output_for(target: FeatureModel, vocabulary: Tensor) -> nn.Linear:
    """A target's output layer for [D] of its tokens."""
    can, (weight, bias) = target.capabilities, target.output_rows(vocabulary)
    output = skip_init(
        nn.Linear, weight.shape[1], len(weight), bias is not None, device=can.device, dtype=torch_dtype(can)
    )
    with torch.no_grad():
        output.weight.copy_(weight)
        if bias is not None:
            output.bias.copy_(bias)
    return output  # type: ignore[no-any-return]


def settled(layers: nn.ModuleDict, target: LanguageModel, name: str) -> Capabilities:
    """Move the layers of a head to its target's device and dtype, and describe them."""
    can = target.capabilities
    layers.to(can.device, torch_dtype(can)).eval().requires_grad_(False)
    made = computing(layers.parameters(), can.device)
    return replace(can, **made, name=name, attention="sdpa", trees="", weight_format=STOCK)
