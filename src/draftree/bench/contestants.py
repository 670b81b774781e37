"""What takes part in a benchmark, by name: ``METHOD[:KEY=VALUE]...`` and ``peer:NAME``. Loads nothing.

opt-tree    opt-tree:nodes=16:candidates=plain    static:verify=relaxed:when=both    ar    peer:hf-generate
dynamic-width:width_of=0.02:1,1:2,inf:7:depth=3
beams:width=4:drafter=head    peer:hf-beam-search:width=4
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ..beams.beam_engine import BeamEngine
from ..beams.forest import BeamParams
from ..config import MAX_NODES, SamplingParams, named_settings
from ..drafters.base import DraftSource
from ..drafters.grow import TreeDrafter
from ..drafters.registry import is_model, load_draft_model
from ..drafters.spec import AUTO, NONE, DrafterSpec
from ..engine.engine import Engine
from ..engine.speculation import Observer, SpeculationParams
from ..errors import ConfigError
from ..factory import beam_drafter, load_beam_source
from ..models.base import LanguageModel
from ..models.huggingface.hf_loading import load_stock
from ..models.loading import ModelOptions, load
from ..models.protocols import TimedModel
from ..policies.base import GrowthPolicy, node_budget
from ..policies.methods import find_method
from ..request import Outcome, Seconds, Stats
from ..text.encoding import Tokenizer
from ..tree import ROOT
from ..verify.schemes import DEFAULT_SCHEME, Match, find_scheme
from .peers import LOOKUP_TOKENS, PEERS, TransformersPeer, bare, find_peer
from .results import BINS, Parts, StepColumns, Turn

AR = "ar"
"""Autoregressive decoding, as results and command lines call it."""
PEER = "peer:"
_CONTEXT = 4096
"""Tokens of a peer's context that has to be given one."""
BEAMS = "beams"
PEER_BEAMS = ("width", "penalty", "early")
"""Settings of beams that a peer takes."""
_BETWEEN_NAMES = re.compile(r",(?!\s*(?:inf|[\d.]+(?:e[+-]?\d+)?)\s*:)", re.IGNORECASE)
"""A comma that no step of entropy (EDGE:VALUE) follows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant at one temperature.

    Attributes:
        label: its name in results; no other has it.
        method: a method's name, ``AR``, ``BEAMS``, or "peer:" and a peer's name.
        drafter: a drafter's name; None for AR decoding and peers without a model of their own.
        settings: of the method.
        nodes: node budget.
        candidates: of verification match (``CANDIDATES``); None: the scheme's own.
    """

    label: str
    method: str
    drafter: str | None
    temperature: float
    settings: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    verify: str = DEFAULT_SCHEME
    candidates: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.method.startswith(PEER)

    @property
    def peer(self) -> str:
        return self.method.removeprefix(PEER)

    @property
    def beams(self) -> BeamParams | None:
        """Its beams, ours or a peer's; None: it decodes one request."""
        if self.method == BEAMS or (self.is_peer and PEERS[self.peer].has_beams):
            return beam_params(self.label, self.settings)
        return None

    @property
    def draws_as_ar(self) -> bool:
        """Its tokens must be those of AR decoding under the same seed."""
        if self.beams is not None:
            return False
        if self.temperature == 0:
            return not find_scheme(self.verify).lossy
        return not self.is_peer and isinstance(find_scheme(self.verify), Match)

    def policy(self) -> GrowthPolicy:
        return find_method(self.method).policy(self.settings)

    def speculation(self, drafter: str | LanguageModel) -> SpeculationParams:
        """How it drafts and verifies.

        Raises:
            InputError: what it is made of does not go together.
        """
        return SpeculationParams(
            drafter=drafter,
            method=self.policy(),
            nodes=self.nodes,
            verification=self.verify,
            candidates=self.candidates,
        )


def split_names(text: str) -> list[str]:
    """Names of contestants that are written with commas between them; commas within steps of entropy do not count."""
    return [name.strip() for name in _BETWEEN_NAMES.split(text) if name.strip()]


def entries(
    methods: Sequence[str],
    drafters: Sequence[str],
    temperatures: Sequence[float],
    nodes: int | None = None,
    candidates: str | None = None,
) -> list[Entry]:
    """AR decoding, every method with every drafter, and the peers, at every temperature.

    Args:
        nodes: node budget of methods that name none; without it each has its own.
        candidates: of methods that name none and verify by match.

    Raises:
        ConfigError: a name is there twice, a setting or a drafter does not fit, or a peer lacks what it needs.
        UnknownNameError: there is no such method, peer or verification.
    """
    found: list[Entry] = []
    for temperature in temperatures:
        suffix = f" T={temperature:g}" if len(temperatures) > 1 else ""
        found.append(Entry(AR + suffix, AR, None, temperature))
        for text in methods:
            if text.startswith(PEER):
                found.append(_peer(text, text + suffix, drafters, temperature))
            elif text.partition(":")[0] == BEAMS:
                found.append(_beams(text, text + suffix, temperature))
            elif text != AR:
                if not drafters:
                    raise ConfigError(f"method {text!r} has no drafter: name one in --drafters")
                for drafter in drafters:
                    own = text if len(drafters) == 1 else f"{text}@{drafter}"
                    found.append(_method(text, own + suffix, drafter, temperature, nodes, candidates))
    labels = [entry.label for entry in found]
    if double := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"{double!r} is there twice: name each method, drafter and temperature once")
    return found


