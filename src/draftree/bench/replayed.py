"""Drafting along AR decoding's answers in place of decoding them again: ``draftree bench --replay``.

What the target says is known from one AR decoding of each prompt. A method's trees, and what is accepted of them, are
then those of decoding under match verification, without a pass of the target over a tree.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.replay import Replay, pass_maker
from ..errors import ConfigError
from ..models.base import FeatureSpec, LanguageModel
from ..models.cost_profile import kept_or_measured
from ..models.loading import ModelOptions
from ..models.protocols import tracked
from ..request import Outcome, StepCost
from ..train.rank_acceptance import decoded
from .contestants import Contestant, EngineContestant, Entry, Models, step_columns
from .results import Parts, Turn


def check_replayed(entries: Sequence[Entry]) -> None:
    """Make sure that the entries can be replayed.

    Raises:
        ConfigError: one cannot.
    """
    for entry in entries:
        if entry.is_peer or entry.beams is not None or not entry.draws_as_ar:
            raise ConfigError(
                f"{entry.label!r} cannot be replayed: --replay knows AR decoding's answers alone, those of methods of "
                "ours under verification match: leave it out, or --replay"
            )


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """AR decoding's answer to one prompt.

    Attributes:
        ids: its tokens.
        features: [n, F] hidden states at all tokens but the last, where the target tracks some.
        kept: which these are.
        finish: why it ended.
        prefill: seconds in which the prompt was read.
        pieces: the text that became final with each token.
    """

    ids: list[int]
    features: Tensor | None
    kept: FeatureSpec
    finish: str | None
    prefill: float
    pieces: list[str]


class ReplayedModels(Models):
    """Contestants that draft along AR decoding's answers."""

    def __init__(self, target: str, **options: Unpack[ModelOptions]) -> None:
        super().__init__(target, **options)
        self._answers: dict[Hashable, KnownAnswer] = {}

    def contestant(self, entry: Entry) -> Contestant:
        drafter = None if entry.drafter is None else self.drafter(entry.drafter)
        return ReplayContestant(self, entry, drafter)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> KnownAnswer:
        """AR decoding's answer to a prompt, decoded once."""
        kept = tracked(self.target)  # what heads read
        key = (*prompt, params.temperature, params.seed, params.max_tokens, kept)
        if key not in self._answers:
            request, features = decoded(Engine(self.target), prompt, params)
            self._answers[key] = KnownAnswer(
                request.output_ids,
                features,
                kept,
                request.finish_reason,
                request.stats.seconds.prefill,
                [chunk.text for chunk in request.chunks],
            )
        return self._answers[key]


class ReplayContestant(EngineContestant):
    """Drafts along a known answer: drafting takes the time that it takes, a target's pass what its profile says."""

    def __init__(self, models: ReplayedModels, entry: Entry, drafter: str | LanguageModel | None) -> None:
        super().__init__(entry, models.target, drafter)
        self._models, self._costs = models, kept_or_measured(models.target)

    @torch.inference_mode()
    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        known, made = self._models.answer(prompt, params), self.engine.speculation
        drafter, outcomes, (_, before) = made.drafter, list[Outcome](), self.inside()
        target = pass_maker(self._models.target, drafter, known.features)
        most = params.max_tokens or len(known.ids)
        with Replay(drafter, prompt, known.ids, params, known.features, target, known.kept) as replay:
            while replay.left:
                began, passes, context = time.perf_counter(), drafter.passes, len(replay.request.ids)
                tree = replay.propose(made.nodes, most - (context - len(prompt)) - 1)
                draft, path = time.perf_counter() - began, replay.accepted(tree)
                verify = self._costs.seconds(1 + len(tree), context)
                cost = StepCost(1, draft, verify, 0.0, drafter.passes - passes)
                outcomes.append(replay.advance(tree, path, len(path) + 1, cost))
            stats = replay.request.stats
        s = stats.seconds
        return Turn(
            prompt_tokens=len(prompt),
            ids=known.ids,
            text="".join(known.pieces),
            finish=known.finish,
            seconds=Parts(known.prefill + s.draft + s.verify, known.prefill, s.draft, s.verify, 0.0),
            passes=len(outcomes),
            steps=step_columns(outcomes, stats, s.verify, self.inside()[1] - before),
            drafted=[0, *(int(i < len(o.path)) for o in outcomes for i in range(o.taken))],
            pieces=known.pieces,
        )
