"""LlamaModel: a GGUF file, run by llama.cpp, behind the ``LanguageModel`` seam.

One context holds the cells of all rows. Cells are taken in the order in which tokens come and are not taken again
before all are moved together: tokens of a path lie in the order of their positions then, without which the sums of
attention would be rounded otherwise than in AR decoding. What is rejected belongs to a sequence of its own until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import Count, typed
from ...errors import CacheError, CacheFullError, NoTreesError
from ...scores import LastScores, NumpyScores, Scores
from ...text.encoding import Tokenizer
from ...tree import ROOT
from ..base import (
    PROMPT,
    Capabilities,
    LanguageModel,
    Nodes,
    OpenRows,
    Row,
    check_finite,
    decoded,
    difference,
    exclusive,
    prefill,
)
from ..cpu_threads import default_threads
from ..gguf.gguf_checks import capabilities
from ..gguf.gguf_file import slot_bytes
from ..memory import cache_full
from .branches import Branches
from .context import GRAIN, IDS, Context, Token
from .library import F16, Weights, open_library
from .llama_tokenizer import read_tokenizer

_TRASH = IDS - 1
"""The sequence of what was rejected."""
FIRST_CELLS = 1024
"""Of a new context, which takes its memory at once: it grows with the tokens that come."""
_SPLIT = 512
"""Cells from which llama.cpp splits the sums of one token's attention, where keys and values are float16."""


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    return read_tokenizer(weights.library, weights.vocab, weights.header.chat_template, weights)


