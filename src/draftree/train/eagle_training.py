"""Trains an EAGLE head: responses, fit, figures, and the model card."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..artifacts import write_whole
from ..config import option
from ..errors import ConfigError, RunError
from ..models.eagle_file import load_head, read_head, save_head
from ..models.eagle_head import HeadConfig, HeadNetwork, embeddings, output_layer
from ..models.huggingface import HFModel
from .eagle_fit import DEPTH, RANKS, STRIDE, Fit, FitRecipe, Frozen, HeadFigures, evaluate, regress
from .head_data import LONGEST_PROMPT, HeadData
from .responses import AGAIN, MAX_ROWS, TEMPERATURES, Response
from .workers import affordable

Stage = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]
"""What is done, how many units it has and how many of them are done -> a context that gives what is called with how
many are done."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts.

    Attributes:
        name: without its folder.
        count: prompts in it.
        digest: SHA-256 of its bytes.
        licence: as the user states it, or None.
    """

    name: str
    count: int
    digest: str
    licence: str | None = None


def card(
    *,
    target: str,
    sources: Sequence[PromptFile],
    recipe: Mapping[str, object],
    greedy: HeadFigures | None,
    sampled: HeadFigures | None,
) -> str:
    """Markdown.

    Args:
        target: name of the target.
        sources: files of the prompts.
        recipe: what the head was trained with, in words and numbers.
        greedy, sampled: figures of the responses kept apart, where there are any.
    """
    lines = [
        f"# Draft head for {target}",
        "",
        f'Drafts for `{target}` alone: `draftree generate "..." --target {target} --drafter FOLDER`.',
        "One decoder layer in the line of EAGLE (Li et al., ICML 2024) that reads the target's hidden states;",
        "embeddings and output layer are the target's own and are not in the files.",
        "",
        "## Data",
        "",
        "It learned from the target's own responses to the prompts of:",
        "",
        "| file | prompts | licence | SHA-256 |",
        "|---|---|---|---|",
        *(f"| {s.name} | {s.count} | {s.licence or 'not stated'} | `{s.digest[:16]}` |" for s in sources),
        "",
        "The prompts themselves are not in the head. Their licences and the target's are those of what it was made",
        "from: mind them when you pass it on.",
        "",
        "## Recipe",
        "",
        *(f"- {name}: {value}" for name, value in recipe.items()),
        "",
        "## Figures",
        "",
        "On responses to prompts kept apart, drafted along the target's responses; acceptance lengths count the",
        f"bonus token. Acceptance: every {STRIDE} tokens, share of drafts whose true token is among the most probable",
        "1, 2 and 4, given that the tokens above it were true.",
    ]
    for name, figures in (("Greedy responses", greedy), ("Sampled responses", sampled)):
        if figures is not None and figures.tokens:
            lines += ["", f"{name} ({figures.responses} responses, {figures.tokens} tokens):", "", *_table(figures)]
    return "\n".join(lines) + "\n"


def _table(figures: HeadFigures) -> list[str]:
    return [
        "| depth | " + " | ".join(f"top {k}" for k in RANKS) + " | drafts |",
        "|---|" + "---|" * len(RANKS) + "---|",
        *(
            f"| {d + 1} | " + " | ".join(f"{a:.3f}" for a in figures.acceptance[d]) + f" | {figures.trials[d]} |"
            for d in range(DEPTH)
        ),
        "",
        "| tree | acceptance length |",
        "|---|---|",
        *(f"| {name} | {mal:.2f} |" for name, mal in figures.mal.items()),
    ]


RESPONSE_SHARE, FIGURES_SHARE = 0.6, 0.05
"""Of the hours: for drawing responses, and for the figures at the end; the rest is for the fit."""
_MOST_EPOCHS = 12
_ROWS, _ROWS_IN_STEP = 32, 1024
"""Responses that are drawn together on a CPU by each worker, and on a GPU."""
_TIMED = 6
"""Steps that are timed to see how many fit the hours."""
_EVERY = 120.0
"""Seconds between checkpoints."""
_SCALED_BY = 64
"""Responses whose hidden states set the scale of the embeddings."""


_MOST = {"responses": 1024, "rows": MAX_ROWS, "workers": 4 * (os.cpu_count() or 1)}
"""Beyond them a machine does nothing but hand out memory and processes: each worker loads the target anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimits:
    """How much is done.

    Attributes:
        hours: for everything.
        tokens: response tokens to draw, prompts kept apart included.
        steps: of the fit; None: as many as fit the hours.
        held_out: prompts that are kept apart for the figures.
        vocabulary: tokens of the draft vocabulary.
        responses: to a prompt, if the tokens and the hours allow.
        rows: responses that are drawn together by each worker; None: 32 on a CPU, elsewhere as many as half of the
            memory holds, up to 1024.
        workers: processes that draw them; None: on a CPU one for each of torch's threads that memory allows, elsewhere
            one.

    Raises:
        ConfigError: a value is out of range.
    """

    hours: float = option("Time for everything, earlier runs of this command included.", 3.0, metavar="H")
    tokens: int = option("Response tokens to draw, if the hours allow.", 600_000, metavar="N")
    steps: int | None = option("Training steps; by default what fits the hours.", metavar="N")
    held_out: int = option("Prompts kept apart, for the figures.", 32, metavar="N")
    vocabulary: int = option("Tokens that the head drafts; the text's own come on top.", 8192, metavar="N")
    responses: int = option("Most responses to a prompt; further ones are sampled.", 1, metavar="N")
    rows: int | None = option(
        "Responses that a worker draws together; 32, on a GPU 1024, as memory allows.", metavar="N"
    )
    workers: int | None = option(
        "Processes that draw responses; by default one a core, as memory allows; one on a GPU.", metavar="N"
    )

    def __post_init__(self) -> None:
        if not 0 < self.hours < float("inf"):
            raise ConfigError(f"hours is {self.hours}: use a positive number")
        for name in ("tokens", "steps", "vocabulary", "responses", "rows", "workers"):
            value, most = getattr(self, name), _MOST.get(name, math.inf)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}: use {f'1 to {most}' if name in _MOST else 'at least 1'}")
        if self.held_out < 0:
            raise ConfigError(f"held_out is {self.held_out}: use 0 or more")

    def workers_on(self, device: torch.device) -> int:
        """Processes that draw responses for a target on this device.

        Raises:
            ConfigError: several would share what is no CPU.
        """
        if device.type != "cpu" and (self.workers or 1) > 1:
            raise ConfigError(f"workers is {self.workers}: on {device} one process draws all: use more --rows instead")
        return self.workers or (torch.get_num_threads() if device.type == "cpu" else 1)


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """One training.

    Attributes:
        target: tracks its hidden states.
        data: responses, some of which may be there.
        sources: files of the prompts.
        recipe: of the fit.
        limits: how much is done.
        out: folder of the head.
        init: folder of a head to start from, in place of the regression.
    """

    target: HFModel
    data: HeadData
    sources: Sequence[PromptFile]
    recipe: FitRecipe
    limits: TrainingLimits
    out: Path
    init: Path | None = None

    def run(self, stage: Stage, *, force: bool = False) -> tuple[HeadFigures | None, HeadFigures | None]:
        """All stages; greedy and sampled figures.

        Args:
            stage: reports the progress of each stage.
            force: drop a checkpoint of another training.

        Raises:
            ConfigError: what is there belongs to another training, or the disk is too small.
            RunError: there is nothing to learn from, or a file cannot be written.
        """
        limits, data = self.limits, self.data
        seconds = limits.hours * 3600
        checkpoint = data.folder / "checkpoint.pt"
        if force:
            checkpoint.unlink(missing_ok=True)
        if not checkpoint.exists():
            share = 1.0 if limits.steps else RESPONSE_SHARE
            data.check_room(limits.tokens, self.target.hidden_size)
            rows = limits.rows or self._rows()
            with stage("drawing response tokens", limits.tokens, data.store.tokens) as progress:
                data.collect(
                    self.target,
                    tokens=limits.tokens,
                    seconds=seconds * share,
                    rows=rows,
                    progress=progress,
                    workers=self._workers(rows),
                    each=limits.responses,
                    held_out=limits.held_out,
                )
        learned, apart = data.split(limits.held_out)
        learned = [r for r in learned if r.gained > 1]
        if not learned:
            raise RunError(
                f"no responses to learn from: {len(data.prompts)} prompts, of which {limits.held_out} are kept apart "
                "and others gave less than two tokens: give more prompts or --hours"
            )
        vocabulary = draft_vocabulary(learned, self.target.capabilities.vocab_size, limits.vocabulary)
        fit = self._fit(learned, vocabulary, checkpoint, seconds * (1 - FIGURES_SHARE) - data.seconds)
        self._train(fit, checkpoint, stage)
        save_head(self.out, fit.network, vocabulary, self.target)
        greedy, sampled = self._figures([r for r in apart if r.gained > 1], stage)
        text = card(
            target=self.target.capabilities.name,
            sources=self.sources,
            recipe=self._words(learned, fit),
            greedy=greedy,
            sampled=sampled,
        )
        write_whole(self.out / "README.md", text)
        return greedy, sampled

    def _rows(self) -> int:
        """Rows of each worker, by default."""
        device, tokens = self.target.capabilities.device, LONGEST_PROMPT + self.data.recipe.max_tokens
        if device.type != "cuda":
            return _ROWS
        memory = torch.cuda.mem_get_info(device)[1]
        return max(1, min(_ROWS_IN_STEP, memory // 2 // (tokens * self.target.slot_bytes)))

    def _workers(self, rows: int) -> int:
        """Worker processes; by default no more than fit the memory."""
        workers, limits = self.limits.workers_on(self.target.capabilities.device), self.limits
        if workers == 1 or limits.workers is not None:
            return workers
        tokens = LONGEST_PROMPT + self.data.recipe.max_tokens
        return min(workers, affordable(self.target, rows=rows, tokens=tokens))

    def _fit(self, learned: list[Response], vocabulary: Tensor, checkpoint: Path, seconds: float) -> Fit:
        """The fit as its checkpoint has it, or from the start."""
        model, device = self.target.model, self.target.capabilities.device
        layer = output_layer(model)
        ids = vocabulary.to(device)
        frozen = Frozen(
            embeddings(model).detach().float(),
            layer.weight[ids].float(),
            None if layer.bias is None else layer.bias[ids].float(),
        )
        if self.init is None:
            scale = _spread(learned) / float(frozen.embeddings.square().mean().sqrt())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.recipe.seed)
                network = HeadNetwork(HeadConfig.like(model, scale))
        else:
            load_head(self.init, self.target)  # refuses what is not for this target
            network = read_head(self.init)[1]
        network = network.to(device)
        fit = Fit(self.recipe, network, frozen, learned, self.limits.steps or 1, self._key(learned, vocabulary))
        if fit.resume(checkpoint):
            return fit
        if self.init is None:
            regress(network, frozen, learned)
        if self.limits.steps is None:
            fit.steps = self._affordable(fit, learned, seconds)
        return fit

    def _affordable(self, fit: Fit, learned: list[Response], seconds: float) -> int:
        """Steps that fit the time, by timing some on a copy; at least one, and no more than some rounds of the data."""
        trial = Fit(self.recipe, deepcopy(fit.network), fit.frozen, learned, _TIMED, "")
        times, began = [], time.monotonic()
        for _ in trial.run():
            times.append(time.monotonic() - began)
            began = time.monotonic()
        most = _MOST_EPOCHS * -(-len(learned) // self.recipe.batch)
        return max(1, min(most, int(seconds / (sum(times[1:]) / (len(times) - 1)))))

    def _key(self, learned: list[Response], vocabulary: Tensor) -> str:
        """Tells fits apart: settings, responses, and what they start from."""
        parts = [asdict(self.recipe), self.limits.steps, asdict(self.data.recipe), vocabulary.tolist()]
        init = None if self.init is None else hashlib.sha256((self.init / "head.safetensors").read_bytes()).hexdigest()
        document = json.dumps([*parts, [r.number for r in learned], init])
        return hashlib.sha256(document.encode()).hexdigest()

    def _train(self, fit: Fit, checkpoint: Path, stage: Stage) -> None:
        """Do the steps that are left; interrupted, a checkpoint keeps those that are done."""
        saved, kept = time.monotonic(), fit.done
        try:
            fit.save(checkpoint)
            with stage("training steps", fit.steps, fit.done) as progress:
                for done in fit.run():
                    progress(done)
                    if time.monotonic() - saved >= _EVERY:
                        fit.save(checkpoint)
                        saved, kept = time.monotonic(), done
        finally:
            if fit.done > kept:
                fit.save(checkpoint)

    def _figures(self, apart: list[Response], stage: Stage) -> tuple[HeadFigures | None, HeadFigures | None]:
        """On greedy responses and on sampled ones."""
        head = load_head(self.out, self.target)
        groups = [[r for r in apart if (r.temperature == 0) == greedy] for greedy in (True, False)]
        found: list[HeadFigures | None] = []
        for name, group in zip(("greedy", "sampled"), groups, strict=True):
            with stage(f"evaluating {name} responses", len(group), 0) as progress:
                found.append(evaluate(head, group, self.data.recipe.seed, progress) if group else None)
        figures = {name: f and f.as_dict() for name, f in zip(("greedy", "sampled"), found, strict=True)}
        write_whole(self.data.folder / "figures.json", json.dumps(figures, indent=1) + "\n")
        return found[0], found[1]

    def _words(self, learned: list[Response], fit: Fit) -> dict[str, object]:
        recipe, kinds, further = self.recipe, *("/".join(f"{t:g}" for t in kind) for kind in (TEMPERATURES, AGAIN))
        again = (
            f"; second and further ones to a prompt {further}" if learned[-1].number >= len(self.data.prompts) else ""
        )
        return {
            "responses": f"{len(learned)} of up to {self.data.recipe.max_tokens} tokens, "
            f"{sum(r.gained for r in learned)} tokens in all, temperatures {kinds} in turn{again}",
            "start": "ridge regression of the next hidden state" if self.init is None else f"the head {self.init.name}",
            "loss": f"cross-entropy with the target distribution over {self.limits.vocabulary} tokens, and "
            f"{recipe.feature_weight} x smooth L1 of hidden states; {recipe.unroll} drafting steps, each further one "
            f"weighted {recipe.decay}",
            "optimiser": f"Muon (matrices) and AdamW, {fit.steps} steps of {recipe.batch} responses, learning rate "
            f"{recipe.learning_rate:g} falling to 0, weight decay {recipe.weight_decay:g}",
            "precision": "bfloat16, weights float32" if recipe.bf16 else "float32",
            "seed": recipe.seed,
        }


def draft_vocabulary(responses: Sequence[Response], vocab_size: int, size: int) -> Tensor:
    """[size] int64 ascending: the most frequent tokens of the responses; of equally frequent ones the lowest ids."""
    tokens = torch.cat([response.tokens[response.prompt_length :] for response in responses])
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def _spread(responses: Sequence[Response]) -> float:
    """Root mean square of hidden states."""
    some = [r.features.float().square().mean() for r in responses[:_SCALED_BY]]
    return float(torch.stack(some).mean().sqrt())