def _method(
    text: str,
    label: str,
    drafter: str,
    temperature: float,
    nodes: int | None,
    candidates: str | None,
) -> Entry:
    name, settings = named_settings(text)
    if (own := settings.pop("nodes", None)) is not None:
        try:
            nodes = int(own)
        except ValueError:
            nodes = 0
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"method {text!r}: its nodes are {own!r}: use a whole number from 1 to {MAX_NODES}")
    verify = settings.pop("verify", DEFAULT_SCHEME)
    for key in [key for key in find_scheme(verify).settings if key in settings]:
        verify += f":{key}={settings.pop(key)}"
    if str(DrafterSpec.parse(drafter)) == NONE:
        raise ConfigError("drafter 'none' is AR decoding ('ar'), which takes part anyway: leave it out")
    candidates = settings.pop("candidates", candidates if isinstance(find_scheme(verify), Match) else None)
    nodes = node_budget(find_method(name).policy(settings), nodes)
    entry = Entry(label, name, drafter, temperature, settings, nodes, verify, candidates)
    entry.speculation(drafter)  # checks that they go together
    return entry


def _beams(text: str, label: str, temperature: float) -> Entry:
    _, settings = named_settings(text)
    drafter = settings.pop("drafter", AUTO)
    beam_params(text, settings).check(SamplingParams(temperature=temperature))
    beam_drafter(drafter, temperature > 0)
    return Entry(label, BEAMS, None if drafter == "none" else drafter, temperature, settings)


def _peer(text: str, label: str, drafters: Sequence[str], temperature: float) -> Entry:
    name, settings = named_settings(text.removeprefix(PEER))
    peer = find_peer(name)
    if peer.has_beams:
        if wrong := next((key for key in settings if key not in PEER_BEAMS), None):
            raise ConfigError(f"{PEER}{name} has no setting {wrong!r}: choose from {', '.join(PEER_BEAMS)}")
        beam_params(text, settings).check(SamplingParams(temperature=temperature))
    elif settings:
        raise ConfigError(f"{PEER}{name} has no settings: leave out {', '.join(settings)}")
    drafter = None
    if peer.drafts_by_model:
        drafter = next((d for d in drafters if is_model(DrafterSpec.parse(d))), None)
        if drafter is None:
            raise ConfigError(f"{text} needs a draft model: name one in --drafters, or leave this peer out")
    return Entry(label, PEER + name, drafter, temperature, settings)


