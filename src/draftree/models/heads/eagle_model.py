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

from ...errors import CacheError
from ...scores import LastScores, Scores
from ...tree import ROOT
from ..base import STOCK, FeatureSpec, LanguageModel, Nodes, Row
from ..huggingface.cache import Rows, bytes_of, feature_row
from ..huggingface.inspection import computing, fingerprint, free_bytes, torch_dtype
from ..huggingface.pass_inputs import BEFORE, NOTHING_FURTHER, Further, Longs, on_device
from ..huggingface.runner import GRAPH, Pass, PassOutput, runner_of
from ..huggingface.torch_scores import HeadScores
from ..protocols import FeatureModel, feature_model
from .eagle_network import EagleNetwork, HeadPasses

_BEST = 16
"""Most probable tokens that are found in the graph of a pass: trees seldom ask for more."""


@dataclass(slots=True, eq=False, kw_only=True)
class HeadRow(Row):
    """A sequence inside a draft head.

    Attributes:
        predicted: [1 + u, H] predicted states: of the last committed token, then of the uncommitted nodes.
        scored: [1, H] state of the last committed token from which its logits are computed.
        further: [K - D] tokens of its draft vocabulary that are not in the head's own.
        known: [V] bool, which tokens are in either.
    """

    predicted: Tensor
    scored: Tensor
    further: Longs
    known: NDArray[np.bool_]


