"""The best fixed tree for measured acceptance, by dynamic programming (Chen et al., "Sequoia", Section 3.1).

Pure functions. An acceptance table ``a`` is [D, R] float64: ``a[d, r]`` is the probability that the child of rank r is
accepted at depth d + 1, given that its parent was. The expected acceptance length of a tree is 1 + the sum over its
nodes of the product of ``a`` along their paths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..config import MAX_NODES
from ..errors import ConfigError
from .entropy import MAX_WIDTH
from .static import Ranks


def best_tree(acceptance: Tensor, nodes: int) -> tuple[Ranks, ...]:
    """The tree of at most ``nodes`` nodes and D levels with the largest expected acceptance length.

    Nodes that would gain nothing are left out. The most probable nodes come first, as far as parents and lower ranks
    allow: where larger ranks are less often right, the first n nodes are the best tree of n nodes.

    Raises:
        ConfigError: no such table or budget.
    """
    check_table(acceptance)
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"node budget is {nodes}: use 1 to {MAX_NODES}")
    _, choices = _solve(acceptance.double(), nodes)
    return _best_first(_unfold(choices, nodes), acceptance)


def best_size(
    acceptance: Tensor,
    verify_seconds: Callable[[int], float],
    draft_seconds_per_layer: float,
    max_nodes: int,
    max_depth: int | None = None,
) -> tuple[Ranks, ...]:
    """The tree that gains most tokens a second: max over b nodes, d levels of E(b, d) / (d t_draft + t_verify(b + 1)).

    Args:
        acceptance: [D, R].
        verify_seconds: tokens of a target pass, the root among them -> its seconds.
        draft_seconds_per_layer: of one drafter pass.
        max_nodes: largest tree.
        max_depth: deepest tree; D by default.

    Returns:
        its nodes; none where plain decoding, 1 / t_verify(1), is the fastest.

    Raises:
        ConfigError: no such table, budget or depth.
    """
    check_table(acceptance)
    if not 1 <= max_nodes <= MAX_NODES:
        raise ConfigError(f"node budget is {max_nodes}: use 1 to {MAX_NODES}")
    if max_depth is not None and max_depth < 1:
        raise ConfigError(f"tree depth is {max_depth}: use at least 1")
    seconds = torch.tensor([verify_seconds(n + 1) for n in range(max_nodes + 1)], dtype=torch.float64)
    best_rate = 1 / float(seconds[0])
    best: list[Ranks] = []
    for depth in range(1, min(max_depth or len(acceptance), len(acceptance)) + 1):
        gains, choices = _solve(acceptance[:depth].double(), max_nodes)
        rates = (1 + gains) / (depth * draft_seconds_per_layer + seconds)
        rates[1:][gains.diff() <= 0] = 0  # the tree has fewer nodes: it was rated as a smaller one
        rates[0] = 0
        n = int(rates.argmax())
        if rates[n] > best_rate:
            best_rate, best = float(rates[n]), _unfold(choices, n)
    return _best_first(best, acceptance)


def expected_acceptance_length(acceptance: Tensor, paths: Sequence[Ranks]) -> float:
    """1 + the sum over nodes of the product of ``acceptance`` along their paths."""
    return 1 + math.fsum(_path_acceptance(acceptance.tolist(), path) for path in paths)


def check_table(acceptance: Tensor) -> None:
    """Make sure that this is an acceptance table.

    Raises:
        ConfigError: it is not.
    """
    if acceptance.dim() != 2 or not acceptance.shape[0] or not 1 <= acceptance.shape[1] <= MAX_WIDTH:
        raise ConfigError(
            f"the acceptance table has shape {list(acceptance.shape)}: "
            f"give one row a depth, 1 to {MAX_WIDTH} ranks each"
        )
    if not bool(((acceptance >= 0) & (acceptance <= 1)).all()):
        raise ConfigError("the acceptance table has numbers outside 0 to 1: give probabilities")


def _solve(acceptance: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The recursion for all sizes at once.

    c(d, n, r) is what n nodes below an accepted node of depth d gain at most in children of rank r and more:
    c(d, n, r) = max over 1 <= m <= n of a[d, r] (1 + c(d + 1, m - 1, 0)) + c(d, n - m, r + 1); 0: no more children.

    Returns:
        ([nodes + 1] gains c(0, n, 0); [D, R, nodes + 1] the m of each maximum, 0 for no more children).
    """
    depths, ranks = acceptance.shape
    choices = torch.zeros((depths, ranks, nodes + 1), dtype=torch.int64)
    below = torch.zeros(nodes + 1, dtype=torch.float64)
    too_many = torch.full((nodes,), -math.inf, dtype=torch.float64)
    for d in reversed(range(depths)):
        siblings = torch.zeros_like(below)
        for r in reversed(range(ranks)):
            own = acceptance[d, r] * (1 + below[:-1].flip(0))  # of m = nodes, ..., 1
            left = torch.cat([too_many, siblings]).unfold(0, nodes, 1)  # [n, m likewise] of the siblings' n - m
            gains, at = (own + left[: nodes + 1]).max(1)
            siblings = gains.clamp(min=0)
            choices[d, r] = torch.where(gains > 0, nodes - at, 0)
        below = siblings
    return below, choices


def _unfold(choices: Tensor, nodes: int) -> list[Ranks]:
    """The tree behind a maximum."""
    paths: list[Ranks] = []
    open_nodes: list[tuple[Ranks, int]] = [((), nodes)]
    while open_nodes:
        parent, room = open_nodes.pop()
        if len(parent) == choices.shape[0]:
            continue
        for rank, sizes in enumerate(choices[len(parent)]):
            size = int(sizes[room])
            if not size:
                break
            paths.append((*parent, rank))
            open_nodes.append((paths[-1], size - 1))
            room -= size
    return paths


def _best_first(paths: Sequence[Ranks], acceptance: Tensor) -> tuple[Ranks, ...]:
    """By path acceptance, then depth, then ranks; each node after its parent and its sibling of the rank before."""
    table, members = acceptance.tolist(), set(paths)
    ready: list[tuple[float, int, Ranks]] = [(-_path_acceptance(table, (0,)), 1, (0,))] if members else []
    ordered: list[Ranks] = []
    while ready:
        path = heapq.heappop(ready)[2]
        ordered.append(path)
        for after in ((*path, 0), (*path[:-1], path[-1] + 1)):
            if after in members:
                heapq.heappush(ready, (-_path_acceptance(table, after), len(after), after))
    return tuple(ordered)


def _path_acceptance(table: Sequence[Sequence[float]], path: Ranks) -> float:
    return math.prod(table[d][rank] for d, rank in enumerate(path))
