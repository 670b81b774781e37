"""What chance decides in beam sampling, keyed so that a seed repeats it: acceptance coins, drafts, the target's draws.

Coins and drafts are keyed by the position of the step's root, so that nothing that one step looked at and gave up comes
back in a later one. The target's own draws are keyed by the absolute position of the token: each is used once. The
first draw of a position is that of plain decoding, ``sampling.Draws``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..sampling import derive_seed, gumbel_noise, uniform

_COINS, _DRAFTS, _BEAMS, _DRAWS = 3, 4, 5, 6
"""Labels of streams that no other noise has (``sampling``)."""

Cell = tuple[int, int]
"""(row of a joint distribution over (beam, token), token)."""


class Chance(Protocol):
    """Decides one step of one request."""

    def accepts(self, chance: float) -> bool:
        """A coin, thrown anew at each call; 1 and more always accepts, 0 never."""

    def drafts(self, cells: Tensor, count: int, depth: int) -> list[Cell]:
        """``count`` independent draws of drafted beams, ``depth`` layers below the step's root.

        Args:
            cells: [R, V] float64, probability of each cell; they sum to 1.
            count: how many.
            depth: 0 for the first drafted layer.
        """

    def draws(self, cells: Tensor, numbers: Sequence[int], position: int) -> list[Cell]:
        """The target's own draws: one for each of ``numbers``, its place among the beams at ``position``.

        Args:
            cells: [R, V] float64, proportional to the probability of each cell; need not sum to 1.
            numbers: no two draws of a position have the same.
            position: absolute, of the token.
        """


@dataclass(slots=True)
class KeyedChance:
    """``Chance`` by counter-based noise.

    Attributes:
        seed: the request's.
        root: absolute position of the last token that all of the step's beams had before it.
    """

    seed: int
    root: int
    _thrown: int = 0

    def accepts(self, chance: float) -> bool:
        """See ``Chance``."""
        self._thrown += 1
        return uniform(derive_seed(self.seed, _COINS, self._thrown), self.root) <= chance

    def drafts(self, cells: Tensor, count: int, depth: int) -> list[Cell]:
        """See ``Chance``; by inverse distribution functions."""
        keys = [derive_seed(self.seed, _DRAFTS, depth, i) for i in range(count)]
        rows = _picked(cells.sum(-1), [uniform(key, self.root) for key in keys])
        coins = [uniform(derive_seed(key, _DRAWS), self.root) for key in keys]
        tokens = [0] * count
        for row in set(rows):
            own = [i for i in range(count) if rows[i] == row]
            for i, token in zip(own, _picked(cells[row], [coins[i] for i in own]), strict=True):
                tokens[i] = token
        return list(zip(rows, tokens, strict=True))

    def draws(self, cells: Tensor, numbers: Sequence[int], position: int) -> list[Cell]:
        """See ``Chance``; the token by Gumbel noise."""
        seeds = [self.seed if n == 0 else derive_seed(self.seed, _DRAWS, n) for n in numbers]
        rows = _picked(cells.sum(-1), [uniform(derive_seed(self.seed, _BEAMS, n), position) for n in numbers])
        noise = gumbel_noise(seeds, [position] * len(seeds), cells.shape[-1], cells.device)
        return list(zip(rows, (cells[rows].log() + noise).argmax(-1).tolist(), strict=True))


def _picked(weights: Tensor, coins: Sequence[float]) -> list[int]:
    """The entries at which the running sum of ``weights`` passes each coin's share of the whole."""
    sums = weights.cumsum(0)
    at = torch.tensor(coins, dtype=torch.float64).to(sums.device) * sums[-1]
    last = int((weights > 0).nonzero()[-1])  # rounding may carry a coin to the end
    found: list[int] = torch.searchsorted(sums, at, right=True).clamp(max=last).tolist()
    return found
