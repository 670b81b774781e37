"""A model that drafts for a target with another vocabulary, shown as one that has the target's.

What the target's tokens spell is read as the model's own tokens of the same bytes. A token that the model predicts
stands for the first token of the target's that its text is spelt with; what lies behind that one is expected next, and
takes no pass. Two tokens of the model's with the same first one add up.

Any draft is verified by the target: a bad translation costs time, and changes no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CacheError
from ..sampling.warping import Warping, log_sum_exp, noise_of, warp
from ..scores import Draft, Edits, LastScores, Scores, Slots, Top, allowed_tokens, draw_warped, edited
from ..text.translation import Ends, FirstTokens, TextReader
from ..tree import ROOT
from .base import LanguageModel, Nodes, Row

WINDOW = 1024
"""Tokens of the end of a text that it reads where it has read nothing of it."""
_MARGIN = 256
"""Tokens of its context that are kept free for a tree."""
_CANDIDATES, _MORE = 64, 256
"""Tokens of the model's that are translated, and those where its distribution is warped or constrained."""
_UNLIKELY = float(np.log(1e-4))
"""Tokens of a lower log-probability are left out where nothing rules the others out: each takes a search at first."""
_LEAST = 1e-30
"""Probability of a token that none of the model's stands for, where all are wanted: a constraint may allow no other."""


class _Rest(NamedTuple):
    """What a token of the model's spells behind the target's token that it stands for.

    Attributes:
        text: expected next.
        logprob: of that, if the target's token comes.
    """

    text: bytes
    logprob: float


class _Node(NamedTuple):
    """How far the model has read up to a node.

    Attributes:
        token: of the target.
        inner: its last token up to there, a number among the uncommitted ones; ROOT: its last committed token.
        depth: uncommitted tokens of its up to there.
        left: what is spelt behind that, and not read yet.
        rest: where it was expected, what is expected next; then no pass was made for it.
    """

    token: int
    inner: int
    depth: int
    left: bytes
    rest: _Rest | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class TranslatedRow(Row):
    """A sequence of the target's tokens.

    Attributes:
        inner: the model's row.
        tokens: that are committed.
        ends: of these; none of ``inner`` lie in text that was passed over.
        nodes: uncommitted ones.
        rests: node -> token below it -> what is expected behind that token.
    """

    inner: Row
    tokens: list[int] = field(default_factory=list)
    ends: Ends = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    rests: dict[int, dict[int, _Rest]] = field(default_factory=dict)

    @property
    def end(self) -> tuple[int, bytes]:
        """Of all tokens (``Ends``)."""
        return self.ends[-1] if self.ends else (0, b"")

    def inner_above(self, nodes: Iterable[int]) -> list[int]:
        """Uncommitted tokens of ``inner`` that some go on from, these included, in ascending order."""
        above, parents = set[int](), self.inner.parents
        for node in nodes:
            while node != ROOT and node not in above:
                above.add(node)
                node = parents[node]
        return sorted(above)

    def add(self, tokens: Sequence[int], ends: Ends) -> None:
        """Count more tokens among the committed ones."""
        self.tokens += tokens
        self.ends += ends
        self.length += len(tokens)


class _Pass(NamedTuple):
    """What a row adds to a pass.

    Attributes:
        tokens, parents: of the model's own.
        nodes: the row's new ones.
        places: of each that is scored: its last number in ``tokens``; None: nothing of it is read.
    """

    tokens: list[int]
    parents: list[int]
    nodes: list[_Node]
    places: list[int | None]

    @property
    def first(self) -> int:
        """From which of ``tokens`` on scores are wanted."""
        return min((place for place in self.places if place is not None), default=len(self.tokens))


