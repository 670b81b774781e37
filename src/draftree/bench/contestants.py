"""Entries as things that decode: our engines and the peers, on models that are loaded once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import SamplingParams
from ..draft.base import Drafter, NoDrafter
from ..draft.drafter import TreeDrafter
from ..draft.load import load_drafter
from ..draft.names import names_model
from ..engine import Engine, Generation
from ..load import load_beam_source
from ..models.eagle_model import HeadModel
from ..models.huggingface import HFModel
from ..models.load import load, load_stock
from ..outcome import Outcome
from ..trace import Observer
from ..tree import ROOT
from ..verify.schemes import find_scheme
from .entry import BEAMS, PLAIN, Entry
from .peers import LOOKUP_TOKENS, FlashspecPeer, TransformersPeer, bare
from .record import BINS, Parts, Steps, Turn
from .wide import BeamContestant


class Contestant(Protocol):
    """Decodes one prompt at a time."""

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt, given as token ids; ``params.seed`` is set."""


class _Collector(Observer):
    """Keeps the outcomes of one request's steps; what they say is read when the clock has stopped."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, outcomes: Sequence[Outcome], learned: float) -> None:
        self.outcomes += outcomes


class EngineContestant:
    """One of our engines.

    Args:
        entry: what it is.
        target: the target, loaded.
        drafter: the drafter's name, or the drafting model, loaded; None decodes plainly.
    """

    def __init__(self, entry: Entry, target: HFModel, drafter: str | HFModel | None) -> None:
        scheme = find_scheme(entry.verify, entry.candidates)
        made: Drafter = NoDrafter()
        if drafter is not None:
            made = load_drafter(drafter, target, entry.policy(), learning=not scheme.draws)
        self._collector = _Collector()
        models = made.source.models if isinstance(made, TreeDrafter) else ()
        self._target, self._drafting = target, [m for m in models if isinstance(m, (HFModel, HeadModel))]
        self._engine = Engine(target, made, nodes=entry.nodes, verification=scheme, observers=[self._collector])

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """See ``Contestant``."""
        self._collector.outcomes, before = [], self._inside()
        began = time.perf_counter()
        answer = self._engine.generate([prompt], params)[0]
        total = time.perf_counter() - began
        s = answer.stats.seconds
        parts = Parts(total, s.prefill, s.draft, s.verify, total - s.prefill - s.draft - s.verify)
        return Turn(
            prompt_tokens=len(prompt),
            ids=answer.token_ids,
            text=answer.text,
            finish=answer.finish_reason,
            seconds=parts,
            passes=answer.stats.steps,
            steps=_steps(
                self._collector.outcomes, answer, *(b - a for a, b in zip(before, self._inside(), strict=True))
            ),
            drafted=[int(chunk.drafted) for chunk in answer.chunks],
            pieces=[chunk.text for chunk in answer.chunks],
        )

    def _inside(self) -> tuple[float, float]:
        """Seconds so far inside the passes of the target and of what drafts by a model."""
        return self._target.pass_seconds, sum(model.pass_seconds for model in self._drafting)


def _steps(outcomes: list[Outcome], answer: Generation, target: float, drafter: float) -> Steps:
    stats = answer.stats
    judged, passed = torch.zeros(BINS, dtype=torch.int64), torch.zeros(BINS, dtype=torch.int64)
    for outcome in outcomes:
        of, on = _probabilities(outcome)
        judged += of
        passed += on
    return Steps(
        gained=[o.taken for o in outcomes],
        accepted=[len(o.path) for o in outcomes],
        nodes=[len(o.tree) for o in outcomes],
        depth=[o.tree.depth for o in outcomes],
        expected=[o.tree.expected_acceptance_length for o in outcomes],
        drafted_by_depth=list(stats.drafted),
        accepted_by_depth=list(stats.accepted),
        accepted_entropies=list(stats.accepted_entropies),
        rejected_entropies=list(stats.rejected_entropies),
        judged=judged.tolist(),
        passed=passed.tolist(),
        draft_passes=stats.draft_passes,
        target_seconds=target,
        drafter_seconds=drafter,
    )


def _probabilities(outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor]:
    """[BINS] judged and [BINS] accepted nodes by draft probability; judged are the children of accepted nodes."""
    tree, path = outcome.tree, outcome.path
    above = torch.cat([tree.path_logprobs, torch.zeros(1)])[tree.parents]  # ROOT reads the last
    bins = ((tree.path_logprobs - above).exp() * BINS).long().clamp(0, BINS - 1)
    seen = torch.isin(tree.parents, torch.tensor([ROOT, *path]))
    return torch.bincount(bins[seen], minlength=BINS), torch.bincount(bins[path], minlength=BINS)


class Models:
    """Loads what entries need, once each.

    Args:
        target: the target's name.
        options: dtype, device and numerics of the target.
    """

    def __init__(self, target: str, **options: str | None) -> None:
        self._options = {key: value for key, value in options.items() if value is not None}
        self.target = load(target, **self._options)
        self._name = target
        self._stock: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase | None]] = {}
        self._drafters: dict[str, HFModel] = {}

    def contestant(self, entry: Entry) -> Contestant:
        """An entry, ready to decode."""
        if entry.is_peer:
            return self._peer(entry)
        if entry.method == BEAMS and entry.beams is not None:
            name = self._drafter(entry.drafter or "none")
            source = load_beam_source(name, self.target, sampled=entry.temperature > 0)
            return BeamContestant(self.target, source, entry.beams)
        if entry.method == PLAIN or entry.drafter is None:
            return EngineContestant(entry, self.target, None)
        return EngineContestant(entry, self.target, self._drafter(entry.drafter))

    def _drafter(self, name: str) -> str | HFModel:
        """Drafting models are shared: one contestant decodes at a time."""
        if not names_model(name):
            return name
        if name not in self._drafters:
            self._drafters[name] = load(name, device=str(self.target.capabilities.device), numerics=self._numerics)
        return self._drafters[name].twin()

    @property
    def _numerics(self) -> str:
        return str(self._options.get("numerics", "fp32"))

    def _peer(self, entry: Entry) -> Contestant:
        model, tokenizer = self._stocked(self._name)
        if entry.peer == "flashspec":
            return FlashspecPeer(model, tokenizer, self._name)
        options: dict[str, Any] = {}
        if entry.peer == "hf-prompt-lookup":
            options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif entry.beams is not None:
            wide = entry.beams
            options = {"num_beams": wide.width, "length_penalty": wide.length_penalty}
            options["early_stopping"] = wide.early_stopping
        elif entry.drafter is not None:
            options = {"assistant_model": self._stocked(entry.drafter)[0]}
        return TransformersPeer(model, tokenizer, **options)

    def _stocked(self, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        if name not in self._stock:
            place = {key: value for key, value in self._options.items() if key != "numerics"}
            model, tokenizer = load_stock(name, **place)
            self._stock[name] = bare(model), tokenizer
        return self._stock[name]
