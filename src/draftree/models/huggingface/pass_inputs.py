"""The new tokens of a pass: laid out on the host, brought to the device in one transfer, and their masks made there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tree import ROOT, ancestors
from ..base import Nodes, Row

Longs = NDArray[np.int64]

GRAIN = 64
"""Slots are allotted in multiples of this."""
_WORD = 64
"""Bits of a number."""
POSITION, ROW, SLOT, COLUMN, PREFIX, TOKEN, BEFORE, SEEN = range(8)
"""Lines of ``PassInputs.table``."""


@dataclass(slots=True)
class Placement:
    """Where the next pass writes, shared by all layers.

    A pass is over T new tokens of B rows, packed: one row's behind another's. Attention alone takes them padded, each
    row's in a line of [B, width].

    Attributes:
        rows, slots: allotted size of the storage.
        first, count: the pass covers B = ``count`` rows from the first on.
        width: most new tokens of a row.
        start: slot of the first new token, the least of all rows'.
        end: slots that the pass may attend to.
        index: [3, T] int64 on the device: of each token its row among the B, its slot, and its column of [B, width].
        sources: [B x width] int64 on the device, the token in each entry of [B, width]; padding has the first one.
            None: there is one row.
    """

    rows: int = 1
    slots: int = GRAIN
    first: int = 0
    count: int = 1
    width: int = 1
    start: int = 0
    end: int = 0
    index: Tensor | None = None
    sources: Tensor | None = None


class Shape(NamedTuple):
    """Of a pass.

    Attributes:
        tokens, rows, width: T, B and the width of [B, width].
        slots: S that it may attend to.
        wanted: W tokens whose logits are wanted.
        words: lines of the table from ``SEEN`` on.
        further, room: U tokens that a draft head drafts from besides its own, and X of them a row's.
    """

    tokens: int
    rows: int
    width: int
    slots: int
    wanted: int
    words: int
    further: int = 0
    room: int = 0

    @property
    def sizes(self) -> list[int]:
        """Numbers of the table, of ``wanted``, of ``Further.tokens`` and ``places``, and of ``Placement.sources``."""
        sources = self.rows * self.width if self.rows > 1 else 0
        return [(SEEN + self.words) * self.tokens, self.wanted, self.further, self.rows * self.room, sources]


class Further(NamedTuple):
    """Tokens that a draft head drafts from besides its own vocabulary.

    Attributes:
        tokens: [U] those of all rows.
        places: [B, X] where each row's are among them; -1 fills lines up.
    """

    tokens: Longs
    places: Longs

    @classmethod
    def of(cls, rows: Sequence[Longs]) -> Further:
        """Of each row's tokens: U and X are powers of two from ``GRAIN`` on."""
        distinct, where = np.unique(np.concatenate(rows), return_inverse=True)
        counts = np.array([*map(len, rows)])
        tokens = np.zeros(rounded(len(distinct)), np.int64)
        tokens[: len(distinct)] = distinct
        places = np.full((len(rows), rounded(int(counts.max()))), -1, np.int64)
        places[np.arange(places.shape[1]) < counts[:, None]] = where
        return cls(tokens, places)

    @property
    def sizes(self) -> tuple[int, int]:
        """U and X."""
        return len(self.tokens), self.places.shape[1]


def rounded(count: int) -> int:
    """The least power of two from ``GRAIN`` on that holds so many."""
    return max(GRAIN, 1 << max(0, count - 1).bit_length())


