"""Toys that can be enumerated: a Markov language model, a scorer that follows a script, and a chi-square test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftree.config import Budget
from draftree.drafters.base import Scorer, UnscoredNode
from draftree.drafters.grow import grow
from draftree.errors import CacheError
from draftree.models.base import FINAL_STATE, Capabilities, FeatureSpec, LanguageModel, Nodes, Row
from draftree.models.huggingface.cache import FeatureRow, feature_row
from draftree.models.protocols import LayerSizes
from draftree.policies.base import Candidates, GrowthPolicy
from draftree.scores import LastScores, NumpyScores, Scores
from draftree.tree import ROOT, DraftTree

torch.set_num_threads(1)
"""Toys are several times slower on more threads, above all on a busy machine."""

Path = tuple[int, ...]
"""Tokens from the root (left out) down to a node; () is the root."""


def chain_tree(tokens: Sequence[int], logprob: float = 0.0) -> DraftTree:
    """Tokens in order, each the child of the one before, of this draft log-probability."""
    depths = [*range(1, len(tokens) + 1)]
    paths = [logprob * depth for depth in depths]
    return DraftTree([*tokens], [*range(ROOT, len(tokens) + ROOT)], depths, paths, [0.0] * len(tokens))


class ToyModel(LanguageModel):
    """A ``LanguageModel`` whose next-token logits depend on the last two tokens and on the position.

    Attributes:
        most_tokens: of rows that can be open together (``holds``); None: any number.

    Args:
        vocab: V.
        seed: of its tables; the global random state is left alone.
        spread: standard deviation of the logits, roughly: the larger, the surer it is.
        max_length: most tokens of one request.
        eos_ids: tokens that end a request.
        dtype: of ``after``, whose numbers float32 can hold; float64 for exact enumeration.
    """

    grows_by_row = True

    def __init__(
        self,
        vocab: int = 5,
        seed: int = 0,
        *,
        spread: float = 1.5,
        max_length: int = 64,
        eos_ids: frozenset[int] = frozenset(),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        scale = spread / 2**0.5
        self._pairs = torch.randn((vocab + 1, vocab, vocab), generator=rng, dtype=torch.float64) * scale
        self._places = torch.randn((max_length, vocab), generator=rng, dtype=torch.float64) * scale
        self.most_tokens: int | None = None
        self._dtype = dtype
        self._rows: list[FeatureRow] = []
        self._scores = LastScores()
        self._ids: dict[Row, list[int]] = {}
        self._nodes: dict[Row, list[int]] = {}
        self.capabilities = Capabilities(
            name="toy",
            architecture="ToyModel",
            parameters=self._pairs.numel() + self._places.numel(),
            max_length=max_length,
            max_length_reason="as it was made",
            vocab_size=vocab,
            eos_ids=eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            engine="toy 1",
            tier="torch",
            threads=1,
            weights=self._pairs.numel(),
            weight_bytes=self._pairs.numel(),
        )

    def after(self, ids: Sequence[int]) -> Tensor:
        """[V] logits of the token that follows ``ids``."""
        before = ids[-2] if len(ids) > 1 else self.capabilities.vocab_size
        return (self._pairs[before, ids[-1]] + self._places[len(ids) - 1]).float().to(self._dtype)

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing to reserve."""

    def holds(self, lengths: Sequence[int]) -> bool:
        """See ``LanguageModel``: at most ``most_tokens`` at once."""
        return self.most_tokens is None or sum(lengths) <= self.most_tokens

    def open(self) -> Row:
        """See ``LanguageModel``."""
        return self._add([])

    def _add(self, ids: list[int]) -> FeatureRow:
        row = FeatureRow(number=len(self._rows), length=len(ids))
        self._rows.append(row)
        self._ids[row], self._nodes[row] = ids, []
        return row

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """See ``LanguageModel``."""
        logits = self._logits(rows, nodes)
        self._scores.expire()
        found = np.zeros((0, self.capabilities.vocab_size), np.float32)
        if logits:
            found = torch.stack(logits).float().numpy()
        return self._scores.keep(NumpyScores(found, [new.scored for new in nodes]))

    def _logits(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> list[Tensor]:
        """Those after the wanted nodes."""
        can, logits, grown = self.capabilities, list[Tensor](), []
        for row, new in zip(rows, nodes, strict=True):
            tokens = self._nodes[row] + new.tokens
            parents = row.parents + new.parents
            for i in range(len(new.tokens)):
                ids = self._ids[row] + _path(tokens, parents, len(row.parents) + i)
                if len(ids) > can.max_length:
                    raise CacheError(f"a node at position {len(ids) - 1} is beyond toy's {can.max_length} tokens")
                if i >= len(new.tokens) - new.scored:
                    logits.append(self.after(ids))
            grown.append((row, tokens, parents))
        for row, tokens, parents in grown:
            self._nodes[row], row.parents = tokens, parents
        return logits

    def commit(self, row: Row, path: Sequence[int]) -> None:
        """See ``LanguageModel``."""
        row.check_path(path)
        self._ids[row] += [self._nodes[row][node] for node in path]
        self._nodes[row] = []
        row.length, row.parents = len(self._ids[row]), []

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """See ``LanguageModel``."""
        parents = row.pruned(keep, trunk)
        kept = [self._nodes[row][node] for node in keep]
        self._ids[row] += kept[:trunk]
        self._nodes[row] = kept[trunk:]
        row.length, row.parents = len(self._ids[row]), parents

    def fork(self, row: Row, length: int | None = None) -> FeatureRow:
        """See ``LanguageModel``."""
        return self._add(self._ids[row][:length])

    def close(self, row: Row) -> None:
        """See ``LanguageModel``; the last row takes its number."""
        moved = self._rows.pop()
        if moved is not row:
            self._rows[row.number], moved.number = moved, row.number
        row.number = -1
        del self._ids[row], self._nodes[row]


class ToyFeatureModel(ToyModel):
    """A toy with hidden states, of size V: its logits without the biases of its output layer.

    Args:
        weight_format: that it names; its tables have none.
    """

    def __init__(self, vocab: int = 6, seed: int = 0, *, weight_format: str = "stock") -> None:
        super().__init__(vocab, seed)
        self.capabilities = replace(self.capabilities, weight_format=weight_format)
        rng = torch.Generator().manual_seed(seed + 1)
        self.table = torch.randn((vocab, vocab), generator=rng)
        self.bias = torch.randn(vocab, generator=rng)
        self.hidden_size, self.layers, self._tracked = vocab, 0, FeatureSpec()

    @property
    def tracked(self) -> FeatureSpec:
        """See ``LanguageModel``."""
        return self._tracked

    def track_features(self, wanted: FeatureSpec = FINAL_STATE) -> None:
        """See ``FeatureModel``: it has final ones alone."""
        assert wanted == FINAL_STATE
        self._tracked = wanted

    def embeddings(self, ids: Tensor) -> Tensor:
        """See ``FeatureModel``."""
        return self.table[ids]

    def embedding_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See ``FeatureModel``."""
        found: NDArray[np.float32] = self.table[torch.from_numpy(ids)].numpy()
        return found

    def output_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``FeatureModel``: the unit matrix."""
        return torch.eye(self.hidden_size)[ids], self.bias[ids]

    @property
    def layer_sizes(self) -> LayerSizes:
        """See ``FeatureModel``: those that its head has."""
        return LayerSizes(1, 1, self.hidden_size, self.hidden_size)

    def hidden_states(self, row: Row) -> Tensor:
        """See ``FeatureModel``."""
        return feature_row(row).last_features()

    @property
    def rows(self) -> int:
        """See ``FeatureModel``."""
        return len(self._rows)

    def free_cache(self) -> None:
        """Do nothing: a closed row holds nothing."""

    def _logits(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> list[Tensor]:
        if not self.tracked:
            return super()._logits(rows, nodes)
        every, found = super()._logits(rows, [replace(new, wanted=None) for new in nodes]), list[Tensor]()
        for row, new in zip(rows, nodes, strict=True):
            own, every = every[: len(new.tokens)], every[len(new.tokens) :]
            feature_row(row).add_features(torch.stack(own) - self.bias, self.tracked)
            found += own[len(own) - new.scored :]
        return found

    def commit(self, row: Row, path: Sequence[int]) -> None:
        """See ``LanguageModel``."""
        super().commit(row, path)
        feature_row(row).keep_features(path, len(path), torch.tensor([*path], dtype=torch.int64))

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        """See ``LanguageModel``."""
        super().prune(row, keep, trunk)
        feature_row(row).keep_features(keep, trunk, torch.tensor([*keep], dtype=torch.int64))

    def fork(self, row: Row, length: int | None = None) -> FeatureRow:
        """See ``LanguageModel``."""
        other = super().fork(row, length)
        other.features = feature_row(row).first_features(other.length)
        return other


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    return [] if node == ROOT else [*_path(tokens, parents, parents[node]), tokens[node]]


def distribution(model: ToyModel, prompt: Sequence[int], length: int) -> Tensor:
    """[V] * length float64: exact probability of each continuation of ``prompt`` by ``length`` tokens."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    p = model.after(prompt).double().softmax(-1)
    return torch.stack([p[y] * distribution(model, [*prompt, y], length - 1) for y in range(len(p))])


Script = Callable[[int, Path], tuple[Sequence[int], Sequence[float], float]]
"""(row, path) -> tokens, their log-probs in descending order, -inf where there is none, and the entropy."""


class ScriptedScorer(Scorer):
    """A ``Scorer`` that reads its candidates from a script.

    Attributes:
        calls: what each call asked about, as (row, path).
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._paths: dict[tuple[int, int], Path] = {}
        self.calls: list[list[tuple[int, Path]]] = []

    @property
    def scored(self) -> list[tuple[int, Path]]:
        """All that it was asked about but the roots."""
        return [asked for call in self.calls for asked in call if asked[1]]

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """See ``Scorer``."""
        assert [n.request for n in nodes] == sorted(n.request for n in nodes)
        asked = []
        for b, node, parent, token in nodes:
            self._paths[b, node] = () if node == ROOT else (*self._paths[b, parent], token)
            asked.append((b, self._paths[b, node]))
        return self._ask(asked, width)

    def _ask(self, asked: list[tuple[int, Path]], width: int) -> list[Candidates]:
        self.calls.append(asked)
        found = []
        for tokens, logprobs, entropy in (self._script(b, path) for b, path in asked):
            finite = [logprob for logprob in logprobs[:width] if logprob > -math.inf]
            found.append(Candidates(list(tokens)[: len(finite)], finite, entropy))
        return found


def trees_of(scorer: Scorer, policy: GrowthPolicy, budgets: Sequence[Budget]) -> list[DraftTree]:
    """The trees alone of what ``grow`` gives."""
    return [grown.tree for grown in grow(scorer, policy, policy.plan([], budgets))]


def chi_square(counts: Tensor, distribution: Tensor) -> float:
    """p-value of Pearson's test that ``counts`` were drawn from ``distribution``, both flat; cells under 5 are merged.

    0 when a cell of probability 0 was hit; 1 when a single cell is left.
    """
    counts, expected = counts.double(), distribution.double() * counts.sum()
    if bool(counts[expected == 0].any()):
        return 0.0
    small = expected < 5
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