class HeadModel(LanguageModel):
    """A head that drafts for one target, as a ``LanguageModel``.

    The network is the model's own from then on: it moves to the target's device and dtype. Its passes are made as the
    target's are (``Capabilities.runner``); where those are graphs, the candidates of a greedy draft are in its own.

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
        can, config, layers = target.capabilities, network.config, len(network.layers)
        self.vocabulary = vocabulary.numpy(force=True)
        parameters, weights = sum(p.numel() for p in network.parameters()), fingerprint(network.parameters())
        self._extends = network.lm_head is None
        output = network.lm_head or output_for(self._target, vocabulary.to(can.device))
        network.lm_head = None
        self.layers = nn.ModuleDict({"network": network, "output": output})
        self.layers.to(can.device, torch_dtype(can)).eval().requires_grad_(False)
        self.capabilities = replace(
            can,
            **computing(self.layers.parameters(), can.device),
            name=name,
            architecture=type(self).__name__,
            parameters=parameters,
            attention="sdpa",
            trees="",
            weight_format=STOCK,
            slot_bytes=2 * layers * config.kv_heads * config.head_size * torch_dtype(can).itemsize,
            fingerprint=weights,
        )
        self._known = np.zeros(can.vocab_size, np.bool_)
        self._known[self.vocabulary] = True
        best = 1 << min(_BEST, len(self.vocabulary)).bit_length() - 1 if can.runner == GRAPH else 0
        self._passes = HeadPasses(network, output, self.vocabulary, self._target, best)
        self._runner = runner_of(can.runner, self._passes)
        self._rows: Rows[HeadRow] = Rows(most=lambda: self.cache_bytes // self.capabilities.slot_bytes)
        self._scores = LastScores()
        self.cache_bytes, self.pass_seconds = free_bytes(can.device) // 2, 0.0

    @property
    def features(self) -> FeatureSpec:
        """Which hidden states of the target it reads."""
        return self.network.features

    def checked(self, row: Row) -> HeadRow:
        """``row``, if it is open and this model's; else a ``CacheError``."""
        return self._rows.checked(row)

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens at once."""
        self._rows.cache.reserve(rows, self._runner.slots(tokens))

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``."""
        slots = self._runner.slots(max(lengths, default=0))
        return bytes_of([slots] * len(lengths), self.capabilities.slot_bytes) <= self.cache_bytes

    def open(self) -> HeadRow:
        row = HeadRow(
            predicted=self._zeros(1, self.network.sizes[0]),
            scored=self._zeros(1, self.network.sizes[0]),
            further=NOTHING_FURTHER.tokens,
            known=self._known.copy(),
        )
        self._rows.add(row)
        return row

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """[n, F] hidden states of the target -> [n, H] states."""
        return self.network.fused(features)

    def vocabulary_of(self, row: Row) -> NDArray[np.int64]:
        return np.concatenate([self.vocabulary, self.checked(row).further])

    @torch.inference_mode()
    def read(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], targets: Sequence[Row]) -> Scores:
        none = self._zeros(0, self.network.sizes[1])
        features = list[Tensor]()
        for row, text, target in zip(rows, texts, targets, strict=True):
            new = feature_row(target).last_features(target.length - row.length, self.features) if len(text) else none
            features.append(new[: len(text)])
        return self.advance([*map(self.checked, rows)], texts, features)

    def _timed(self, scores: HeadScores, began: float) -> HeadScores:
        self.pass_seconds += time.perf_counter() - began
        return self._scores.keep(scores)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(self.capabilities), device=self.capabilities.device)

    @torch.inference_mode()
    def advance(
        self, rows: Sequence[HeadRow], texts: Sequence[Sequence[int]], features: Sequence[Tensor]
    ) -> HeadScores:
        """Commit tokens of the target, in one pass; uncommitted nodes are dropped.

        Args:
            rows: open rows.
            texts: the tokens of each row; none for a row whose last token is scored again.
            features: for each row [n, F], the target's hidden states at the tokens before each of them.

        Returns:
            after each row's last token; -inf beyond its draft vocabulary.
        """
        began = time.perf_counter()
        self._scores.expire()
        for row in rows:
            self.commit(row, [])
        fresh, out = [b for b, text in enumerate(texts) if len(text)], None
        if fresh:
            fresh_rows, new = [rows[b] for b in fresh], [Nodes.chain(texts[b], 1) for b in fresh]
            for row, text in zip(fresh_rows, new, strict=True):
                self._learn(row, text.tokens)
            states = self.fused(torch.cat([features[b] for b in fresh]))
            out = self._append(fresh_rows, new, states)
            for row, text in zip(fresh_rows, new, strict=True):
                self.commit(row, range(len(text.tokens)))
        if out is None or len(fresh) < len(rows):
            every = np.arange(len(rows))
            out = self._scored(rows, torch.cat([row.scored for row in rows]), every, every)
        return self._timed(_scores(out, [1] * len(rows)), began)

    @torch.inference_mode()
    def _scored(self, rows: Sequence[HeadRow], states: Tensor, places: Longs, which: Longs) -> PassOutput:
        """What follows states at places, each of the row ``which``."""
        further = self._further(rows)
        tokens, room, at, state_rows = on_device(self.capabilities.device, *further, places, which)
        return self._passes.scored(states.index_select(0, at), tokens, room.view(further.places.shape), state_rows)

    @torch.inference_mode()
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """Append uncommitted nodes to each row in one pass (``LanguageModel.extend``).

        They read what was predicted before them, and zeros in rows that are empty: to measure passes.
        """
        began = time.perf_counter()
        self._scores.expire()
        own_rows = [self.checked(row) for row in rows]
        if any(row.length for row in own_rows):
            out = self._append_below(own_rows, nodes)
        else:
            zeros = self._zeros(sum(len(new.tokens) for new in nodes), self.network.sizes[0])
            out = self._append(own_rows, nodes, zeros)
        return self._timed(_scores(out, [new.scored for new in nodes]), began)

    def _append_below(self, rows: Sequence[HeadRow], nodes: Sequence[Nodes]) -> PassOutput:
        """Append nodes to each row, whose parents' states are predicted."""
        for row, new in zip(rows, nodes, strict=True):
            if max(new.parents, default=ROOT) >= len(row.parents):
                raise CacheError("the parent of a node comes with it: its hidden state is not predicted yet")
        ends = np.cumsum([0, *(len(row.predicted) for row in rows)])
        before = [end + parent + 1 for end, new in zip(ends, nodes, strict=False) for parent in new.parents]
        states = torch.cat([row.predicted for row in rows])
        return self._append(rows, nodes, states, np.array(before, np.int64))

    def _append(
        self,
        rows: Sequence[HeadRow],
        nodes: Sequence[Nodes],
        states: Tensor,
        before: Longs | None = None,
    ) -> PassOutput:
        """Append nodes to each row in one pass.

        Args:
            states: [P, H].
            before: [T] which of them is that of the token before each node; None: they come in the order of the nodes.
        """
        grown, inputs = self._rows.place(rows, nodes)
        inputs.table[BEFORE] = np.arange(inputs.count) if before is None else before
        inputs = replace(inputs, further=self._further(self._placed()))
        out = self._runner.forward(Pass(inputs, states=states), self._rows.cache)
        assert out.states is not None  # noqa: S101
        for row, parents, part in zip(rows, grown, out.states.split([len(new.tokens) for new in nodes]), strict=True):
            row.parents, row.predicted = parents, torch.cat([row.predicted, part])
        return out

    def _placed(self) -> Sequence[HeadRow]:
        at = self._rows.cache.placement
        return [*map(self._rows.at, range(at.first, at.first + at.count))]

    def _further(self, rows: Sequence[HeadRow]) -> Further:
        """What rows draft from besides the head's own vocabulary."""
        return Further.of([row.further for row in rows]) if self._extends else NOTHING_FURTHER

    def _learn(self, row: HeadRow, text: list[int]) -> None:
        """Add a text's tokens to its row's draft vocabulary, where they have rows in the output layer."""
        if self._extends:
            tokens = np.unique(text)
            new = tokens[~row.known[tokens]]
            row.known[new] = True
            row.further = np.concatenate([row.further, new])

    @torch.inference_mode()
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self.checked(row)
        self._rows.commit(row, path)
        last = path[-1] if len(path) else ROOT
        if last != ROOT:
            row.scored = row.predicted[last + 1 : last + 2]
        row.predicted = row.predicted[last + 1 : last + 2]

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
        source = self.checked(row)
        if length not in (None, source.length):
            raise CacheError(f"cannot fork {length} tokens of a row of {source.length} in a head: read them again")
        forked = replace(source, parents=[], predicted=source.predicted[:1], known=source.known.copy())
        self._rows.fork(source, forked)
        return forked

    @torch.inference_mode()
    def close(self, row: Row) -> None:
        self._rows.close(self.checked(row))


def _scores(out: PassOutput, counts: Sequence[int]) -> HeadScores:
    """Scores of what a pass has found, ``counts`` of each row."""
    assert out.ids is not None  # noqa: S101
    return HeadScores(out.logits, out.ids, counts, out.best)


def output_for(target: FeatureModel, vocabulary: Tensor) -> nn.Linear:
    """A target's output layer for [D] of its tokens."""
    weight, bias = target.output_rows(vocabulary)
    output = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        output.bias = nn.Parameter(bias, requires_grad=False)
    return output
