"""What a caller may set about beams, checked when it is built; limits that depend on a model are checked elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from ..config import MAX_NODES, Count, Probability, SamplingParams, check_fields, option
from ..errors import ConfigError

MAX_PENALTY = 20
"""Beyond it powers of a length leave the range of floating-point numbers, and no ranking is left."""

DEEPEST = 5
"""Most layers that are drafted where nobody has said how many."""

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
        depth: drafted layers gamma; None: as many as are likely to be fastest by the costs of passes, none included.
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
    depth: Count | None = option(
        "Drafted layers of --beams; by default as many as are likely to be fastest, 3 if costs are not known.",
        metavar="D",
    )
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
                f"{self.drafted} draft beams in {self.nodes // self.drafted} layers are {self.nodes} nodes: use at "
                f"most {MAX_NODES}"
            )

    @property
    def drafted(self) -> int:
        """W_S."""
        return 2 * self.width if self.draft_width is None else self.draft_width

    @property
    def nodes(self) -> int:
        return self.drafted * (self.depth or DEEPEST)

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