def capabilities_of(weights: Weights, name: str, threads: int, **given: Any) -> Capabilities:
    """Of a model on llama.cpp.

    Args:
        given: what else was found out.
    """
    library, vocab_size = weights.library, weights.vocab_size
    return capabilities(
        weights.header,
        name,
        threads,
        max_length=library.model_n_ctx_train(weights.pointer),
        vocab_size=vocab_size,
        eos_ids=frozenset(i for i in range(vocab_size) if library.vocab_is_eog(weights.vocab, i)),
        engine=f"llama.cpp of {library.name}",
        tier="llama.cpp",
        attention="flash",
        **given,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class LlamaRow(Row):
    """A sequence inside a ``LlamaModel``; ``number`` is its sequence id.

    Attributes:
        branches: its uncommitted nodes.
    """

    branches: Branches


_Node = tuple[LlamaRow, int, bool]
"""A node of a row, and whether its logits are wanted."""


class LlamaModel(OpenRows[LlamaRow]):
    """A language model in a GGUF file, by llama.cpp, with trees, forks and several live paths a row.

    One thread at a time can be inside it.

    Attributes:
        capabilities: what the file and the library say.
        tokenizer: llama.cpp's, from the file.
        cache_bytes: memory that the cache may use (``holds``); by default half of what was free at load.
        pass_seconds: wall-clock seconds inside passes so far, first ones of a row not counted.

    Args:
        source: the file, or what was loaded of it.
        name: what the user calls it.
        threads: number of threads of a pass; by default one for each core that this process may use.

    Raises:
        ConfigError: there is no library, or none that is supported.
        ModelFileError: the file cannot be loaded.
        NoTreesError: it can be given no draft trees.
        UnsupportedModelError: it holds an encoder.
    """

    @typed
    def __init__(self, source: str | Path | Weights, *, name: str | None = None, threads: Count | None = None) -> None:
        self.weights = source if isinstance(source, Weights) else Weights(open_library(), Path(source))
        header, self.threads = self.weights.header, threads or default_threads()
        name = name or str(header.path)
        if self.weights.recurrent:
            raise NoTreesError(
                name, "verify draft trees", f"{header.architecture} keeps a recurrent state, which cannot branch"
            )
        self.tokenizer = tokenizer_of(self.weights)
        bytes_of_slot = slot_bytes(header, *self.weights.types)
        self.capabilities = capabilities_of(self.weights, name, self.threads, slot_bytes=bytes_of_slot)
        super().__init__(RLock())
        self._scores = LastScores()
        self._context = Context(self.weights, FIRST_CELLS, self.threads)
        self._free = list(range(_TRASH))[::-1]
        splits = self.weights.types == (F16, F16)
        tokens = min(_SPLIT, self.capabilities.max_length - len(_PARENTS)) if splits else len(PROMPT)
        trees, rounding = exactness(self, tokens)
        if trees == EXACT and header.has_float_layers:
            self.capabilities = replace(self.capabilities, trees=_SELDOM)
        else:
            self.capabilities = replace(self.capabilities, trees=trees, rounding=rounding)
        self.pass_seconds = 0.0

    @property
    def _most(self) -> int:
        """Most cells of a context: of the first one, or as many as ``cache_bytes`` takes."""
        return max(FIRST_CELLS, self.cache_bytes // self.capabilities.slot_bytes // GRAIN * GRAIN)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes`` and half of the sequence ids."""
        return sum(lengths) <= self._most and len(lengths) <= IDS // 2

    @exclusive
    def open(self) -> Row:
        return self._add(LlamaRow(branches=Branches(-1)))

    def _add(self, row: LlamaRow) -> LlamaRow:
        if not self._free:
            self._give_up_beside({})
        if not self._free:
            raise CacheFullError(f"{len(self._open)} rows are open in {self.capabilities.name}: close one first")
        row.number = self._free.pop()
        row.branches = Branches(row.number)
        self._open[row.number] = row
        return row

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        opened, most = [self.checked(row) for row in rows], self.capabilities.max_length
        self._scores.expire()
        before, added = [len(row.branches.ids) for row in opened], list[_Node]()
        try:
            for row, new, first in zip(opened, nodes, before, strict=True):
                unwanted = len(new.tokens) - new.scored
                for i, (token, parent) in enumerate(zip(new.tokens, new.parents, strict=True)):
                    row.branches.add(token, parent)
                    added.append((row, first + i, i >= unwanted))
                last = row.length + max(row.branches.depths, default=0)
                if last >= most:
                    raise CacheError(f"a node at position {last} is beyond the longest {most} tokens: draft less deep")
            logits = self._read(added)
        except BaseException:
            for row, first in zip(opened, before, strict=True):
                self._give_up(row, ())
                row.branches.cut(first)
            raise
        for row, new in zip(opened, nodes, strict=True):
            row.parents += new.parents
        return self._scores.keep(NumpyScores(logits, [new.scored for new in nodes]))

    def _read(self, added: Sequence[_Node]) -> NDArray[np.float32]:
        """[w, V] logits of the wanted ones of some nodes."""
        parents = {(row.number, row.branches.parents[node]) for row, node, _ in added}
        ends = sum((row.number, node) not in parents for row, node, _ in added)
        if ends > _TRASH - len(self._open):  # they have more paths than there are ids
            half = len(added) // 2
            return np.concatenate([self._read(added[:half]), self._read(added[half:])])
        by_row: dict[int, list[int]] = {}
        for row, node, _ in added:
            by_row.setdefault(row.number, []).append(node)
        fresh = {(row.number, node) for row, node, _ in added}
        lacking = {number: self._open[number].branches.missing(nodes) for number, nodes in by_row.items()}
        among = ((number, node) for number, nodes in lacking.items() for node in nodes)
        again = [(self._open[number], node, False) for number, node in among if (number, node) not in fresh]
        if ends > len(self._free):  # a path takes no more than one
            self._give_up_beside(lacking)
        carried: dict[tuple[int, int], Sequence[int]] = {}
        for number, nodes in lacking.items():
            row = self._open[number]
            sequences, copies = row.branches.carry(nodes, self._free)
            carried.update({(number, node): ids for node, ids in sequences.items()})
            for source, target, depth in copies:
                self._context.copy(source, target, 0, row.length + depth + 1)
        tokens = [
            Token(row.branches.tokens[node], row.length + row.branches.depths[node], carried[row.number, node], wanted)
            for row, node, wanted in [*again, *added]
        ]
        began = time.perf_counter()
        logits = self._decode(tokens)
        if any(row.length for row, *_ in added):
            self.pass_seconds += time.perf_counter() - began
        return logits

    def _decode(self, tokens: Sequence[Token]) -> NDArray[np.float32]:
        """A pass, for which cells are found."""
        count, cells = len(tokens), self._context.cells
        if count <= cells and (logits := self._context.decode(tokens)) is not None:
            return logits
        used = sum(row.length + len(row.branches.ids) for row in self._open.values())
        if used > self._most:
            size = self.capabilities.slot_bytes * used
            raise cache_full(f"{used} tokens of {self.capabilities.name} take", size, self.cache_bytes)
        self._move(max(cells, min(self._most, 2 * used)))
        logits = self._context.decode(tokens)
        if logits is None:
            raise CacheFullError(f"llama.cpp finds no cells for {count} tokens among {self._context.cells}")
        return logits

    def _move(self, cells: int) -> None:
        """Move all cells that are not rejected to the beginning of a context of ``cells`` at least."""
        self._context.drop(_TRASH, 0)
        if cells > self._context.cells:
            self._context.resize(cells)
        else:
            self._context.restore(self._context.state())

    def _give_up_beside(self, needed: Mapping[int, Sequence[int]]) -> None:
        """Let all nodes lose their cells that nothing in ``needed`` lies below, by the number of a row."""
        for number, row in self._open.items():
            self._give_up(row, [row.branches.parents[node] for node in needed.get(number, ())])

    def _give_up(self, row: LlamaRow, used: Iterable[int]) -> None:
        """Let a row's nodes lose their cells (``Branches.give_up``)."""
        self._reject(row, row.branches.give_up(used))

    def _reject(self, row: LlamaRow, shorter: Iterable[tuple[int, int]]) -> None:
        """Reject cells of ids below depths; an id that is left without a node is free, unless it is the row's own."""
        for id_, depth in shorter:
            is_free, end = depth == ROOT and id_ != row.number, row.length + depth + 1
            self._context.copy(id_, _TRASH, end, -1)
            self._context.drop(id_, 0 if is_free else end)
            self._free += [id_] * is_free

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self.checked(row)
        row.check_path(path)
        self._keep(row, path, len(path))
        row.parents = []

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row, parents = self.checked(row), row.pruned(keep, trunk)
        self._keep(row, keep, trunk)
        row.parents = parents

    def _keep(self, row: LlamaRow, keep: Sequence[int], trunk: int) -> None:
        branches = row.branches
        if lost := branches.missing(keep):
            try:
                self._read([(row, node, False) for node in lost])
            except BaseException:
                self._give_up(row, ())
                raise
        self._give_up(row, keep)
        if trunk and branches.depth_of(branches.tips[branches.main]) < trunk - 1:
            self._context.copy(branches.id_of(keep[trunk - 1]), branches.main, row.length, row.length + trunk)
            branches.tips[branches.main] = keep[trunk - 1]
        row.length += trunk
        self._reject(row, branches.renumber(keep, trunk))

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        source, length = self.checked(row), row.prefix(length)
        forked = self._add(replace(source, length=length, parents=[]))
        self._context.copy(source.number, forked.number, 0, length)
        return forked

    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            row = self.checked(row)
            for id_ in row.branches.tips:
                self._context.copy(id_, _TRASH, 0, -1)
                self._context.drop(id_, 0)
                self._free.append(id_)
            del self._open[row.number]
            row.number = -1
            if not self._open:
                self._context.clear()


_PARENTS = [-1, -1, 0, 1, 3, 2, 3, 4]
"""Of the tree of the test. Its branches are interleaved; it is as wide as the widest kernels that are known."""
_PATH = (1, 3, 4)
"""The nodes that are compared."""
_WRONG = 1.0
"""Standard deviations of the logits: rounding makes 0.2 to 0.5, another token in sight several."""
EXACT = "yes, bit-exact: a tree gives one-token decoding's logits"
_SELDOM = (
    "yes, with near-ties: kernels for layers of floats (routers of experts) round otherwise for several tokens, which "
    "layers behind them show seldom; texts differ where two tokens are nearly as likely"
)
"""For files in which the self-test finds no difference, though there are some: in 1 of 1,000 tokens of a tiny model."""


def exactness(model: LanguageModel, tokens: int) -> tuple[str, float]:
    """Compare nodes of a tree with one-token decoding, behind a text of ``tokens`` tokens.

    Returns:
        how exact they are, in words; by how much the gap between two logits may differ.

    Raises:
        ModelFileError: they are no numbers.
        NoTreesError: they differ by more than rounding.
    """
    vocab = model.capabilities.vocab_size
    drafted = [(31 * i + 17) % vocab for i in range(len(_PARENTS))]
    row = prefill(model, [(PROMPT[i % len(PROMPT)] + i) % vocab for i in range(tokens)])
    branch = model.fork(row)
    alone = decoded(model, branch, [drafted[node] for node in _PATH])
    model.close(branch)
    check_finite(model.capabilities, alone)

    worst = 0.0
    for count in range(2, len(_PARENTS) + 1):
        scores = model.extend([row], [Nodes(drafted[:count], _PARENTS[:count])])
        logits = scores.logits([node for node in _PATH if node < count])
        worst = max(worst, difference(logits, alone[: len(logits)]))
        model.commit(row, [])
    model.close(row)
    if not worst:
        return EXACT, 0.0
    if worst > _WRONG:
        raise NoTreesError(
            model.capabilities.name,
            "verify draft trees",
            f"it fails the tree self-test: logits differ by {worst:.2g} standard deviations from one-token decoding's "
            f"({_WRONG:g} allowed)",
        )
    words = (
        f"yes, with near-ties: logits differ by up to {worst:.1g} standard deviations from one-token decoding's, since "
        f"kernels for {model.capabilities.weight_format} round otherwise for several tokens; texts differ where two "
        "tokens are nearly as likely. Files in Q8_0, Q4_0 and Q4_1 are bit-exact on CPUs with AVX2"
    )
    return words, 2 * worst * float(alone.std())
