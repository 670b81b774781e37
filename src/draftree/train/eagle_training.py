"""Trains an EAGLE head: responses, fit, figures, and the model card."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from ..artifacts import write_whole
from ..config import Checked, Count, Whole, option
from ..errors import ConfigError, RunError
from ..models.heads.eagle_network import EagleNetwork, save_head
from ..models.heads.head_folder import EAGLE, head_in
from ..models.huggingface.inspection import fingerprint
from ..models.protocols import FeatureModel
from .eagle_fit import RANKS, STRIDE, Fit, FitRecipe, Frozen, HeadFigures, evaluate
from .head_architectures import Architecture, read_trained
from .head_data import HeadData
from .responses import AGAIN, MAX_ROWS, TEMPERATURES, PromptFile, Response

Stage = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]
"""What is done, how many units it has and how many of them are done -> a context that gives what is called with how
many are done."""

RESPONSE_SHARE, FIGURES_SHARE = 0.6, 0.05
"""Of the hours: for drawing responses, and for the figures at the end; the rest is for the fit."""
_MOST_EPOCHS = 12
_TIMED = 6
"""Steps that are timed to see how many fit the hours."""
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
        feed_forward: width of a new head's MLP; None: the target's.
        packed: keep its matrices in Q4_1.
        responses: to a prompt, if the tokens and the hours allow.
        rows: responses that are drawn together.

    Raises:
        ConfigError: a value is out of range.
    """

    hours: Annotated[float, Interval(gt=0, lt=math.inf)] = option(
        "Time for everything, earlier runs of this command included.", 3.0, metavar="H"
    )
    tokens: Count = option("Response tokens to draw, if the hours allow.", 600_000, metavar="N")
    steps: Count | None = option("Training steps; by default what fits the hours.", metavar="N")
    held_out: Whole = option("Prompts kept apart, for the figures.", 32, metavar="N")
    vocabulary: Count = option("Tokens that the head drafts; the text's own come on top.", 8192, metavar="N")
    feed_forward: Count | None = option("Width of the head's MLP; by default the target's.", metavar="N")
    packed: bool = option("Keep its matrices in 5 bits a weight, not in half precision.", False)
    responses: Count = option("Most responses to a prompt; further ones are sampled.", 1, metavar="N")
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

    def run(self, stage: Stage) -> dict[str, HeadFigures]:
        """All stages; the figures of "greedy" and "sampled" responses, where there are any.

        Args:
            stage: reports the progress of each stage.

        Raises:
            ConfigError: what is there belongs to another training, the head to start from is not for this target, or
                its kind cannot be packed.
            RunError: there is nothing to learn from, or a file cannot be written.
        """
        limits, data = self.limits, self.data
        if limits.packed and self.architecture.kind != EAGLE:
            raise ConfigError("an EAGLE-3 head is for other servers too, which read no Q4_1: leave --packed out")
        begun = None if self.init is None else read_trained(self.init, self.target)
        seconds = limits.hours * 3600
        checkpoint = data.folder / "checkpoint.pt"
        if not checkpoint.exists():
            share = 1.0 if limits.steps else RESPONSE_SHARE
            with stage("drawing response tokens", limits.tokens, data.tokens) as progress:
                data.collect(
                    self.target,
                    tokens=limits.tokens,
                    seconds=seconds * share,
                    rows=limits.rows,
                    progress=progress,
                    answers=limits.responses,
                    held_out=limits.held_out,
                )
        learned, apart = data.split(limits.held_out)
        learned = [r for r in learned if r.gained > 1]
        if not learned:
            raise RunError(
                f"no responses to learn from: {len(data.prompts)} prompts, of which {limits.held_out} are kept apart "
                "and others gave less than two tokens: give more prompts or --hours"
            )
        network, vocabulary = begun or (None, None)
        if vocabulary is None:
            vocabulary = draft_vocabulary(learned, self.target.capabilities.vocab_size, limits.vocabulary)
        left = seconds * (1 - FIGURES_SHARE) - data.seconds
        fit = self._fit(learned, network, vocabulary, checkpoint, left)
        self._train(fit, checkpoint, stage)
        save_head(self.out, fit.network, vocabulary, self.target, packed=limits.packed)
        figures = self._figures([r for r in apart if r.gained > 1], stage)
        write_whole(self.out / "README.md", _card(self, learned, fit, figures))
        return figures

    def _fit(
        self,
        learned: list[Response],
        network: EagleNetwork | None,
        vocabulary: Tensor,
        checkpoint: Path,
        seconds: float,
    ) -> Fit:
        """The fit as its checkpoint has it, or from a network, or from the start."""
        device, every = self.target.capabilities.device, torch.arange(self.target.capabilities.vocab_size)
        weight, bias = self.target.output_rows(vocabulary.to(device))
        embeddings = self.target.embeddings(every.to(device))
        frozen = Frozen(embeddings.float(), weight.float(), None if bias is None else bias.float())
        key = self._key(learned, vocabulary, network)
        if network is None:
            seed_and_width = self.recipe.seed, self.limits.feed_forward
            network = self.architecture.begin(self.target, frozen, vocabulary, learned, *seed_and_width)
        fit = Fit(self.recipe, network.to(device), frozen, learned, self.limits.steps or 1, key)
        if not fit.resume(checkpoint) and self.limits.steps is None:
            fit.steps = self._affordable(fit, learned, seconds)
        return fit

    def _affordable(self, fit: Fit, learned: list[Response], seconds: float) -> int:
        """Steps that fit the time, by timing some on a copy; at least one, and no more than some rounds of the data."""
        trial = Fit(self.recipe, deepcopy(fit.network), fit.frozen, learned, _TIMED, "").run()
        next(trial)  # allocates memory and chooses kernels
        began = time.monotonic()
        timed = sum(1 for _ in trial)
        most = _MOST_EPOCHS * -(-len(learned) // self.recipe.batch)
        return max(1, min(most, int(seconds * timed / (time.monotonic() - began))))

    def _key(self, learned: list[Response], vocabulary: Tensor, network: EagleNetwork | None) -> str:
        """Identifies the fit: settings, responses, and the network that it starts from."""
        data = [asdict(self.data.recipe), *self.data.tracked.layers]
        sizes = self.limits.steps, self.limits.feed_forward
        parts = [asdict(self.recipe), sizes, data, vocabulary.tolist(), [r.number for r in learned]]
        init = None if network is None else fingerprint(network.parameters())
        return hashlib.sha256(json.dumps([*parts, init]).encode()).hexdigest()

    def _train(self, fit: Fit, checkpoint: Path, stage: Stage) -> None:
        """Do the steps that are left; interrupted, a checkpoint keeps those that are done."""
        fit.save(checkpoint)
        saved = time.monotonic()
        try:
            with stage("training steps", fit.steps, fit.done) as progress:
                for done in fit.run():
                    progress(done)
                    if time.monotonic() - saved >= _EVERY:
                        fit.save(checkpoint)
                        saved = time.monotonic()
        finally:
            fit.save(checkpoint)

    def _figures(self, apart: list[Response], stage: Stage) -> dict[str, HeadFigures]:
        head = head_in(self.out).torch_head(self.target)
        by_kind = {}
        for name, sampled in (("greedy", False), ("sampled", True)):
            if group := [r for r in apart if (r.temperature > 0) is sampled]:
                with stage(f"evaluating {name} responses", len(group), 0) as progress:
                    by_kind[name] = evaluate(head, group, self.data.recipe.seed, progress)
        content = {name: asdict(figures) for name, figures in by_kind.items()}
        write_whole(self.data.folder / "figures.json", json.dumps(content, indent=1) + "\n")
        return by_kind


def _card(training: HeadTraining, learned: list[Response], fit: Fit, figures: Mapping[str, HeadFigures]) -> str:
    recipe, target, data = training.recipe, training.target.capabilities.name, training.data
    rows = (f"| {s.name} | {s.count} | {s.licence or 'not stated'} | `{s.digest[:16]}` |" for s in training.sources)
    sources, tables = "\n".join(rows), "".join(_tables(name, head_figures) for name, head_figures in figures.items())
    first, further = ("/".join(f"{t:g}" for t in kind) for kind in (TEMPERATURES, AGAIN))
    several = f"; second and further ones to a prompt {further}" if learned[-1].number >= len(data.prompts) else ""
    start = f"the head {training.init.name}" if training.init else training.architecture.start
    distance = f", and {recipe.feature_weight} x smooth L1 of hidden states" if fit.network.predicts_features else ""
    return f"""\
# Draft head for {target}

Drafts for `{target}` alone: `draftree generate "..." --target {target} --drafter FOLDER`.
{training.architecture.about}

## Data

It learned from the target's own responses to the prompts of:

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
drafting steps, each further one weighted {recipe.decay}
- optimiser: Muon (matrices) and AdamW, {fit.steps} steps of {recipe.batch} responses, \
learning rate {recipe.learning_rate:g} falling to 0, weight decay {recipe.weight_decay:g}
- precision: {"bfloat16, weights float32" if recipe.bf16 else "float32"}
- seed: {recipe.seed}

## Figures

On responses to prompts kept apart, drafted along the target's responses; acceptance lengths count the
bonus token. Acceptance: every {STRIDE} tokens, share of drafts whose true token is among the most probable
1, 2 and 4, given that the tokens above it were true.
{tables}"""


def _tables(name: str, figures: HeadFigures) -> str:
    lines = [
        "",
        f"{name.capitalize()} responses ({figures.responses} responses, {figures.tokens} tokens):",
        "",
        "| depth | " + " | ".join(f"top {k}" for k in RANKS) + " | drafts |",
        "|---|" + "---|" * len(RANKS) + "---|",
    ]
    for depth, (shares, drafts) in enumerate(zip(figures.acceptance, figures.trials, strict=True), start=1):
        lines.append(f"| {depth} | " + " | ".join(f"{share:.3f}" for share in shares) + f" | {drafts} |")
    lines += ["", "| tree | acceptance length |", "|---|---|"]
    lines += [f"| {tree} | {mal:.2f} |" for tree, mal in figures.mal.items()]
    return "\n".join(lines) + "\n"


def draft_vocabulary(responses: Sequence[Response], vocab_size: int, size: int) -> Tensor:
    """[size] int64 ascending: the most frequent tokens of the responses; of equally frequent ones the lowest ids."""
    tokens = torch.cat([response.tokens[response.prompt_length :] for response in responses])
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
