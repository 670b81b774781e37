"""A drafting model: any ``LanguageModel`` with the target's vocabulary.

Its KV cache is kept: accepted nodes that it has seen are committed, never fed again. What it has not seen (the leaf
that ended a fully accepted path, and the target's bonus token) is fed as a short chain when the next proposal starts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import Budget
from ..models.base import LanguageModel, Nodes, Row
from ..sampling import warp_rows
from ..sequence import Sequence
from ..tree import ROOT, DraftLaw
from .base import Outcome
from .drawing import Drawing, Drawn, Key, draw
from .policy import Candidates
from .source import Grown, Scorer, Source

_FLOOR = torch.finfo(torch.float32).min
_CHUNK = 8
"""Nodes whose laws are computed at once: bounds what is allocated beyond the logits."""


@dataclass(slots=True)
class _State:
    """One sequence inside the drafting model.

    Attributes:
        row: its row in the model; ``row.length`` tokens of the sequence are committed there.
        numbers: tree node -> number among the row's uncommitted nodes.
    """

    row: Row
    numbers: dict[int, int] = field(default_factory=dict)

    def rename(self, numbers: Tensor) -> None:
        """Follow the tree's pruning: its node i was node ``numbers[i]`` of the pool."""
        old, self.numbers = self.numbers, {}
        for new, number in enumerate([ROOT, *numbers.tolist()], start=ROOT):
            if number in old:
                self.numbers[new] = old[number]


@dataclass(slots=True)
class ModelSource(Source):
    """Asks a language model.

    The draft law is the model's at the sequence's temperature (1 when it decodes greedily), before top-k and top-p:
    those change which drafts are worth making, not which are right. Where children are drawn it is warped in full, as
    the target's.

    Attributes:
        model: the drafting model; it says nothing of a sequence that has outgrown its context.
        vocab_size: the target's; logits beyond it (padding of the output layer) are cut off.
        passes: see ``Source``.
    """

    model: LanguageModel = field()
    vocab_size: int
    passes: int = 0
    _states: dict[Sequence, _State] = field(default_factory=dict, repr=False)

    def fit(self, sequence: Sequence, budget: Budget) -> Budget:
        """The part that lies within the model's context."""
        room = max(0, self.model.capabilities.max_length - len(sequence.ids))
        return Budget(budget.nodes, room if budget.depth is None else min(room, budget.depth))

    def begin(self, sequences: Many[Sequence], drawing: Drawing) -> Scorer:
        """Drop what a failed step may have left behind; a new sequence's prompt is fed when its root is asked for."""
        for known in filter(None, map(self._states.get, sequences)):
            self.model.commit(known.row, [])
            known.numbers.clear()
        return _ModelScorer(self, sequences, drawing)

    def settle(self, sequences: Many[Sequence], grown: Many[Grown]) -> None:
        """Follow the trees' pruning."""
        for sequence, (_, numbers) in zip(sequences, grown, strict=True):
            if state := self._states.get(sequence):
                state.rename(numbers)

    def observe(self, outcomes: Many[Outcome]) -> None:
        """Commit what was fed and accepted: tokens that were waiting, then nodes until one that was never fed."""
        for outcome in outcomes:
            state = self._states.get(outcome.sequence)
            if state is None:
                continue
            waiting = state.numbers.get(ROOT, -1) + 1
            path = [state.numbers[n] for n in outcome.path if n in state.numbers]
            self.model.commit(state.row, [*range(waiting), *path])
            state.numbers.clear()

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence's row."""
        if sequence in self._states:
            self.model.close(self._states.pop(sequence).row)


