"""Beams as paths of one tree in a cache row, and the request that they belong to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Interval

from ..config import MAX_NODES, Count, Probability, SamplingParams, check_fields, option
from ..errors import CacheError, ConfigError
from ..models.base import LanguageModel, Nodes, Row
from ..request import Request
from ..sampling.draws import Draws
from ..text.detokenizer import NoText
from ..tree import ROOT, Floats

MAX_PENALTY = 20
"""Beyond it powers of a length leave the range of floating-point numbers, and no ranking is left."""

BeamWarp = Literal["joint", "token"]
"""What temperature, top-k, top-p and min-p act on where beams are sampled (``beam_distribution``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How many beams there are, how they are drafted, and how finished ones are ranked.

    At temperature 0 (``SamplingParams``) beams are *searched*: the most probable go on, as in transformers'
    ``generate(num_beams=width, do_sample=False)``. Above it they are *sampled* (Qin et al., "Dynamic-Width Speculative
    Beam Decoding", Section 2.1).

    Attributes:
        width: beams W; when sampling with a threshold, the most beams of a layer.
        returned: best sequences n to return.
        length_penalty: a sequence of L generated tokens scores its log-probability over L ** length_penalty.
        early_stopping: of beam search, transformers' own: True ends with the W-th finished beam; False and "never" also
            check whether a running one could still win, "never" by the greatest length that it may reach.
        draft_width: drafted beams W_S of a layer; None: twice W, for of each layer all W must be drafted.
        depth: drafted layers gamma.
        threshold: t of the dynamic width (Eq. 7); None: W beams in every layer.
        min_width: least beams W_min of a layer with a dynamic width (Eq. 6).
        single_cache: after each target pass only the beam of lowest perplexity goes on (Section 3.4), so that the cache
            holds one sequence.
        warp: of sampled beams: "joint" warps the joint distribution over (beam, token), as the paper does, "token" each
            beam's next-token distribution, as single sequences are sampled.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    width: Count = option(
        "Decode with this many beams: searched at temperature 0, sampled above it.", 4, name="--beams", metavar="W"
    )
    returned: Count = option("Best sequences of --beams to print; 1 by default.", 1, name="-n", metavar="N")
    draft_width: Count | None = option(
        "Drafted beams of a layer; twice --beams by default.", name="--draft-beams", metavar="W"
    )
    depth: Count = option("Layers that --drafter drafts for --beams; 3 by default.", 3, metavar="D")
    threshold: Probability | None = option(
        "Sampled beams: as many as are accepted with this probability, up to --beams.",
        name="--width-threshold",
        metavar="T",
    )
    min_width: Count = option("Least beams with --width-threshold; 1 by default.", 1, name="--min-beams", metavar="W")
    length_penalty: Annotated[float, Interval(ge=-MAX_PENALTY, le=MAX_PENALTY)] = option(
        "Beams score their log-probability over length to this power; 1 by default.", 1.0, metavar="P"
    )
    early_stopping: bool | Literal["never"] = option(
        "When beam search ends, as in transformers.", False, choices={"yes": True, "no": False, "never": "never"}
    )
    single_cache: bool = option("Sampled beams: only the best goes on after each target pass.", False)
    warp: BeamWarp = option(
        "Sampled beams: temperature, top-k, top-p and min-p act on the joint distribution of beam and next token "
        "(joint, the default) or on each beam's next tokens (token).",
        "joint",
        name="--beam-warp",
        choices={"joint": "joint", "token": "token"},
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.returned > self.width:
            raise ConfigError(f"{self.returned} best sequences of {self.width} beams: use at most {self.width}")
        if self.drafted < self.width:
            raise ConfigError(
                f"{self.drafted} draft beams are fewer than the {self.width} beams: draft at least {self.width}"
            )
        if self.min_width > self.width:
            raise ConfigError(f"at least {self.min_width} of {self.width} beams: use at most {self.width}")
        if self.threshold is None and self.min_width > 1:
            raise ConfigError(
                f"at least {self.min_width} beams say nothing of a fixed width: give a width threshold, such as 0.9"
            )
        if self.nodes > MAX_NODES:
            raise ConfigError(
                f"{self.drafted} draft beams in {self.depth} layers are {self.nodes} nodes: use at most {MAX_NODES}"
            )

    @property
    def drafted(self) -> int:
        """W_S."""
        return 2 * self.width if self.draft_width is None else self.draft_width

    @property
    def nodes(self) -> int:
        return self.drafted * self.depth

    def check(self, params: SamplingParams) -> None:
        """Make sure that sequences can be decoded so.

        Raises:
            ConfigError: they cannot.
        """
        if params.constraint is not None:
            raise ConfigError("beams take no constraint: leave the grammar out, or the beams")
        for name in ("min_tokens", "bad_words", "allowed_token_ids", "stop_token_ids", "include_stop_str_in_output"):
            if value := getattr(params, name):
                raise ConfigError(f"beams take no {name} ({value!r}): leave it out, or the beams")
        if params.temperature == 0:
            way = "use a temperature above 0 to sample beams, or leave it out for beam search"
            if self.threshold is not None:
                raise ConfigError(f"width threshold {self.threshold} is for sampled beams, the temperature is 0: {way}")
            if self.single_cache:
                raise ConfigError(f"a single cache is for sampled beams, the temperature is 0: {way}")
            if self.warp != "joint":
                raise ConfigError(f"beam warp {self.warp} is for sampled beams, the temperature is 0: {way}")
        elif self.early_stopping is not False:
            raise ConfigError(
                f"early_stopping {self.early_stopping!r} is for beam search, the temperature is {params.temperature}: "
                "sampled beams all run to their end"
            )
        if params.stop or params.criteria:
            raise ConfigError(
                f"stop strings {list(params.stop)} and {len(params.criteria)} stopping criteria end one sequence, not "
                "beams: leave them out, or decode without beams"
            )


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

    def keep(self, model: LanguageModel, ends: Sequence[BeamNode]) -> tuple[list[int], list[BeamNode]]:
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


def feed(model: LanguageModel, trees: Sequence[TreeRow], nodes: Sequence[Sequence[BeamNode]]) -> None:
    """One pass over new nodes, parents first; trees without any take no part."""
    fed = [(tree, new) for tree, new in zip(trees, nodes, strict=True) if new]
    fed.sort(key=lambda pair: pair[0].row.number)  # storage order
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
        accepted_widths: of sampled beams: how many drafted ones were accepted, in each layer that was verified.
    """

    def __init__(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        beams: BeamParams,
        limit: int,
        eos_ids: frozenset[int],
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
        self.accepted_widths: list[int] = []

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


def check_memory(target: LanguageModel, requests: Sequence[BeamRequest]) -> None:
    """Make sure that a cache for these requests fits, should their beams share nothing but the prompt.

    Raises:
        ConfigError: it does not.
    """
    if not requests:
        return
    beams, most = requests[0].beams, max(requests, key=lambda r: len(r.ids) + r.beams.width * r.limit)
    width = 1 if beams.single_cache else beams.width
    tokens = len(most.ids) + width * most.limit + beams.nodes
    if not target.holds([tokens] * len(requests)):
        raise ConfigError(
            f"{width} beams of up to {most.limit} tokens after a prompt of {len(most.ids)} may take a cache of "
            f"{len(requests)} x {tokens} tokens, more than the memory that {target.capabilities.name} may use for it: "
            "use fewer beams or a lower max_tokens"
        )