class Contestant(Protocol):
    """Decodes one prompt at a time."""

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt, given as token ids; ``params.seed`` is set."""


class _Collector(Observer):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes


class EngineContestant:
    """One of our engines; without a drafter it decodes autoregressively."""

    def __init__(self, entry: Entry, target: LanguageModel, drafter: str | LanguageModel | None) -> None:
        self._collector = _Collector()
        speculation = None if drafter is None else entry.speculation(drafter)
        self.engine = Engine(target, speculation, observers=[self._collector])
        made = self.engine.speculation.drafter
        self._source = made.source if isinstance(made, TreeDrafter) else None
        self._verifying = [target] if isinstance(target, TimedModel) else []

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        self._collector.outcomes, before = [], self.inside()
        began = time.perf_counter()
        answer = self.engine.generate([prompt], params)[0]
        total = time.perf_counter() - began
        inside = [now - then for now, then in zip(self.inside(), before, strict=True)]
        return Turn(
            prompt_tokens=len(prompt),
            ids=answer.token_ids,
            text=answer.text,
            finish=answer.finish_reason,
            seconds=_parts(total, answer.stats.seconds),
            passes=answer.stats.steps,
            steps=step_columns(self._collector.outcomes, answer.stats, *inside),
            drafted=[int(chunk.drafted) for chunk in answer.chunks],
            pieces=[chunk.text for chunk in answer.chunks],
        )

    def inside(self) -> tuple[float, float]:
        """Seconds so far inside the passes of the target and of what drafts by a model."""
        return sum(m.pass_seconds for m in self._verifying), self._source.pass_seconds if self._source else 0.0


def _parts(total: float, s: Seconds) -> Parts:
    return Parts(total, s.prefill, s.draft, s.verify, total - s.prefill - s.draft - s.verify)


def step_columns(outcomes: Sequence[Outcome], stats: Stats, target: float, drafter: float) -> StepColumns:
    """What the steps of one answer did; seconds inside the passes of the target and of what drafts by a model."""
    counts = np.zeros((2, BINS), np.int64)
    for outcome in outcomes:
        counts += _by_probability(outcome)
    reached, accepted = counts.tolist()
    return StepColumns(
        gained=[o.taken for o in outcomes],
        accepted=[len(o.path) for o in outcomes],
        nodes=[len(o.tree) for o in outcomes],
        depth=[o.tree.depth for o in outcomes],
        expected=[o.tree.expected_acceptance_length for o in outcomes],
        drafted_by_depth=list(stats.drafted),
        accepted_by_depth=list(stats.accepted),
        accepted_entropies=list(stats.accepted_entropies),
        rejected_entropies=list(stats.rejected_entropies),
        reached_by_probability=reached,
        accepted_by_probability=accepted,
        draft_passes=stats.draft_passes,
        target_seconds=target,
        drafter_seconds=drafter,
    )


def _by_probability(outcome: Outcome) -> NDArray[np.int64]:
    """[2, BINS] reached and accepted nodes by draft probability; reached are the children of accepted nodes."""
    tree, path = outcome.tree, outcome.path
    above = np.append(tree.path_logprobs, np.float32(0))[tree.parents]  # ROOT reads the last
    bins = np.clip((np.exp(tree.path_logprobs - above) * BINS).astype(np.int64), 0, BINS - 1)
    seen = np.isin(tree.parents, [ROOT, *path])
    return np.stack([np.bincount(bins[which], minlength=BINS) for which in (seen, path)])


class Models:
    """Loads what entries need, once each.

    Args:
        target: the target's name.
        options: of the target (``draftree.load``), and as far as they fit of draft models and peers.
    """

    def __init__(self, target: str, **options: Unpack[ModelOptions]) -> None:
        self.target = load(target, **options)
        self._name, self._options = target, options
        self._stock: dict[str, tuple[PreTrainedModel, Tokenizer | None]] = {}
        self._drafters: dict[str, LanguageModel] = {}

    def contestant(self, entry: Entry) -> Contestant:
        if entry.is_peer:
            return self._peer(entry)
        drafter = None if entry.drafter is None else self.drafter(entry.drafter)
        if entry.beams is not None:
            source = load_beam_source(drafter or NONE, self.target, sampled=entry.temperature > 0)
            return BeamContestant(self.target, source, entry.beams)
        return EngineContestant(entry, self.target, drafter)

    def drafter(self, name: str) -> str | LanguageModel:
        """What a drafter's name stands for. Models are shared: one contestant decodes at a time."""
        if not is_model(DrafterSpec.parse(name)):
            return name
        if name not in self._drafters:
            self._drafters[name] = load_draft_model(name, self.target)
        return self._drafters[name]

    def _peer(self, entry: Entry) -> Contestant:
        model, tokenizer = self._stocked(self._name)
        options: dict[str, Any] = {}
        if entry.peer == "hf-prompt-lookup":
            options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif entry.beams is not None:
            beams = entry.beams
            options = {"num_beams": beams.width, "length_penalty": beams.length_penalty}
            options["early_stopping"] = beams.early_stopping
        elif entry.drafter is not None:
            options = {"assistant_model": self._stocked(entry.drafter)[0]}
        return TransformersPeer(model, tokenizer, **options)

    def _stocked(self, name: str) -> tuple[PreTrainedModel, Tokenizer | None]:
        if name not in self._stock:
            model, tokenizer = load_stock(name, dtype=self._options.get("dtype"), device=self._options.get("device"))
            self._stock[name] = bare(model), tokenizer
        return self._stock[name]


_READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "width": ("width", int),
    "draft": ("draft_width", int),
    "depth": ("depth", int),
    "threshold": ("threshold", float),
    "least": ("min_width", int),
    "penalty": ("length_penalty", float),
    "early": ("early_stopping", {"yes": True, "no": False, "never": "never"}.__getitem__),
    "single": ("single_cache", {"yes": True, "no": False}.__getitem__),
    "warp": ("warp", str),
}
"""Setting -> field of ``BeamParams``, and how its text is read."""


def beam_params(text: str, settings: Mapping[str, str]) -> BeamParams:
    """The settings of a contestant ``text`` as one value.

    Raises:
        ConfigError: there is no such setting, or its value does not do.
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in _READ:
            raise ConfigError(f"method {text!r} has no setting {key!r}: choose from {', '.join((*_READ, 'drafter'))}")
        name, read = _READ[key]
        try:
            values[name] = read(value)
        except (ValueError, KeyError):
            raise ConfigError(f"method {text!r}: {key} is {value!r}: see docs/bench.md for what it takes") from None
    return BeamParams(**values)


class BeamContestant:
    """An engine for beams; without a source nothing is drafted."""

    def __init__(self, target: LanguageModel, source: DraftSource | None, beams: BeamParams) -> None:
        self._engine, self._beams = BeamEngine(target, source), beams

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """The answer is the best beam."""
        began = time.perf_counter()
        answer = self._engine.generate([prompt], params, self._beams)[0]
        total = time.perf_counter() - began
        best = answer.hypotheses[0]
        return Turn(
            prompt_tokens=len(prompt),
            ids=best.token_ids,
            text=best.text,
            finish=best.finish_reason,
            seconds=_parts(total, answer.stats.seconds),
            passes=answer.stats.steps,
            layers=answer.stats.tokens,
            drafted_layers=answer.stats.drafted_layers,
        )
