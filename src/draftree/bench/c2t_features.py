"""Which further features help a classifier of drafts?

    python -m draftree.bench.c2t_features --data DIR [--folds 5] [--batch 256] [--learning-rate 0.005] [--epochs 10]

DIR holds the samples that 'draftree train classifier --data DIR' collected; what they are of is in its recipe.json.
Classifiers of the default features alone, and with one more (of a union: with its sources), are fitted to all prompts
but those of one fold and judged on these, fold by fold, so that every prompt is held out once. Prints each one's loss
(binary cross-entropy of all nodes of full trees, nats for each accepted one) and its ratio to the default's, with 95%
bootstrap intervals over prompts: a feature helps where all of the interval is below 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from ..policies.classifier import DEFAULT_FEATURES, FEATURES
from ..train.c2t_fit import BATCH, EPOCHS, RATE, ClassifierRecipe, fit, losses
from ..train.c2t_samples import SampleRecipe, Samples, SampleStore

SOURCES = tuple(name for name in FEATURES if name.startswith("source-"))
_DRAWS = 2000


def tried(samples: Samples) -> dict[str, tuple[str, ...]]:
    """The feature sets to hold against one another; sources where samples are of a union."""
    more = [name for name in FEATURES if name not in DEFAULT_FEATURES and name not in SOURCES]
    sets = {"default": DEFAULT_FEATURES} | {f"+ {name}": (*DEFAULT_FEATURES, name) for name in more}
    offered = samples.features[:, [list(FEATURES).index(name) for name in SOURCES]].any(0)
    used = tuple(name for name, some in zip(SOURCES, offered.tolist(), strict=True) if some)
    return sets | ({f"+ {', '.join(used)}": (*DEFAULT_FEATURES, *used)} if used else {})


def held_out(samples: Samples, recipe: ClassifierRecipe, negatives: float, folds: int) -> Tensor:
    """[prompts] summed loss of each prompt's nodes, by a classifier that has not learned from that prompt."""
    prompts, own = samples.numbers.unique(return_inverse=True)
    found = torch.zeros(len(prompts), dtype=torch.float64)
    for fold in range(folds):
        apart = own % folds == fold
        net = fit(samples.take(~apart), recipe, negatives)
        found.index_add_(0, own[apart], losses(net, samples.take(apart), negatives))
    return found


def compared(loss: Tensor, base: Tensor) -> tuple[float, float, float]:
    """[prompts] losses over others: ratio of their sums, with its 95% interval."""
    draws = torch.randint(len(base), (_DRAWS, len(base)), generator=torch.Generator().manual_seed(0))
    ratios = (loss[draws].sum(1) / base[draws].sum(1)).sort().values
    return float(loss.sum() / base.sum()), float(ratios[int(0.025 * _DRAWS)]), float(ratios[int(0.975 * _DRAWS)])


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.c2t_features", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of samples")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--learning-rate", type=float, default=RATE)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    try:
        recipe = SampleRecipe(**json.loads((args.data / "recipe.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        parser.error(f"--data {args.data} holds no samples: collect some with 'draftree train classifier --data'")
    samples = SampleStore.open(args.data, recipe).samples()
    prompts, accepted = len(samples.numbers.unique()), int(samples.accepted.sum())
    if not 2 <= args.folds <= prompts:
        parser.error(f"--folds {args.folds}: use 2 to {prompts}, the prompts in {args.data}")
    print(f"drafter {recipe.drafter}: {prompts} prompts, {len(samples.accepted)} samples, {accepted} accepted")
    base: Tensor | None = None
    for name, features in track(tried(samples).items(), "fitting", transient=True):
        fitted = ClassifierRecipe(
            features=features, batch=args.batch, learning_rate=args.learning_rate, epochs=args.epochs
        )
        loss = held_out(samples, fitted, recipe.negatives, args.folds)
        base = loss if base is None else base
        ratio, low, high = compared(loss, base)
        print(f"{name:32} loss {float(loss.sum()) / accepted:.3f}   x {ratio:.4f} [{low:.4f}, {high:.4f}]", flush=True)


if __name__ == "__main__":
    main()