class TranslatedModel(LanguageModel):
    """``LanguageModel`` of a target's token ids on a model of other ids.

    Args:
        inner: the model; it has a tokenizer.
        target: has a tokenizer.

    Attributes:
        text: reads the target's tokens as the model's.
        firsts: the target's tokens that the model's stand for.
    """

    def __init__(self, inner: LanguageModel, target: LanguageModel) -> None:
        assert inner.tokenizer is not None and target.tokenizer is not None  # noqa: S101
        self.inner, self.tokenizer = inner, target.tokenizer
        inner_can, can = inner.capabilities, target.capabilities
        self.capabilities = replace(
            inner_can,
            vocab_size=can.vocab_size,
            eos_ids=can.eos_ids,
            max_length=can.max_length,
            max_length_reason=can.max_length_reason,
        )
        self._most, self._scores = inner_can.max_length, LastScores()
        self.most_read = self._window = min(WINDOW, self._most // 2)
        self.text = TextReader(inner.tokenizer, inner_can.vocab_size, target.tokenizer, can.vocab_size)
        self.firsts = FirstTokens(self.text, inner_can.vocab_size, inner_can.eos_ids, can.eos_ids)

    @property
    def measured(self) -> LanguageModel:
        return self.inner.measured

    @property
    def pass_seconds(self) -> float:  # type: ignore[override]
        return self.inner.pass_seconds

    def share_threads(self, other: LanguageModel) -> None:
        self.inner.share_threads(other)

    def reserve(self, rows: int, tokens: int) -> None:
        self.inner.reserve(rows, min(2 * tokens, self._most))

    def holds(self, lengths: Sequence[int]) -> bool:
        return self.inner.holds([min(2 * length, self._most) for length in lengths])

    def open(self) -> Row:
        return TranslatedRow(inner=self.inner.open())

    def close(self, row: Row) -> None:
        self.inner.close(_checked(row).inner)

    def fork(self, row: Row, length: int | None = None) -> Row:
        source, length = _checked(row), row.prefix(length)
        inner = self.inner.fork(source.inner, source.ends[length - 1][0] if length else 0)
        return TranslatedRow(inner=inner, length=length, tokens=source.tokens[:length], ends=source.ends[:length])

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        self._scores.expire()
        opened = [_checked(row) for row in rows]
        passes = [self._translated(row, new) for row, new in zip(opened, nodes, strict=True)]
        inner, slots, base = list[tuple[Row, Nodes]](), list[int | None](), 0
        for row, read in zip(opened, passes, strict=True):
            first, size = read.first, len(read.tokens)
            if size:
                inner.append((row.inner, Nodes(read.tokens, read.parents, size - first)))
            slots += [None if place is None else base + place - first for place in read.places]
            base += size - first
        scores = self.inner.extend([row for row, _ in inner], [new for _, new in inner]) if inner else None
        scored = list[_Scored]()
        for row, new, read in zip(opened, nodes, passes, strict=True):
            row.nodes += read.nodes
            row.parents += new.parents
            scored += [_Scored(row, len(row.nodes) - new.scored + i) for i in range(new.scored)]
        return self._scores.keep(TranslatedScores(self, [new.scored for new in nodes], scores, slots, scored))

    def _translated(self, row: TranslatedRow, new: Nodes) -> _Pass:
        """What of a row's new nodes the model reads: a chain of unscored ones is read with what follows it."""
        read = _Pass([], [], [], [])
        tokens, parents, count = new.tokens, new.parents, len(row.nodes)
        begin, size, unscored = 0, len(tokens), len(tokens) - new.scored
        while begin < size:
            end = begin + 1
            while end < size and end <= unscored and parents[end] == count + end - 1:
                end += 1
            place = self._read(row, parents[begin], tokens[begin:end], end > unscored, read)
            if end > unscored:
                read.places.append(place)
            begin = end
        return read

    def _read(self, row: TranslatedRow, parent: int, run: Sequence[int], scored: bool, read: _Pass) -> int | None:
        """Add a run of nodes, each the child of the one before.

        Returns:
            where the last token of the run is in ``read``; None: nothing is read for it.
        """
        count = len(row.nodes)
        if not ROOT <= parent < count + len(read.nodes):
            raise CacheError(f"node {count + len(read.nodes)} cannot be a child of {parent}: parents come first")
        if parent == ROOT:
            above = _Node(ROOT, ROOT, 0, row.end[1])
        else:
            above = row.nodes[parent] if parent < count else read.nodes[parent - count]
        if len(run) == 1 and (rest := row.rests.get(parent, {}).get(run[0])) is not None:
            read.nodes.append(above._replace(token=run[0], left=above.left + self.text.of(run[0]), rest=rest))
            return None
        if parent == ROOT and not row.nodes and not read.nodes:
            ids, ends = self.next_text(row, run, hold=not scored)
        else:
            ids, ends = self.text.read(above.left, run, hold=not scored)
            if row.inner.length + above.depth + len(ids) > self._most:
                ids, ends = [], self.text.unread(above.left, run)
        first = len(row.inner.parents) + len(read.tokens)
        read.tokens.extend(ids)
        read.parents.extend([above.inner, *range(first, first + len(ids) - 1)][: len(ids)])
        for token, (size, left) in zip(run, ends, strict=True):
            read.nodes.append(_Node(token, first + size - 1 if size else above.inner, above.depth + size, left))
        return len(read.tokens) - 1 if scored and ids else None

    def next_text(self, row: TranslatedRow, run: Sequence[int], hold: bool) -> tuple[list[int], Ends]:
        """What is read of a text's next tokens: all; but if nothing has been read, or they are too many, of its end.

        The end of a text that goes on may come yet: nothing is read of it.
        """
        length, left = row.end
        if length and length == row.inner.length and len(run) <= WINDOW:
            ids, ends = self.text.read(left, run, hold)
            if length + len(ids) + min(_MARGIN, self._most // 4) <= self._most:
                return ids, ends
        if row.inner.length:
            inner = self.inner.open()
            self.inner.close(row.inner)
            row.inner, row.ends = inner, [(0, b"")] * row.length
        if hold:
            return [], [(0, b"")] * len(run)
        before = row.tokens[max(0, row.length + len(run) - self._window) :]
        ids, ends = self.text.begun([*before, *run][-self._window :], self._window)
        ends = ends[max(0, len(ends) - len(run)) :]
        return ids, [(0, b"")] * (len(run) - len(ends)) + ends

    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = _checked(row)
        row.check_path(path)
        nodes, before = [row.nodes[node] for node in path], row.inner.length
        self.inner.commit(row.inner, row.inner_above([node.inner for node in nodes[-1:]]))
        row.add([node.token for node in nodes], [(before + node.depth, node.left) for node in nodes])
        row.nodes, row.rests, row.parents = [], {}, []

    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row, parents = _checked(row), row.pruned(keep, trunk)
        nodes, before = [row.nodes[node] for node in keep], row.inner.length
        above = row.inner_above([node.inner for node in nodes])
        depth = nodes[trunk - 1].depth if trunk else 0
        self.inner.prune(row.inner, above, depth)
        row.add([node.token for node in nodes[:trunk]], [(before + node.depth, node.left) for node in nodes[:trunk]])
        numbers = {ROOT: ROOT} | {node: max(ROOT, i - depth) for i, node in enumerate(above)}
        row.rests = {new: row.rests[node] for new, node in enumerate(keep[trunk:]) if node in row.rests}
        row.nodes = [node._replace(inner=numbers[node.inner], depth=node.depth - depth) for node in nodes[trunk:]]
        row.parents = parents


def _checked(row: Row) -> TranslatedRow:
    assert isinstance(row, TranslatedRow)  # noqa: S101
    return row


class _Predicted(NamedTuple):
    """What may follow a node.

    Attributes:
        tokens: [n] of the target's.
        logprobs: [n] float64.
        readings: [n] the model's most probable token that stands for each; ``_NO_TOKEN``: it was expected.
        shares: [n] float64, log-probability of that, if the target's token comes.
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    readings: NDArray[np.integer]
    shares: NDArray[np.float64]

    def at(self, places: NDArray[np.bool_] | NDArray[np.int64]) -> _Predicted:
        return _Predicted(self.tokens[places], self.logprobs[places], self.readings[places], self.shares[places])


_NO_TOKEN = -1
_NOTHING_PREDICTED = _Predicted(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


class _Scored(NamedTuple):
    row: TranslatedRow
    node: int


class TranslatedScores(Scores):
    """Scores of the target's tokens by a pass of the model.

    Args:
        inner: of the pass; None: none was made.
        slots: of each node, its slot there; None: nothing was read for it.
    """

    def __init__(
        self,
        model: TranslatedModel,
        counts: Sequence[int],
        inner: Scores | None,
        slots: Sequence[int | None],
        nodes: Sequence[_Scored],
    ) -> None:
        super().__init__(counts)
        self._firsts, self._inner, self._slots, self._nodes = model.firsts, inner, slots, nodes
        self._vocab = model.capabilities.vocab_size

    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        self.check()
        count, size = min(count, self._vocab), len(slots)
        tokens, logprobs = np.zeros((size, count), np.int32), np.full((size, count), -np.inf, np.float32)
        entropies = np.zeros(size, np.float32)
        masks = [None if edits is None else edits[i].mask for i in range(size)]
        warped = [draft is not None and draft.warpings[i].temperature > 0 for i in range(size)]
        fewer, more = (max(most, 2 * count) for most in (_CANDIDATES, _MORE))
        widths = [fewer if mask is None and not warm else more for mask, warm in zip(masks, warped, strict=True)]
        inner_top = self._inner_top(slots, max(widths))
        for i, (slot, mask) in enumerate(zip(slots, masks, strict=True)):
            row, node = self._nodes[slot]
            expected = self._expected(row, node)
            if i in inner_top:
                inner_tokens, scores, entropies[i] = inner_top[i]
                least = _UNLIKELY if mask is None else -np.inf
                expected = self._added_up(inner_tokens[: widths[i]], scores[: widths[i]], least)
            if mask is not None:
                allowed = allowed_tokens(mask, self._vocab)[expected.tokens]
                expected = expected.at(allowed)
            values = expected.logprobs
            if i in inner_top and len(values):
                values = _shaped(expected, mask is not None, draft, i)
            best = np.argsort(-values, kind="stable")[:count]
            tokens[i, : len(best)], logprobs[i, : len(best)] = expected.tokens[best], values[best]
            if i in inner_top:
                row.rests[node] = self._rests(expected.at(best))
        return Top(tokens, logprobs, entropies)

    def _inner_top(self, slots: Slots, width: int) -> dict[int, tuple[NDArray[np.int32], NDArray[np.float32], float]]:
        """The model's most probable tokens, their log-probabilities and the entropy, after those slots that it read."""
        places = {i: place for i, slot in enumerate(slots) if (place := self._slots[slot]) is not None}
        if not places or self._inner is None:
            return {}
        top = self._inner.top([*places.values()], width)
        return dict(zip(places, zip(*top, strict=True), strict=True))

    def _expected(self, row: TranslatedRow, node: int) -> _Predicted:
        """What is known of a node without a pass: the target's first token of its rest."""
        rest = row.nodes[node].rest
        first = None if rest is None else self._firsts.of_text(rest.text)
        if rest is None or first is None:
            return _NOTHING_PREDICTED
        token, behind = first
        row.rests[node] = {token: _Rest(behind, 0.0)} if behind else {}
        return _Predicted(np.array([token]), np.array([rest.logprob]), np.array([_NO_TOKEN]), np.zeros(1))

    def _added_up(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], least: float) -> _Predicted:
        """The target's tokens that some of the model's stand for; the most probable one of these is their reading.

        Args:
            least: log-probability above which these are translated.
        """
        likely = logprobs > least
        firsts = self._firsts.of(tokens[likely])
        known = firsts >= 0
        tokens, values = tokens[likely][known], logprobs[likely][known].astype(np.float64)
        targets, best, group = np.unique(firsts[known], return_index=True, return_inverse=True)
        totals = np.maximum(np.log(np.bincount(group, np.exp(values), len(targets)) + _LEAST), values[best])
        return _Predicted(targets, np.minimum(totals, 0.0), tokens[best], values[best] - totals)

    def _rests(self, top: _Predicted) -> dict[int, _Rest]:
        """What is expected behind tokens whose readings go on behind them."""
        rests = zip(
            top.tokens.tolist(), map(self._firsts.behind, top.readings.tolist()), top.shares.tolist(), strict=True
        )
        return {token: _Rest(behind, share) for token, behind, share in rests if behind}

    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        self.check()
        rows = np.full((len(slots), self._vocab), np.log(_LEAST), np.float32)
        for i, slot in enumerate(slots):
            if (inner := self._slots[slot]) is not None and self._inner is not None:
                x = self._inner.logits([inner])[0].astype(np.float64)
                rows[i] = np.log(self._firsts.add_up(np.exp(x - log_sum_exp(x)), self._vocab) + _LEAST)
            else:
                rows[i, self._expected(*self._nodes[slot]).tokens] = 0.0
            if edits is not None:
                rows[i] = edited(rows[i], edits[i])
        return rows

    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        return np.array([logits.argmax() for logits in self.logits(slots, edits)], np.int32)

    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        rows = self.logits(slots)
        return np.array([x[token] - log_sum_exp(x) for x, token in zip(rows, tokens, strict=True)], np.float32)

    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        return np.array([*map(draw_warped, self.logits(slots, edits), keys, warpings)], np.int32)


def _shaped(follow: _Predicted, masked: bool, draft: Draft | None, i: int) -> NDArray[np.float64]:
    """[n] logarithms of probabilities after a mask and as ``Draft`` wants them, of tokens that have almost all of it.

    Args:
        i: which of the draft's slots they follow.
    """
    if draft is None or not (warping := draft.warpings[i]).temperature:
        return follow.logprobs - log_sum_exp(follow.logprobs) if masked else follow.logprobs
    x = warp(follow.logprobs, warping)
    if draft.keys is not None:
        x = (x + noise_of(draft.keys[i], follow.tokens)) * warping.temperature
    return x - log_sum_exp(x)
