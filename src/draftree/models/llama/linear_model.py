"""LinearModel: a GGUF file, run by llama.cpp, whose rows do not branch (``linear_rows``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from threading import RLock

from ...config import Count
from ...errors import CacheFullError, UnsupportedModelError
from ...scores import NumpyScores, Scores
from ..base import DRAFTED, PROMPT, Nodes, check_finite, exclusive
from ..cpu_threads import default_threads
from ..linear_rows import LinearRow, LinearRows
from ..memory import cache_full
from .context import GRAIN, IDS, Context, Token, grains
from .library import Weights
from .llama_model import FIRST_CELLS, capabilities_of, tokenizer_of


class LinearModel(LinearRows[LinearRow]):
    """A language model in a GGUF file, by llama.cpp, with forks, but no trees: it decodes without drafts.

    Its attributes are those of ``LlamaModel``, and one thread at a time can be inside it. A row's number is its
    sequence id.

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

    def _make_room(self, tokens: int, rows: int) -> None:
        """Make sure that so many tokens more have cells, and so many rows a state (``LinearRows._make_room``).

        Where tokens have none, all rows move to twice the cells that they need, as far as ``cache_bytes`` allows.
        """
        now, can = self._context, self.capabilities
        used = tokens + sum(len(row.tokens) for row in self._open.values())
        if used <= now.cells and rows <= now.sequences:
            return
        if self._bytes(used, max(rows, now.sequences)) <= self.cache_bytes:
            sequences = max(rows, now.sequences)
        else:
            self._close_gaps()
            sequences = max(rows, len(self._open))
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

    def _add(self, tokens: list[int]) -> LinearRow:
        """A new row with the lowest id: llama.cpp computes rows together whose ids follow one another."""
        if len(self._open) == IDS:
            raise CacheFullError(f"{len(self._open)} rows are open in {self.capabilities.name}: close one first")
        self._make_room(0, len(self._open) + 1)
        number = next(number for number in range(IDS) if number not in self._open)
        row = self._open[number] = LinearRow(number=number, length=len(tokens), tokens=tokens)
        return row

    def _read(self, rows: Sequence[LinearRow], texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> Scores:
        batch = list[Token]()
        for row, ids, count in zip(rows, texts, wanted, strict=True):
            unwanted = len(ids) - count
            batch += [Token(ids[at], at, (row.number,), at >= unwanted) for at in range(row.read, len(ids))]
        logits = self._context.decode(batch)
        if logits is None:
            raise CacheFullError(f"llama.cpp finds no cells for {len(batch)} tokens among {self._context.cells}")
        for row, ids in zip(rows, texts, strict=True):
            row.read = len(ids)
        return NumpyScores(logits, [*wanted])

    def _forget(self, row: LinearRow) -> None:
        self._context.drop(row.number, 0)
        row.read = 0

    def _share(self, row: LinearRow, forked: LinearRow) -> None:
        self._context.copy(row.number, forked.number, 0, -1)
