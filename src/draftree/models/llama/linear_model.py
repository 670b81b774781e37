"""LinearModel: a GGUF file, run by llama.cpp, whose rows do not branch: tokens follow one another.

A recurrent state is computed from all tokens of a sequence: it can be copied, but not cut. So rows keep their tokens,
and one that goes back, or begins with a part of another one, is read anew in its next pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from threading import RLock

from ...config import Count
from ...errors import CacheError, CacheFullError, UnsupportedModelError
from ...scores import LastScores, NumpyScores, Scores
from ...tree import ROOT
from ..base import DRAFTED, PROMPT, Nodes, OpenRows, Row, check_finite, exclusive
from ..cpu_threads import default_threads
from ..memory import cache_full
from .context import GRAIN, IDS, Context, Token, grains
from .library import Weights
from .llama_model import FIRST_CELLS, capabilities_of, tokenizer_of


@dataclass(slots=True, eq=False, kw_only=True)
class LinearRow(Row):
    """A sequence inside a ``LinearModel``; ``number`` is its sequence id.

    Attributes:
        tokens: committed ones, and behind them those that wait for a commit.
        read: of so many of them llama.cpp has the state.
    """

    tokens: list[int] = field(default_factory=list)
    read: int = 0


class LinearModel(OpenRows[LinearRow]):
    """A language model in a GGUF file, by llama.cpp, with forks, but no trees: it decodes without drafts.

    Its attributes are those of ``LlamaModel``, and one thread at a time can be inside it.

    Args:
        weights: loaded.
        name: what the user calls it.
        no_trees: why it can be given none.
        threads: number of threads of a pass; by default one for each core that this process may use.

    Raises:
        ModelFileError: its logits are no numbers.
        RunError: there is not the memory for it.
    """

    def __init__(self, weights: Weights, name: str, no_trees: str, threads: Count | None = None) -> None:
        self.weights, self.threads = weights, threads or default_threads()
        self.tokenizer = tokenizer_of(weights)
        self.capabilities = capabilities_of(weights, name, self.threads, no_trees=no_trees)
        super().__init__(RLock())
        self._scores = LastScores()
        self._context = Context(weights, FIRST_CELLS, self.threads, sequences=1)
        self._measure()
        self.pass_seconds = 0.0

    def _measure(self) -> None:
        """Find the sizes of a token and of a row in the cache, and check that logits are numbers."""
        row, sizes, can = self.open(), list[int](), self.capabilities
        count = min(len(PROMPT), can.max_length // 2)
        if not count:
            raise UnsupportedModelError(f"{can.name} takes {can.max_length} tokens ({can.max_length_reason}): too few")
        for part in (PROMPT, DRAFTED):
            scores = self.extend([row], [Nodes.chain([token % can.vocab_size for token in part[:count]], wanted=1)])
            check_finite(can, scores.logits([0]))
            self.commit(row, range(count))
            sizes.append(self._context.size_of(row.number))
        self.close(row)
        slot = (sizes[1] - sizes[0]) // count
        self.capabilities = replace(can, slot_bytes=slot, row_bytes=sizes[0] - count * slot)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes`` and the sequence ids."""
        return self._bytes(sum(lengths), len(lengths)) <= self.cache_bytes and len(lengths) <= IDS

    def _bytes(self, tokens: int, sequences: int) -> int:
        """Of a context with cells for so many tokens, and with so many sequences."""
        return grains(tokens) * self.capabilities.slot_bytes + sequences * self.capabilities.row_bytes

    @exclusive
    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for the states of ``rows`` sequences (``LanguageModel.reserve``); tokens get it as they come."""
        with suppress(CacheFullError):  # a row that takes the place of another one needs none
            self._make_room(0, min(rows, IDS))

    def _make_room(self, tokens: int, sequences: int) -> None:
        """Make sure that so many tokens more have cells, and so many sequences a state.

        Where tokens have none, all rows move to twice the cells that they need, as far as ``cache_bytes`` allows.

        Raises:
            CacheFullError: it does not allow what they need, or there is not the memory for it; no row has changed.
        """
        now, can = self._context, self.capabilities
        used = tokens + sum(len(row.tokens) for row in self._open.values())
        if used <= now.cells and sequences <= now.sequences:
            return
        if self._bytes(used, max(sequences, now.sequences)) <= self.cache_bytes:
            sequences = max(sequences, now.sequences)
        else:
            self._close_gaps()
            sequences = max(sequences, len(self._open))
        if (size := self._bytes(used, sequences)) > self.cache_bytes:
            raise cache_full(f"{used} tokens of {can.name} in {sequences} rows take", size, self.cache_bytes)
        cells = now.cells if used <= now.cells else 2 * used
        if can.slot_bytes:
            room = (self.cache_bytes - sequences * can.row_bytes) // can.slot_bytes
            cells = min(cells, room // GRAIN * GRAIN)
        now.resize(cells, sequences)

    def _close_gaps(self) -> None:
        """Give rows the lowest ids: a context has a state for each id up to the highest."""
        rows = sorted(self._open.values(), key=attrgetter("number"))
        for number, row in enumerate(rows):
            if row.number != number:
                self._context.copy(row.number, number, 0, -1)
                self._context.drop(row.number, 0)
                row.number = number
        self._open = dict(enumerate(rows))

    @exclusive
    def open(self) -> Row:
        return self._add(LinearRow())

    def _add(self, row: LinearRow) -> LinearRow:
        """Give a row the lowest id: llama.cpp computes rows together whose ids follow one another."""
        if len(self._open) == IDS:
            raise CacheFullError(f"{len(self._open)} rows are open in {self.capabilities.name}: close one first")
        self._make_room(0, len(self._open) + 1)
        row.number = next(number for number in range(IDS) if number not in self._open)
        self._open[row.number] = row
        return row

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """Append tokens to each row in one pass (``LanguageModel.extend``).

        Raises:
            CacheError: they do not follow one another, behind those that wait; nothing has changed.
        """
        opened, can = [self.checked(row) for row in rows], self.capabilities
        self._scores.expire()
        texts = list[list[int]]()
        for row, new in zip(opened, nodes, strict=True):
            first = len(row.parents) + ROOT
            if new.parents != [*range(first, first + len(new.tokens))]:
                raise CacheError(f"{can.name} takes no trees: {can.no_trees}: give it tokens one after the other")
            texts.append(ids := [*row.tokens, *new.tokens])
            if len(ids) > can.max_length:
                raise CacheError(f"{len(ids)} tokens are more than the longest {can.max_length}: use fewer")
        self._make_room(sum(len(new.tokens) for new in nodes), 0)
        batch = list[Token]()
        for row, new, ids in zip(opened, nodes, texts, strict=True):
            unwanted = len(ids) - new.scored
            batch += [Token(ids[at], at, (row.number,), at >= unwanted) for at in range(row.read, len(ids))]
        began = time.perf_counter()
        try:
            logits = self._context.decode(batch)
            if logits is None:
                raise CacheFullError(f"llama.cpp finds no cells for {len(batch)} tokens among {self._context.cells}")
        except BaseException:
            for row in opened:
                self._forget(row)
            raise
        if any(row.length for row in opened):
            self.pass_seconds += time.perf_counter() - began
        for row, new in zip(opened, nodes, strict=True):
            row.tokens += new.tokens
            row.read = len(row.tokens)
            row.parents += new.parents
        return self._scores.keep(NumpyScores(logits, [new.scored for new in nodes]))

    def _forget(self, row: LinearRow) -> None:
        """Let llama.cpp forget a row, which is read anew in its next pass."""
        self._context.drop(row.number, 0)
        row.read = 0

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self.checked(row)
        row.check_path(path)
        self._cut(row, row.length + len(path))
        row.length, row.parents = len(row.tokens), []

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row, parents = self.checked(row), row.pruned(keep, trunk)
        self._cut(row, row.length + len(keep))
        row.length, row.parents = row.length + trunk, parents

    def _cut(self, row: LinearRow, length: int) -> None:
        if length < len(row.tokens):
            del row.tokens[length:]
            self._forget(row)

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first committed tokens of another (``LanguageModel.fork``).

        With all that it has read it shares the state, and with fewer of them it reads them itself in its next pass.
        """
        source, length = self.checked(row), row.prefix(length)
        forked = self._add(LinearRow(length=length, tokens=source.tokens[:length]))
        if length == source.read:
            self._context.copy(source.number, forked.number, 0, -1)
            forked.read = length
        return forked

    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            row = self.checked(row)
            self._forget(row)
            del self._open[row.number]
            row.number = -1
