"""Beams as paths of one tree in a cache row, and the request that they belong to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import SamplingParams
from ..errors import CacheError
from ..models.base import ForestModel, Nodes, Row
from ..request import Request
from ..sampling.draws import Draws
from ..text.detokenizer import NoText
from ..tree import ROOT, Floats
from .params import BeamParams


@dataclass(slots=True, eq=False)
class BeamNode:
    """One token of the tree; the root is the last token of the prompt.

    Attributes:
        token: its id.
        parent: what it follows; None for the root.
        length: generated tokens on its path, itself included; 0 for the root.
        score: log-probability (nats) of these tokens: the target's once it has verified the node, before that the
            drafter's from the last verified node on.
    """

    token: int
    parent: BeamNode | None = None
    length: int = 0
    score: float = 0.0

    def path(self, above: BeamNode | None = None) -> list[BeamNode]:
        """The nodes from just below ``above``, one of its ancestors, down to it; None: from below the root."""
        nodes, node = list[BeamNode](), self
        while node is not above and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> list[int]:
        """Generated tokens on its path."""
        return [node.token for node in self.path()]


class TreeRow:
    """One request's tree in one row of a model.

    Attributes:
        row: the model's.
        base: the last committed node.
        vocab_size: V.
        numbers: uncommitted nodes -> their numbers in the row, ascending.
        logits: [V] after nodes that were fed, copies; only running beams' ends outlive ``keep``.

    Args:
        row: holds the prompt.
        root: the last token of it.
        logits: [V] after it.
    """

    def __init__(self, row: Row, root: BeamNode, logits: Floats) -> None:
        self.row = row
        self.base, self.vocab_size = root, len(logits)
        self.numbers: dict[BeamNode, int] = {}
        self.logits: dict[BeamNode, Floats] = {root: logits}

    @property
    def slots(self) -> int:
        """Tokens that it holds in the cache."""
        return self.row.length + len(self.numbers)

    def unfed(self, ends: Iterable[BeamNode]) -> list[BeamNode]:
        """Nodes on the paths to ``ends`` that the row lacks, parents first."""
        missing: dict[BeamNode, None] = {}
        for end in ends:
            path, node = list[BeamNode](), end
            while node is not self.base and node not in self.numbers and node not in missing:
                path.append(node)
                node = _above(node)
            missing |= dict.fromkeys(reversed(path))
        return list(missing)

    def append(self, nodes: Sequence[BeamNode]) -> Nodes:
        """New nodes, parents first, as the model takes them; from now on they are in the row."""
        start = len(self.numbers)
        self.numbers |= {node: start + i for i, node in enumerate(nodes)}
        parents = [self.numbers.get(_above(node), ROOT) for node in nodes]
        tokens = [node.token for node in nodes]
        return Nodes.of(tokens, parents)

    def keep(self, model: ForestModel, ends: Sequence[BeamNode]) -> tuple[list[int], list[BeamNode]]:
        """Drop what is not on the paths to ``ends``, which are all of one length; commit what lies above all of them.

        Returns:
            the numbers of the nodes that are kept, and of these the first ones that are committed.
        """
        paths = [end.path(self.base) for end in ends]
        alive = {node for path in paths for node in path}
        kept = [node for node in self.numbers if node in alive]
        numbers = [self.numbers[node] for node in kept]
        trunk = 0
        for level in zip(*(path[:-1] for path in paths), strict=False):
            if len(set(level)) > 1 or level[0] not in self.numbers:
                break
            trunk += 1
        model.prune(self.row, numbers, trunk)
        if trunk:
            self.base = kept[trunk - 1]
        self.numbers = {node: i for i, node in enumerate(kept[trunk:])}
        self.logits = {end: self.logits[end] for end in ends if end in self.logits}
        return numbers, kept[:trunk]


def feed(model: ForestModel, trees: Sequence[TreeRow], nodes: Sequence[Sequence[BeamNode]]) -> None:
    """One pass over new nodes, parents first; trees without any take no part."""
    fed = [(tree, new) for tree, new in zip(trees, nodes, strict=True) if new]
    fed.sort(key=lambda pair: pair[0].row.slot)  # storage order
    if fed:
        scores = model.extend([tree.row for tree, _ in fed], [tree.append(new) for tree, new in fed])
        logits = iter(scores.logits(range(scores.starts[-1])))
        for tree, new in fed:
            tree.logits |= dict(zip(new, logits, strict=False))


def _above(node: BeamNode) -> BeamNode:
    if node.parent is None:
        raise CacheError("the end of a beam is not below the last committed token of its row")
    return node.parent


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam.

    Attributes:
        node: its last token.
        count: how often it is there: sampled beams may coincide, and each counts.
    """

    node: BeamNode
    count: int = 1


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A beam that has ended.

    Attributes:
        node: its last token.
        score: its log-probability over length ** length_penalty.
        reason: "eos" or "length".
    """

    node: BeamNode
    score: float
    reason: str


_DECAY = 0.95
"""Share of the record of drafts that each step leaves."""


@dataclass(slots=True)
class DraftRecord:
    """What became of drafts so far, with exponential decay.

    Attributes:
        reached: drafted layers that the target verified.
        went_on: those whose beams had all been drafted, so that the next layer followed in the same pass.
        layers: layers drafted.
        nodes: nodes in them.
    """

    reached: float = 0.0
    went_on: float = 0.0
    layers: float = 0.0
    nodes: float = 0.0

    def observe(self, drafted: int, nodes: int, went_on: int) -> None:
        """A step drafted so many layers of so many nodes in all, and so many of them went on."""
        reached = min(drafted, went_on + 1)
        self.reached = _DECAY * self.reached + reached
        self.went_on = _DECAY * self.went_on + went_on
        self.layers = _DECAY * self.layers + drafted
        self.nodes = _DECAY * self.nodes + nodes


class BeamRequest:
    """A prompt and its beams.

    Attributes:
        ids: the prompt's tokens.
        trunk: what a draft source sees of it: the prompt, and the tokens that the target has committed since; to draw
            from its distributions they are warped here with the token warp alone.
        limit: most tokens of a beam.
        tree: its tree in the target's cache; None once it is closed.
        running: beams that go on, all of one length.
        finished: at most W, best first.
        done: no beam goes on.
        improvable: a running beam may still beat a finished one, by transformers' heuristic (beam search).
        stats: what was measured; ``tokens`` are layers of beams.
        peak_slots: most tokens that its tree has held in the target's cache.
        record: what became of drafts so far: its own where beams are sampled.
        drafting: the source of drafts knows it.
    """

    def __init__(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        beams: BeamParams,
        limit: int,
        eos_ids: frozenset[int],
        record: DraftRecord | None = None,
    ) -> None:
        self.ids = list(ids)
        self.params = params
        self.beams = beams
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.limit = limit
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.root = BeamNode(self.ids[-1])
        joint = params.temperature and beams.warp == "joint"
        own = SamplingParams(temperature=1.0, max_tokens=params.max_tokens) if joint else replace(params, processors=())
        self.trunk = Request(self.ids, own, limit, eos_ids, NoText())
        self.tree: TreeRow | None = None
        self.running = [Beam(self.root)]
        self.finished: list[FinishedBeam] = []
        self.done = False
        self.improvable = True
        self.stats = self.trunk.stats
        self.peak_slots = len(self.ids)
        self.record = record or DraftRecord()
        self.drafting = True

    @property
    def open_tree(self) -> TreeRow:
        """Its tree.

        Raises:
            CacheError: it is closed.
        """
        if self.tree is None:
            raise CacheError("a closed or finished request cannot go on: open its prompt again")
        return self.tree

    @property
    def length(self) -> int:
        """Generated tokens of the running beams."""
        return self.running[0].node.length

    @property
    def ends(self) -> list[BeamNode]:
        return [beam.node for beam in self.running]

    @property
    def unfinished(self) -> int:
        return self.beams.width - len(self.finished)

    def history(self, node: BeamNode) -> list[int]:
        """Token ids up to a node, prompt included."""
        return [*self.ids, *node.tokens]

    def draws(self, node: BeamNode) -> Draws:
        """What acts on the logits after a node."""
        return Draws(self.params, self.seed, self.history(node), len(self.ids))

    def ended(self, node: BeamNode) -> str | None:
        """Why a beam ends with this node, if it does."""
        return "eos" if node.token in self.eos_ids else "length" if node.length >= self.limit else None

    def finish(self, nodes: Sequence[BeamNode]) -> None:
        """Beams have ended: the best W are kept, of equal ones those that were there before."""
        power = self.beams.length_penalty
        self.finished += [FinishedBeam(n, n.score / n.length**power, self.ended(n) or "length") for n in nodes]
        self.finished.sort(key=lambda f: -f.score)
        del self.finished[self.beams.width :]
