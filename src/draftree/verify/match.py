"""*match*, the default scheme (sample-then-match). Pure tensors: never drafts, never touches a cache.

The target draws its own next token at every node of the walk; when a child equals the draw the walk goes down to it,
else the draw is emitted and the walk ends.
The output is the target's own draws in order, so it does not depend on the tree at all; the tree decides only how many
of them one pass yields. *greedy* is the same walk at temperature 0, where the draw at a node does not depend on how
the walk came there: all nodes are drawn at once and the walk is a look at the host's copy of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling import first_largest
from ..tree import ROOT, DraftTree, TreeBatch

Draw = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, V], tokens drawn so far in this step [B, d]) -> next tokens [B]; see ``sampling.Draws``.

``drawn`` is ENDED (-1) where a request's walk is over; what is drawn for it then is not used.
"""

ENDED = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one request gains from one target pass.

    Attributes:
        path: accepted nodes in order, by number; may be empty.
        tokens: the accepted tokens and then the target's own one (the bonus): ``len(path) + 1`` tokens.
        beside: [1 + N, W] what came to the host in the same transfer, if anything did.
    """

    path: list[int]
    tokens: list[int]
    beside: Tensor | None = None


def greedy(logits: Tensor, trees: Sequence[DraftTree], beside: Tensor | None = None) -> list[Verdict]:
    """*match* at temperature 0 without processors: one argmax over all nodes, one device-to-host transfer.

    The arguments are those of ``match``, with the trees as they are.
    """
    verdicts = []
    for tree, (drawn, more) in zip(trees, _to_host(first_largest(logits), beside), strict=True):
        edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        node_of = {edge: node for node, edge in reversed(list(enumerate(edges)))}
        path, tokens = [], [drawn[0]]
        node = node_of.get((ROOT, drawn[0]))
        while node is not None:
            path.append(node)
            tokens.append(drawn[node + 1])
            node = node_of.get((node, tokens[-1]))
        verdicts.append(Verdict(path, tokens, more))
    return verdicts


def _to_host(drawn: Tensor, beside: Tensor | None) -> Iterator[tuple[list[int], Tensor | None]]:
    """Rows of both, in one transfer; float64 holds every token id."""
    if beside is None:
        return ((row, None) for row in drawn.tolist())
    both = torch.cat([drawn.double(), beside.double().flatten(1)], dim=1).cpu()
    first, second = both.tensor_split([drawn.shape[1]], dim=1)
    return zip(first.long().tolist(), second.reshape(beside.shape), strict=True)


def match(logits: Tensor, trees: TreeBatch, draw: Draw, beside: Tensor | None = None) -> list[Verdict]:
    """Walk down each tree along the target's own draws.

    One device-to-host transfer, at the end; the walk takes ``trees.depth + 1`` draws of [B, V] logits, whatever the
    number of nodes, and copies nothing of the size of the tree times the vocabulary.

    Args:
        logits: [B, 1 + N, V]: column 0 follows the root, column 1 + i follows node i.
        trees: the B trees that the target has seen.
        draw: the target's draw at one node of every request.
        beside: [B, 1 + N, W] what else the host should have.
    """
    batch = torch.arange(logits.shape[0], device=logits.device)
    current = torch.zeros_like(batch)  # column of the node that each request stands on
    alive = torch.ones_like(batch, dtype=torch.bool)
    drawn = torch.empty((logits.shape[0], trees.depth + 1), dtype=torch.int64, device=logits.device)
    path: list[Tensor] = []
    for depth in range(trees.depth + 1):
        tokens = draw(logits[batch, current], torch.where(alive[:, None], drawn[:, :depth], ENDED))
        drawn[:, depth] = tokens
        if depth == trees.depth:
            break
        fits = (trees.parents == current[:, None] - 1) & (trees.tokens == tokens[:, None])
        alive = alive & fits.any(1)
        node = fits.int().argmax(1)
        path.append(torch.where(alive, node, -1))
        current = torch.where(alive, node + 1, current)
        if alive.device.type == "cpu" and not bool(alive.any()):
            break  # on an accelerator the question would cost a transfer
    walked = drawn[:, : depth + 1]
    packed = torch.cat([walked, torch.stack(path, 1)], dim=1) if path else walked
    verdicts = []
    for row, more in _to_host(packed, beside):
        nodes = [n for n in row[walked.shape[1] :] if n >= 0]
        verdicts.append(Verdict(path=nodes, tokens=row[: len(nodes) + 1], beside=more))
    return verdicts
