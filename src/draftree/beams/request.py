"""One prompt with its beams on their way: running ones, finished ones, how they are ranked. Knows no models.

A beam that draws an end-of-sequence token, or reaches the limit, is finished: it keeps its score and is never extended.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import SamplingParams
from ..request import Stats
from .nodes import Node, TreeRow
from .params import BeamParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam.

    Attributes:
        node: its last token.
        count: how often it is there: sampled beams may coincide, and each counts.
    """

    node: Node
    count: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """A beam that has ended.

    Attributes:
        node: its last token.
        score: its log-probability over length ** length_penalty.
        reason: "eos" or "length".
    """

    node: Node
    score: float
    reason: str


_MEMORY = 0.95
"""Share of the record of drafts that each step leaves."""


@dataclass(slots=True)
class Odds:
    """What became of drafts so far, with a fading memory.

    Attributes:
        reached: drafted layers that the target judged.
        went_on: those whose beams had all been drafted, so that the next layer followed in the same pass.
        layers: layers drafted.
        nodes: nodes in them.
    """

    reached: float = 0.0
    went_on: float = 0.0
    layers: float = 0.0
    nodes: float = 0.0

    def learn(self, drafted: int, nodes: int, went_on: int) -> None:
        """A step drafted so many layers of so many nodes in all, and so many of them went on."""
        reached = min(drafted, went_on + 1)
        self.reached = _MEMORY * self.reached + reached
        self.went_on = _MEMORY * self.went_on + went_on
        self.layers = _MEMORY * self.layers + drafted
        self.nodes = _MEMORY * self.nodes + nodes


class BeamRequest:
    """A prompt and its beams.

    Attributes:
        ids: the prompt's tokens.
        params: how tokens are drawn.
        beams: how many beams there are, and what becomes of finished ones.
        seed: the seed in use.
        limit: most tokens of a beam.
        drafted: drafted beams W_S of a layer.
        eos_ids: tokens that end a beam.
        tree: its tree in the target's cache; None once it is closed.
        running: beams that go on, all of one length.
        finished: at most W, best first.
        done: no beam goes on.
        improvable: a running beam may still beat a finished one, by transformers' heuristic (beam search).
        stats: what was measured; ``tokens`` are layers of beams.
        peak_slots: most tokens that its tree has held in the target's cache.
        odds: what became of drafts so far: its own where beams are sampled.
        drafting: the source of drafts knows it.
    """

    def __init__(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        beams: BeamParams,
        limit: int,
        eos_ids: frozenset[int],
        odds: Odds | None = None,
        drafted: int | None = None,
    ) -> None:
        self.ids = list(ids)
        self.params = params
        self.beams = beams
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.limit = limit
        self.drafted = drafted or beams.drafted
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.root = Node(self.ids[-1])
        self.tree: TreeRow | None = None
        self.running = [Beam(self.root)]
        self.finished: list[Finished] = []
        self.done = False
        self.improvable = True
        self.stats = Stats()
        self.peak_slots = len(self.ids)
        self.odds = odds or Odds()
        self.drafting = True

    @property
    def length(self) -> int:
        """Generated tokens of the running beams."""
        return self.running[0].node.length

    @property
    def ends(self) -> list[Node]:
        """Last tokens of the running beams."""
        return [beam.node for beam in self.running]

    @property
    def slots(self) -> int:
        """Beams that are not finished, of W."""
        return self.beams.width - len(self.finished)

    def history(self, node: Node) -> list[int]:
        """Token ids up to a node, prompt included."""
        return [*self.ids, *node.tokens]

    def ended(self, node: Node) -> str | None:
        """Why a beam ends with this node, if it does."""
        return "eos" if node.token in self.eos_ids else "length" if node.length >= self.limit else None

    def finish(self, nodes: Sequence[Node]) -> None:
        """Beams have ended: the best W are kept, of equal ones those that were there before."""
        power = self.beams.length_penalty
        self.finished += [Finished(n, n.score / n.length**power, self.ended(n) or "length") for n in nodes]
        self.finished.sort(key=lambda f: -f.score)
        del self.finished[self.beams.width :]
