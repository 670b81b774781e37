"""*match*, the default scheme (sample-then-match). Never drafts, never touches a cache.

The target draws its own next token at every node of the walk; when a child equals the draw the walk goes down to it,
else the draw is emitted and the walk ends.
The output is the target's own draws in order, so it does not depend on the tree at all; the tree decides only how many
of them one pass yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling.draws import DrawPlace, Draws, draw_at
from ..scores import Scores
from ..tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one request gains from one target pass.

    Attributes:
        path: accepted nodes in order, by number; may be empty.
        tokens: the accepted tokens and then the target's own one (the bonus): ``len(path) + 1`` tokens.
    """

    path: list[int]
    tokens: list[int]


def match(scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws]) -> list[Verdict]:
    """Walk down each tree along the target's own draws.

    What is drawn at a node mostly depends on its path alone: then all nodes of all trees are drawn in one call of
    ``scores``, and the walk is a look at the tree. Under a constraint, or a user's processors, only nodes that the walk
    visits are drawn, level by level.

    Args:
        scores: of the target's pass over the trees.
        firsts: [B] slot of each tree's node 0; its node n has slot firsts[b] + n, ROOT included.
        trees: [B].
        draws: [B] of their requests.
    """
    places, together, walking = list[DrawPlace](), list[int](), list[int]()
    for b, own in enumerate(draws):
        if own.walks:
            walking.append(b)
        else:
            together.append(b)
            places += _places(own, firsts[b], trees[b])
    verdicts = _walked(scores, firsts, trees, draws, walking) if walking else {}
    drawn, at = draw_at(scores, places) if places else [], 0
    for b in together:
        verdicts[b] = _followed(trees[b], drawn[at : at + 1 + len(trees[b])])
        at += 1 + len(trees[b])
    return [verdicts[b] for b in range(len(trees))]


def _places(draws: Draws, first: int, tree: DraftTree) -> list[DrawPlace]:
    """Of the root, and then of each node."""
    places = [DrawPlace(draws, first + ROOT, [])]
    for slot, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), start=first):
        places.append(DrawPlace(draws, slot, [*places[parent - ROOT].drawn, token]))
    return places


def _followed(tree: DraftTree, drawn: Sequence[int]) -> Verdict:
    """The walk along what was drawn at the root and at each node; of equal siblings it goes to the first."""
    node, path, tokens = ROOT, list[int](), [drawn[0]]
    for child, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == node and token == tokens[-1]:
            node = child
            path.append(child)
            tokens.append(drawn[child - ROOT])
    return Verdict(path, tokens)


def _walked(
    scores: Scores, firsts: Sequence[int], trees: Sequence[DraftTree], draws: Sequence[Draws], walking: Sequence[int]
) -> dict[int, Verdict]:
    """The walks of some of the requests, together, a draw of each in one turn."""
    found = {b: Verdict([], []) for b in walking}
    while walking:
        places = []
        for b in walking:
            path, tokens = found[b].path, found[b].tokens
            places.append(DrawPlace(draws[b], firsts[b] + (path[-1] if path else ROOT), tokens))
        further = []
        for b, token in zip(walking, draw_at(scores, places), strict=True):
            tree, (path, tokens) = trees[b], (found[b].path, found[b].tokens)
            node = next((c for c in tree.children(path[-1] if path else ROOT) if tree.tokens[c] == token), None)
            tokens.append(token)
            if node is not None:
                path.append(node)
                further.append(b)
        walking = further
    return found
