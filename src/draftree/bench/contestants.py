"""What takes part in a benchmark, loaded: our engines, beams, llama.cpp, and transformers (``transformers_peer``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np
from numpy.typing import NDArray

from ..beams.beam_engine import BeamEngine, Hypothesis, load_beam_source
from ..beams.forest import BeamParams
from ..config import SamplingParams
from ..drafters.base import DraftSource
from ..drafters.grow import TreeDrafter
from ..drafters.provenance import provenance
from ..drafters.registry import is_model, load_draft_model
from ..drafters.spec import NONE, DrafterSpec, read_drafter
from ..engine.engine import Engine
from ..engine.speculation import Observer
from ..errors import ConfigError, needs_extra
from ..models.base import LanguageModel
from ..models.loading import ModelOptions, load
from ..policies.base import Provenance
from ..request import Generation, Outcome, Stats
from ..text.encoding import Tokenizer
from ..tree import ROOT
from .entries import LLAMA_CPP, Entry
from .results import BINS, Parts, StepColumns, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes (the value of its documentation's example)."""


class _Collector(Observer):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes


class EngineContestant:
    """One of our engines; without a drafter it decodes autoregressively."""

    def __init__(self, entry: Entry, target: LanguageModel, drafter: str | DrafterSpec | LanguageModel | None) -> None:
        self._collector = _Collector()
        speculation = None if drafter is None else entry.speculation(drafter)
        self.engine = Engine(target, speculation, observers=[self._collector])
        loaded = self.engine.speculation.drafter
        self._source = loaded.source if isinstance(loaded, TreeDrafter) else None
        self.made_of = provenance(target, self._source, loaded.name)

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt, given as token ids; ``params.seed`` is set."""
        self._collector.outcomes, before = [], self.inside()
        began = time.perf_counter()
        answer = self.engine.generate([prompt], params)[0]
        turn = _turn(prompt, answer, answer.stats, time.perf_counter() - began)
        inside = [now - then for now, then in zip(self.inside(), before, strict=True)]
        return replace(
            turn,
            steps=step_columns(self._collector.outcomes, answer.stats, *inside),
            drafted=[int(chunk.drafted) for chunk in answer.chunks],
            pieces=[chunk.text for chunk in answer.chunks],
        )

    def inside(self) -> tuple[float, float]:
        """Seconds so far inside the passes of the target and of what drafts by a model."""
        drafting = self._source.models if self._source else ()
        return self.engine.target.pass_seconds, sum(model.pass_seconds for model in drafting)


def _turn(prompt: list[int], answer: Generation | Hypothesis, stats: Stats, total: float) -> Turn:
    of = stats.seconds
    seconds = Parts(total, of.prefill, of.draft, of.verify, total - of.prefill - of.draft - of.verify)
    return Turn(len(prompt), answer.token_ids, answer.text, answer.finish_reason, seconds, stats.steps)


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
        target_seconds=target,
        drafter_seconds=drafter,
    )


def _by_probability(outcome: Outcome) -> NDArray[np.int64]:
    """[2, BINS] reached and accepted nodes by draft probability; reached are the children of accepted nodes."""
    tree, path = outcome.tree, outcome.path
    paths = np.array([*tree.path_logprobs, 0], np.float32)
    above = paths[tree.parents]  # ROOT reads the last
    bins = np.clip((np.exp(paths[:-1] - above) * BINS).astype(np.int64), 0, BINS - 1)
    seen = np.isin(tree.parents, [ROOT, *path])
    return np.stack([np.bincount(bins[which], minlength=BINS) for which in (seen, path)])


class BeamContestant:
    """An engine for beams; without a source nothing is drafted."""

    def __init__(self, target: LanguageModel, source: DraftSource | None, beams: BeamParams) -> None:
        self._engine, self._beams = BeamEngine(target, source), beams
        self.made_of = provenance(target, source, source.name if source else NONE)

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """The answer is the best beam."""
        began = time.perf_counter()
        answer = self._engine.generate([prompt], params, self._beams)[0]
        turn = _turn(prompt, answer.hypotheses[0], answer.stats, time.perf_counter() - began)
        layers, drafted = answer.stats.tokens, answer.stats.drafted_layers
        return replace(turn, layers=layers, drafted_layers=drafted, accepted_widths=answer.accepted_widths)


class Contestant(Protocol):
    """Decodes one prompt after the other.

    Attributes:
        made_of: the models behind its answers.
    """

    @property
    def made_of(self) -> Provenance: ...

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt, given as token ids; ``params.seed`` is set."""


class Models:
    """Loads what entries need, once each.

    Args:
        target: the target's name.
        options: of the target (``draftree.load``), and as far as they fit of draft models and peers.
    """

    def __init__(self, target: str, **options: Unpack[ModelOptions]) -> None:
        self.target = load(target, **options)
        self._name, self._options = target, options
        self._stocked, self._draft_model = cache(self._stock), cache(partial(load_draft_model, target=self.target))
        self._llama_cpp = cache(partial(load, target, **ModelOptions({**options, "backend": LLAMA_CPP})))

    def contestant(self, entry: Entry) -> Contestant:
        if entry.is_peer:
            return self._peer(entry)
        drafter = None if entry.drafter is None else self.drafter(entry.drafter)
        if entry.beams is not None:
            source = load_beam_source(drafter or NONE, self.target)
            return BeamContestant(self.target, source, entry.beams)
        return EngineContestant(entry, self.target, drafter)

    def drafter(self, name: str) -> str | DrafterSpec | LanguageModel:
        """What a drafter's name stands for. Models are shared: one contestant decodes at a time."""
        source = read_drafter(name)
        return self._draft_model(name) if is_model(DrafterSpec.parse(source)) else source

    def _peer(self, entry: Entry) -> Contestant:
        if entry.peer == LLAMA_CPP:
            return EngineContestant(entry, self._llama_cpp(), None)
        with needs_extra("torch", entry.label):
            from .transformers_peer import TransformersPeer
        model, tokenizer = self._stocked(self._name)
        options: dict[str, Any] = {}
        if entry.peer == "hf-prompt-lookup":
            options = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        elif entry.beams is not None:
            options = {"num_beams": entry.beams.width}
        elif entry.drafter is not None:
            assistant = self._stocked(entry.drafter)[0]
            own, theirs = (m.config.get_text_config().vocab_size for m in (model, assistant))
            if own != theirs:
                raise ConfigError(
                    f"{entry.label}: the target scores {own} tokens and {entry.drafter} {theirs}, which transformers' "
                    "generate does not take: name a draft model of the target's vocabulary, or leave this peer out"
                )
            options = {"assistant_model": assistant}
        can = self.target.capabilities
        return TransformersPeer(model, tokenizer, threads=None if can.accelerator else can.threads, **options)

    def _stock(self, name: str) -> tuple[PreTrainedModel, Tokenizer | None]:
        from .transformers_peer import load_peer

        return load_peer(name, dtype=self._options.get("dtype"), device=self._options.get("device"))