NOTHING_FURTHER = Further(np.zeros(0, np.int64), np.zeros((0, 0), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    """The new tokens of a pass, on the host.

    Attributes:
        table: [SEEN + words, T] int64, of each token: its position; its row among the B, slot and column of
            [B, width]; how many of its row's first slots it attends to; its id; of a draft head, which state it reads;
            and from line ``SEEN`` on bits, of which bit j % 64 of
            line j // 64 is set where it attends to the slot j behind those first ones. The last line is zero.
        wanted: [W] of which tokens the logits are wanted.
        is_causal: one row that was empty reads a chain.
        further: of a draft head.
    """

    table: Longs
    wanted: Longs
    is_causal: bool = False
    further: Further = NOTHING_FURTHER

    @classmethod
    def of(cls, rows: Sequence[Row], nodes: Sequence[Nodes], grown: Sequence[list[int]], places: Longs) -> PassInputs:
        """Of new nodes of rows.

        Args:
            grown: of each row the parents of its uncommitted nodes, the new ones included.
            places: [3, T] of each token its row among the B, its slot and its column.
        """
        parts, chains, wanted, end = list[tuple[list[int], Longs, Longs | int, Longs]](), 0, list[int](), 0
        for row, new, parents in zip(rows, nodes, grown, strict=True):
            count = len(new.tokens)
            end += count
            wanted += range(end - new.scored, end)
            if parents == [*range(ROOT, count + ROOT)]:
                depths, bits = np.arange(1, count + 1), np.zeros((0, count), np.int64)
                prefix: Longs | int = depths + row.length
                chains += count > 1 and not row.length
            else:
                seen, levels = ancestors(parents, len(parents) - count)
                depths, bits, prefix = np.array(levels, np.int64), _bits(seen), row.length
            parts.append((new.tokens, depths + row.length - 1, prefix, bits))
        words = 1 + max(len(bits) for *_, bits in parts)
        table, at = np.zeros((SEEN + words, places.shape[1]), np.int64), 0
        table[ROW : COLUMN + 1] = places
        for tokens, positions, prefix, bits in parts:
            part, at = table[:, at : at + len(tokens)], at + len(tokens)
            part[TOKEN], part[POSITION], part[PREFIX], part[SEEN : SEEN + len(bits)] = tokens, positions, prefix, bits
        return cls(table, np.array(wanted, np.int64), is_causal=len(rows) == chains == 1)

    @property
    def count(self) -> int:
        """Nodes of the pass, T."""
        return len(self.table[TOKEN])

    @property
    def words(self) -> int:
        """Lines of ``table`` that hold the mask's bits."""
        return len(self.table) - SEEN

    def filled(self, shape: Shape) -> Longs:
        """All numbers of a pass of a shape, behind one another (``Shape.sizes``).

        Tokens that fill it up write to the slot behind all others, and attend to the first.
        """
        flat = np.zeros(sum(shape.sizes), np.int64)
        numbers, wanted, tokens, places, sources = np.split(flat, np.cumsum(shape.sizes)[:-1])
        table = numbers.reshape(-1, shape.tokens)
        table[: len(self.table), : self.count] = self.table
        table[SLOT, self.count :], table[PREFIX, self.count :] = shape.slots, 1
        wanted[: len(self.wanted)] = self.wanted
        tokens[:], places[:] = self.further.tokens, self.further.places.ravel()
        if len(sources):
            sources[self.table[ROW] * shape.width + self.table[COLUMN]] = np.arange(self.count)
        return flat


def _bits(seen: NDArray[np.bool_]) -> Longs:
    """[ceil(M / 64), n] the bits of [n, M] flags."""
    count, width = seen.shape
    packed = np.zeros((count, -(-width // _WORD) * 8), np.uint8)
    packed[:, : -(-width // 8)] = np.packbits(seen, axis=1, bitorder="little")
    return packed.view("<i8").T


class DeviceInputs:
    """The numbers of a pass (``PassInputs.filled``) on a device.

    Attributes:
        numbers: all of them.
        shape: of the pass.
        tokens, positions: [T].
        before: [T] which states a draft head reads.
        rows: [T] the row of each token among the B.
        wanted: [W] of which tokens the logits are wanted.
        further, places: [U] and [B, X] (``Further``).
        index, sources: as the placement's.
    """

    def __init__(self, numbers: Tensor, shape: Shape) -> None:
        self.numbers, self.shape = numbers, shape
        parts: Sequence[Tensor] = numbers.split(shape.sizes)
        table: Tensor = parts[0].view(-1, shape.tokens)
        self.wanted, self.further, self.places = parts[1], parts[2], parts[3].view(shape.rows, shape.room)
        self.sources = parts[4] if len(parts[4]) else None
        self.tokens, self.positions, self.before = table[TOKEN], table[POSITION], table[BEFORE]
        self.rows, self.index = table[ROW], table[ROW : COLUMN + 1]
        self._prefix, self._bits = table[PREFIX], table[SEEN:]

    def mask(self) -> Tensor:
        """[B, 1, width, S] bool, the slots that each token attends to; padding attends as the first token does."""
        shape, bits = self.shape, self._bits.T
        after = torch.arange(shape.slots, device=bits.device) - self._prefix[:, None]
        word = bits.gather(1, (after >> 6).clamp_(0, shape.words - 1))
        seen: Tensor = (after < 0) | ((word >> (after & (_WORD - 1))) & 1).bool()
        if self.sources is not None:
            seen = seen.index_select(0, self.sources)
        return seen.view(shape.rows, 1, shape.width, shape.slots)


def on_device(device: torch.device | str, *arrays: NDArray[np.int64]) -> Sequence[Tensor]:
    """Arrays on a device, flat, by one transfer that the host does not wait for."""
    flat = staged(np.concatenate([array.ravel() for array in arrays]), device).to(device, non_blocking=True)
    parts: Sequence[Tensor] = flat.split([array.size for array in arrays])
    return parts


def staged(array: NDArray[np.int64], device: torch.device | str) -> Tensor:
    """An array in memory that a device reads without the host's help."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
