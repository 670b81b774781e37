"""Beams as paths of one tree in a cache row, and the request that they belong to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Literal

from annotated_types import Interval

from ..config import MAX_NODES, Count, Probability, SamplingParams, check_fields, option
from ..draws import Draws
from ..errors import ConfigError
from ..models.base import LanguageModel, Nodes, Row
from ..request import Request
from ..text.detokenizer import NoText
from ..tree import ROOT, Floats

MAX_PENALTY = 20
"""Beyond it powers of a length leave the range of floating-point numbers, and no ranking is left."""

_OF_ONE_SEQUENCE = (
    "constraint min_tokens bad_words allowed_token_ids stop_token_ids include_stop_str_in_output stop criteria "
    "logprobs prompt_logprobs".split()
)
"""What beams do not take of ``SamplingParams``."""


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
        for name in _OF_ONE_SEQUENCE:
            value, default = getattr(params, name), getattr(SamplingParams(), name)
            if value != default and (value or default is None):  # an empty list stands for an empty tuple
                raise ConfigError(f"beams take no {name} ({value!r}): leave it out, or the beams")
        searched: list[tuple[str, object, object]] = [("early stopping", self.early_stopping, False)]
        sampled: list[tuple[str, object, object]] = [
            ("width threshold", self.threshold, None),
            ("single cache", self.single_cache, False),
        ]
        kind, others = ("beam search", searched) if params.temperature else ("sampled beams", sampled)
        for what, value, usual in others:
            if value != usual:
                way = "leave it out, or choose another temperature"
                raise ConfigError(f"{what} {value} is for {kind}, the temperature is {params.temperature:g}: {way}")


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
        read: of these the first ones, which the model has read; the others are for its next pass.
        logits: [V] after nodes that were read, copies; only running beams' ends outlive ``keep``.

    Args:
        row: holds the prompt.
        root: the last token of it.
        logits: [V] after it.
    """

    def __init__(self, row: Row, root: BeamNode, logits: Floats) -> None:
        self.row = row
        self.base, self.vocab_size = root, len(logits)
        self.numbers: dict[BeamNode, int] = {}
        self.read = 0
        self.logits: dict[BeamNode, Floats] = {root: logits}

    def begin(self, ends: Iterable[BeamNode]) -> None:
        """Number the ends of beams for the next pass; what was numbered for a pass that failed is dropped."""
        read = list(self.numbers)[: self.read]
        self.numbers = {node: i for i, node in enumerate(dict.fromkeys([*read, *ends]))}

    def parent(self, node: BeamNode) -> int:
        """Number of a node's parent, ROOT (-1) where it is committed."""
        return ROOT if node.parent is None else self.numbers.get(node.parent, ROOT)

    def keep(self, model: LanguageModel, ends: Sequence[BeamNode]) -> tuple[list[int], list[BeamNode]]:
        """Drop what is not on the paths to ``ends``, which are all of one length; commit what lies above all of them.

        Returns:
            the numbers of the nodes that are kept, and of these the first ones that are committed.
        """
        paths = [end.path(self.base) for end in ends]
        alive = {node for path in paths for node in path}
        survivors = [node for node in self.numbers if node in alive]
        numbers = [self.numbers[node] for node in survivors]
        levels = zip(*(path[:-1] for path in paths), strict=False)
        trunk = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
        model.prune(self.row, numbers, trunk)
        if trunk:
            self.base = survivors[trunk - 1]
        self.numbers = {node: i for i, node in enumerate(survivors[trunk:])}
        self.read = len(self.numbers)
        self.logits = {end: self.logits[end] for end in ends if end in self.logits}
        return numbers, survivors[:trunk]


def feed(model: LanguageModel, trees: Iterable[TreeRow]) -> None:
    """One pass over the nodes that rows have not read; trees without any take no part."""
    fed = [(tree, new) for tree in trees if (new := list(tree.numbers)[tree.read :])]
    fed.sort(key=lambda pair: pair[0].row.number)  # storage order
    if fed:
        nodes = [Nodes([n.token for n in new], [tree.parent(n) for n in new]) for tree, new in fed]
        scores = model.extend([tree.row for tree, _ in fed], nodes)
        logits = iter(scores.logits(range(scores.starts[-1])))
        for tree, new in fed:
            tree.logits |= dict(zip(new, logits, strict=False))
            tree.read = len(tree.numbers)


class BeamRequest:
    """A prompt and its beams.

    Attributes:
        ids: the prompt's tokens.
        draws: what acts on the logits after the prompt and a beam's tokens behind it.
        trunk: what a draft source sees of it: the prompt, and the tokens that the target has committed since; its
            distributions are not warped where beams are sampled.
        limit: most tokens of a beam.
        tree: its tree in the target's cache; there while it is open.
        running: beams that go on: their last nodes, all of one length, and how often each beam is there.
        finished: the last nodes of at most W beams that have ended, best first; one that is there twice stands twice.
        done: no beam goes on.
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
        self.draws = Draws(params, self.seed, self.ids, len(self.ids))
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        trunk_params = SamplingParams(temperature=float(params.temperature > 0), max_tokens=params.max_tokens)
        self.trunk = Request(self.ids, trunk_params, limit, eos_ids, NoText())
        self.tree: TreeRow
        self.running = {BeamNode(self.ids[-1]): 1}
        self.finished: list[BeamNode] = []
        self.done = False
        self.stats = self.trunk.stats
        self.peak_slots = len(self.ids)
        self.accepted_widths: list[int] = []

    @property
    def length(self) -> int:
        """Generated tokens of the running beams."""
        return self.ends[0].length

    @property
    def ends(self) -> list[BeamNode]:
        return list(self.running)

    @property
    def unfinished(self) -> int:
        return self.beams.width - len(self.finished)

    def ended(self, node: BeamNode) -> str | None:
        """Why a beam ends with this node, if it does."""
        return "eos" if node.token in self.eos_ids else "length" if node.length >= self.limit else None

    def rank(self, node: BeamNode) -> float:
        """What finished beams are ranked by: log-probability over length ** length_penalty."""
        score: float = node.score / node.length**self.beams.length_penalty
        return score

    def finish(self, nodes: Sequence[BeamNode]) -> None:
        """Beams have ended: the best W are kept, of equal ones those that were there before."""
        self.finished = sorted([*self.finished, *nodes], key=self.rank, reverse=True)[: self.beams.width]


def check_memory(target: LanguageModel, requests: Sequence[BeamRequest]) -> None:
    """Make sure that a cache for these requests fits, should their beams share nothing but the prompt.

    Raises:
        ConfigError: it does not.
    """
    tokens = [len(r.ids) + (1 if r.beams.single_cache else r.beams.width) * r.limit + r.beams.nodes for r in requests]
    if not target.holds(tokens):
        raise ConfigError(
            f"{requests[0].beams.width} beams of each prompt may take a cache of {sum(tokens)} tokens, more than the "
            f"memory that {target.capabilities.name} may use for it: use fewer beams or a lower max_tokens"
        )