class _ModelScorer:
    """Scores nodes of the trees under construction by model passes over them."""

    def __init__(self, source: ModelSource, sequences: Many[Sequence], drawing: Drawing) -> None:
        self._source = source
        self._sequences = sequences
        self._drawing = drawing
        self._asked: list[tuple[Sequence, int]] = []  # whose laws were computed last, and of which node
        self._laws = torch.zeros(0)

    def _state(self, row: int) -> _State:
        return self._source._states[self._sequences[row]]

    def _opened(self, row: int) -> _State:
        """The state of a sequence that may be new."""
        sequence, source = self._sequences[row], self._source
        if sequence not in source._states:
            source.model.reserve(1, sequence.prompt_length + (sequence.params.max_tokens or 0))
            source._states[sequence] = _State(source.model.open(sequence.ids[:-1]))
        return source._states[sequence]

    def score_roots(self, rows: Many[int], width: int) -> Candidates:
        """Feed each sequence's waiting tokens; the last of them is the root."""
        nodes = []
        for b in rows:
            state = self._opened(b)
            waiting = self._sequences[b].ids[state.row.length :]
            state.numbers[ROOT] = len(waiting) - 1
            nodes.append(Nodes.chain(waiting))
        self._asked = [(self._sequences[b], ROOT) for b in rows]
        last = torch.tensor([len(n.tokens) - 1 for n in nodes])
        return self._candidates(rows, nodes, torch.arange(len(rows)), last, width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked, batch = rows.unique_consecutive(return_inverse=True)
        fed = []
        for k, b in enumerate(asked.tolist()):
            own, state = batch == k, self._state(b)
            numbers = state.numbers
            above = torch.tensor([numbers[p] for p in parents[own].tolist()])
            start = state.row.parents.shape[0]
            numbers.update((n, start + i) for i, n in enumerate(nodes[own].tolist()))
            fed.append(Nodes(tokens[own], above))
        self._asked = [(self._sequences[b], n) for b, n in zip(rows.tolist(), nodes.tolist(), strict=True)]
        counts = torch.bincount(batch)
        column = torch.arange(rows.shape[0]) - (counts.cumsum(0) - counts)[batch]
        return self._candidates(asked.tolist(), fed, batch, column, width)

    @torch.inference_mode()
    def _candidates(self, rows: Many[int], nodes: Many[Nodes], batch: Tensor, column: Tensor, width: int) -> Candidates:
        """One pass; the law at entries (batch, column) of its logits, in one transfer to the host."""
        logits = self._source.model.extend([self._state(b).row for b in rows], nodes)[..., : self._source.vocab_size]
        self._source.passes += 1
        params = [sequence.params for sequence, _ in self._asked]
        scale = torch.tensor([1 / (p.temperature or 1.0) for p in params])[:, None].to(logits.device, non_blocking=True)
        batch, column = torch.stack([batch, column]).to(logits.device, non_blocking=True)
        parts, laws = [], []
        for at in range(0, batch.shape[0], _CHUNK):
            chunk = slice(at, at + _CHUNK)
            raw = logits[batch[chunk], column[chunk]].float()
            if self._drawing is Drawing.TOP:
                law = (raw * scale[chunk]).log_softmax(-1)
            else:
                law = warp_rows(raw, params[chunk]).log_softmax(-1)
                laws.append(law.clone())
            top = law.topk(min(width, law.shape[-1]))
            p = law.exp()
            entropy = -torch.linalg.vecdot(p, law.clamp_(min=_FLOOR))  # 0 log 0 = 0
            parts.append(torch.cat([top.indices.double(), top.values.double(), entropy[:, None].double()], dim=1))
        if laws:
            self._laws = torch.cat(laws)
        tokens, logprobs, entropies = torch.cat(parts).cpu().tensor_split([(parts[0].shape[1] - 1) // 2, -1], dim=1)
        return Candidates(tokens.long(), logprobs.float(), entropies[:, 0].float())

    @torch.inference_mode()
    def draw(self, counts: Tensor) -> Drawn:
        """See ``Scorer``; one more transfer to the host."""
        asked = counts.tolist()
        tokens = torch.zeros((len(asked), max(asked)), dtype=torch.int64, device=self._laws.device)
        laws: list[DraftLaw | None] = [None] * len(asked)
        random = [f for f, (sequence, _) in enumerate(self._asked) if sequence.params.temperature and asked[f]]
        greedy = [f for f, (sequence, _) in enumerate(self._asked) if not sequence.params.temperature and asked[f]]
        for group, drawing in ((random, self._drawing), (greedy, Drawing.TOP)):
            if group:
                keys = [Key(s.seed, len(s.ids), node) for s, node in (self._asked[f] for f in group)]
                columns = draw(self._laws[group], [asked[f] for f in group], keys, drawing)
                tokens[group, : columns.shape[1]] = columns
        for f in random:
            laws[f] = DraftLaw(self._laws[f])
        found = torch.stack([tokens.double(), self._laws.gather(1, tokens).double()]).cpu()
        return Drawn(found[0].long(), found[1].float(), laws)
