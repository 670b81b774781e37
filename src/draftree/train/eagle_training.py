"""Trains an EAGLE head: responses, fit, figures, and the model card."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval, MultipleOf
from torch import Tensor

from ..artifacts import write_whole
from ..config import Checked, Count, Whole, option
from ..errors import ConfigError, RunError
from ..models.heads.eagle_network import EagleNetwork, save_head
from ..models.heads.head_folder import EAGLE
from ..models.heads.head_format import WEIGHTS
from ..models.heads.own_heads import HEAD_RECORD, RECORD, HeadRecord
from ..models.huggingface.inspection import fingerprint
from ..models.protocols import FeatureModel
from ..progress import ProgressReport
from .eagle_fit import RANKS, Fit, FitRecipe, Frozen, evaluate
from .head_architectures import Architecture, is_trained, read_trained
from .head_data import HeadData
from .responses import AGAIN, LONGEST_PROMPT, MAX_ROWS, TEMPERATURES, PromptFile, Response

Stage = Callable[[str, int, int], AbstractContextManager[ProgressReport]]
"""What is done, how many units it has and how many of them are done -> a context that gives what is called with how
many are done."""

RESPONSE_SHARE = 0.6
"""Of the hours: for drawing responses; the rest is for the fit."""
_ROUNDS = (0.25, 1.0)
"""Of the hours: after each a round of responses and steps ends. So a training that is stopped early leaves a head that
is nearly as good as one with that little time from the start, and the last round loses little."""
_MOST_EPOCHS = 12
_EVERY = 120.0
"""Seconds between checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits(Checked):
    """How much is done.

    Attributes:
        hours: for everything.
        tokens: response tokens to draw, those to prompts kept apart included.
        steps: of the fit; None: as many as fit the hours.
        held_out: prompts that are kept apart for the figures.
        vocabulary: tokens of the draft vocabulary.
        feed_forward: width of a new head's MLP, which the native engine reads by 32; None: half the target's.
        packed: keep its matrices in Q4_1.
        responses: to a prompt, if the tokens and the hours allow.
        rows: responses that are drawn together.

    Raises:
        ConfigError: a value is out of range.
    """

    hours: Annotated[float, Interval(gt=0, le=10_000)] = option(
        "Time for everything, earlier runs of this command included.", 0.5, metavar="H"
    )
    tokens: Count = option("Response tokens to draw, if the hours allow.", 600_000, metavar="N")
    steps: Count | None = option("Training steps; by default what fits the hours.", metavar="N")
    held_out: Whole = option("Prompts kept apart, for the figures.", 32, metavar="N")
    vocabulary: Count = option("Tokens that the head drafts; the text's own come on top.", 8192, metavar="N")
    feed_forward: Annotated[Count, MultipleOf(32)] | None = option(
        "Width of the head's MLP, a multiple of 32; by default half the target's.", metavar="N"
    )
    packed: bool = option("Keep its matrices in 5 bits a weight, not in half precision.", False)
    responses: Count = option("Most responses to a prompt; further ones are sampled.", 4, metavar="N")
    rows: Annotated[int, Interval(ge=1, le=MAX_ROWS)] = option(
        "Responses that are drawn together; on a GPU rather 1024.", 32, metavar="N"
    )


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """One training.

    Attributes:
        target: keeps the hidden states that the head reads, and the final ones.
        architecture: what is trained.
        sources: files of the prompts, for the card.
        out: folder of the head.
        init: folder of a head to start from, in place of the regression.
    """

    target: FeatureModel
    architecture: Architecture
    data: HeadData
    sources: Sequence[PromptFile]
    recipe: FitRecipe
    limits: TrainingLimits
    out: Path
    init: Path | None = None

    def run(self, stage: Stage) -> HeadRecord:
        """All rounds; the record of the head in ``out``.

        From the first regression on there is one, the best so far.

        Args:
            stage: reports the progress.

        Raises:
            ConfigError: what is there belongs to another training, the head to start from is not for this target, its
                kind cannot be packed, or all prompts are kept apart.
            RunError: there is nothing to learn from, or a file cannot be written.
        """
        limits, data = self.limits, self.data
        if limits.held_out >= len(data.prompts):
            raise ConfigError(
                f"--held-out {limits.held_out} of {len(data.prompts)} prompts leaves none to learn from: give more "
                "prompts, or a smaller --held-out"
            )
        if limits.packed and self.architecture.kind != EAGLE:
            raise ConfigError("an EAGLE-3 head is for other servers too, which read no Q4_1: leave --packed out")
        begun = None if self.init is None else read_trained(self.init, self.target)
        rounds = _ROUNDS if limits.steps is None and self.architecture.kind == EAGLE else (1.0,)
        checkpoints = [data.folder / f"checkpoint-{number}.pt" for number in range(1, len(rounds) + 1)]
        first = max((at for at, path in enumerate(checkpoints) if path.exists()), default=0)
        fit = record = None
        with stage("training a head, seconds", round(limits.hours * 3600), round(data.seconds)) as report:
            for part, checkpoint in [*zip(rounds, checkpoints, strict=True)][first:]:
                if not checkpoint.exists():
                    self._collect(part, report, fit)
                learned, apart = self._responses()
                if learned:
                    fit = self._fit(learned, begun, fit, last=part == 1)
                    record = self._round(fit, apart, part * limits.hours * 3600, checkpoint, report)
                    for done in checkpoints[: checkpoints.index(checkpoint)]:
                        done.unlink(missing_ok=True)
        if record is None:
            raise RunError(
                f"no responses to learn from: of {len(data.prompts)} prompts {limits.held_out} are kept apart, and "
                "others gave less than two tokens: give more prompts or --hours"
            )
        return record

    def _collect(self, part: float, report: ProgressReport, fit: Fit | None) -> None:
        """Draw responses in so much of the time for them, behind the fit of the round before."""
        limits, data = self.limits, self.data
        share, seconds = part * (1.0 if limits.steps else RESPONSE_SHARE), limits.hours * 3600
        began = time.monotonic() - data.seconds - (fit.seconds if fit else 0.0)
        note = _note("drawing responses", self._record())
        data.collect(
            self.target,
            tokens=math.ceil(part * limits.tokens),
            seconds=share * seconds,
            rows=limits.rows,
            progress=lambda _: report(round(min(seconds, time.monotonic() - began)), note),
            answers=limits.responses,
            held_out=limits.held_out,
        )

    def _responses(self) -> list[list[Response]]:
        """Those to learn from, and those kept apart, that have a token to predict."""
        return [[r for r in part if r.gained > 1] for part in self.data.split(self.limits.held_out)]

    def _fit(
        self,
        learned: list[Response],
        begun: tuple[EagleNetwork, Tensor | None] | None,
        before: Fit | None,
        *,
        last: bool,
    ) -> Fit:
        """A round's fit at its start: the one before goes on, or one begins from a network or ridge regression."""
        network, vocabulary = begun or (None, None)
        size = self.target.capabilities.vocab_size
        if vocabulary is None or self.architecture.kind == EAGLE:  # an EAGLE-3 head has an output layer for its own
            vocabulary = draft_vocabulary(learned, size, self.limits.vocabulary, vocabulary)
        device, every = self.target.capabilities.device, torch.arange(size)
        weight, bias = self.target.output_rows(vocabulary.to(device))
        embeddings = before.frozen.embeddings if before else self.target.embeddings(every.to(device)).float()
        frozen = Frozen(embeddings, vocabulary.to(device), weight.float(), None if bias is None else bias.float())
        if before:
            before.go_on(frozen, learned, last=last)
            return before
        key = self._key(network)
        if network is None:
            width = self.limits.feed_forward or -(-self.target.layer_sizes.feed_forward // 64) * 32
            network = self.architecture.begin(self.target, frozen, vocabulary, learned, self.recipe.seed, width)
        return Fit(self.recipe, network.to(device), frozen, learned, self.limits.steps or 1, key, last)

    def _record(self) -> HeadRecord | None:
        """Of the head that is there; None: there is none, whole."""
        if not is_trained(self.out, self.architecture) or not (self.out / WEIGHTS).exists():
            return None
        try:
            return HEAD_RECORD.read(self.out / RECORD)
        except (FileNotFoundError, ConfigError):
            return None

    def _publish(self, fit: Fit, apart: Sequence[Response]) -> HeadRecord:
        """Write the head as the fit has it, unless the one that is there is right more often; the record of the better
        one."""
        there = self._record()
        if there is not None and there.held_out != len(apart):  # more are drawn by now
            network = read_trained(self.out, self.target)[0].to(fit.frozen.weight.device)
            there = self._measured(network, there.steps, fit.frozen, apart)
        record = self._measured(fit.best, fit.done, fit.frozen, apart)
        if there is not None and there.mal > record.mal:
            HEAD_RECORD.write(self.out / RECORD, there)
            return there
        save_head(self.out, fit.best, fit.frozen.vocabulary, self.target, packed=self.limits.packed)
        HEAD_RECORD.write(self.out / RECORD, record)
        write_whole(self.out / "README.md", _card(self, fit, record))
        return record

    def _measured(self, network: EagleNetwork, steps: int, frozen: Frozen, apart: Sequence[Response]) -> HeadRecord:
        return HeadRecord(steps, len(apart), evaluate(network, frozen, apart, self.recipe.batch))

    def _key(self, network: EagleNetwork | None) -> str:
        """Identifies the training: settings, responses that may be drawn, and the network that it starts from."""
        data = [asdict(self.data.recipe), *self.data.tracked.layers]
        limits = self.limits
        sizes = limits.steps, limits.feed_forward, limits.vocabulary, limits.held_out
        amounts = limits.hours, limits.tokens, limits.responses
        init = None if network is None else fingerprint(network.parameters())
        return hashlib.sha256(json.dumps([asdict(self.recipe), sizes, amounts, data, init]).encode()).hexdigest()

    def _round(
        self, fit: Fit, apart: Sequence[Response], until: float, checkpoint: Path, report: ProgressReport
    ) -> HeadRecord:
        """Do the steps of a round, so many as fit the time until its end; every few minutes a checkpoint and the head
        keep what is done. The record of the head."""
        seconds, drawing = self.limits.hours * 3600, self.data.seconds
        if not fit.resume(checkpoint):
            if self._record() is None:
                self._publish(fit, apart)
            if self.limits.steps is None:
                fit.steps = fit.done + _MOST_EPOCHS * -(-len(fit.responses) // self.recipe.batch)
                fit.until = until - drawing
        fit.save(checkpoint)
        saved, note = time.monotonic(), _note("training", self._record())
        try:
            for _ in fit.run():
                report(round(min(seconds, drawing + fit.seconds)), note)
                if time.monotonic() - saved >= _EVERY:
                    fit.save(checkpoint)
                    note, saved = _note("training", self._publish(fit, apart)), time.monotonic()
        finally:
            fit.save(checkpoint)
        return self._publish(fit, apart)


def _note(what: str, record: HeadRecord | None) -> str:
    """What is done, and what the head that is there reaches."""
    return f": {what}" if record is None else f": {what}, MAL {record.mal:.2f} so far"


def _card(training: HeadTraining, fit: Fit, record: HeadRecord) -> str:
    learned = fit.responses
    recipe, target, data = training.recipe, training.target.capabilities.name, training.data
    rows = (f"| {s.name} | {s.count} | {s.licence or 'not stated'} | `{s.digest[:16]}` |" for s in training.sources)
    shares = (" | ".join(f"{share:.3f}" for share in row) for row in record.acceptance)
    figures = "\n".join(f"| {depth} | {row} |" for depth, row in enumerate(shares, start=1))
    sources = "\n".join(rows)
    first, further = ("/".join(f"{t:g}" for t in kind) for kind in (TEMPERATURES, AGAIN))
    several = f"; second and further ones to a prompt {further}" if learned[-1].number >= len(data.prompts) else ""
    start = f"the head {training.init.name}" if training.init else training.architecture.start
    distance = f", and {recipe.feature_weight} x smooth L1 of hidden states" if fit.network.predicts_features else ""
    alone = "; in the first two thirds the first one alone" if fit.network.predicts_features else ""
    return f"""\
# Draft head for {target}

Drafts for `{target}` alone: `draftree generate "..." --target {target} --drafter FOLDER`.
{training.architecture.about}

## Data

It learned from the target's own responses to the prompts of up to {LONGEST_PROMPT} tokens of:

| file | prompts | licence | SHA-256 |
|---|---|---|---|
{sources}

The prompts themselves are not in the head. Their licences and the target's are those of what it was made
from: mind them when you pass it on.

## Recipe

- responses: {len(learned)} of up to {data.recipe.max_tokens} tokens, {sum(r.gained for r in learned)} tokens in all, \
temperatures {first} in turn{several}
- start: {start}
- loss: cross-entropy with the target distribution over {len(fit.frozen.weight)} tokens{distance}; {recipe.unroll} \
drafting steps, each further one weighted {recipe.decay}{alone}
- optimiser: Muon (matrices) and AdamW, {record.steps} steps of {recipe.batch} responses, \
learning rate {recipe.learning_rate:g} falling to 0, weight decay {recipe.weight_decay:g}
- precision: {"bfloat16, weights float32" if recipe.bf16 else "float32"}
- seed: {recipe.seed}

## Figures

Along {record.held_out} responses to prompts kept apart: the share of drafts whose true token is among the most
probable ones of the draft vocabulary, given that the tokens above it were true. Chains of {len(record.acceptance)}
have an acceptance length of {record.mal:.2f}, the bonus token included.

| depth | {" | ".join(f"top {rank}" for rank in RANKS)} |
|---|{"---|" * len(RANKS)}
{figures}
"""


def draft_vocabulary(responses: Sequence[Response], vocab_size: int, size: int, known: Tensor | None = None) -> Tensor:
    """[size] int64 ascending: the most frequent tokens of the responses; of equally frequent ones those that a head
    knows, then the lowest ids.

    Args:
        known: [D] int64, the vocabulary of the head that training starts from.
    """
    tokens = torch.cat([response.tokens[response.prompt_length :] for response in responses])
    order = 2 * torch.bincount(tokens, minlength=vocab_size)
    if known is not None:
        order[known] += 1
    return order.argsort(descending=True, stable=True)[:size].sort().values
