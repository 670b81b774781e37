"""Compares DFlash heads with the forward of z-lab's package, which is no part of the test environment:

    pip install --no-deps dflash==0.1.0
    python -m tests.dflash_oracle

Heads of random weights read a text in pieces, each behind a cache of its own. Prints the largest difference of logits
of each, and ends with 1 if one is above 1e-5.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

from draftree.models.heads.dflash import DFlashModel
from draftree.models.heads.head_formats import load_head
from draftree.models.huggingface.hf_model import HFModel

from .marginal_heads import DFlashRecipe, features_of
from .tiny import tiny

TEXT = [3, 1, 41, 59, 26, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6]
ENDS = (5, 6, 9, 15)
SLIDING = (
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("use_sliding_window", True),
    ("sliding_window", 4),
)
RECIPES = {
    "plain": DFlashRecipe(),
    "three layers": DFlashRecipe(layers=3, block=8, ids=(0, 1, 0)),
    "sliding attention": DFlashRecipe(extra=(*SLIDING, ("max_window_layers", 1))),
    "scaled": DFlashRecipe(
        extra=(("input_embedding_scale", 2.5), ("output_multiplier", 0.5), ("final_logit_softcapping", 1.5))
    ),
}


def theirs(recipe: DFlashRecipe, folder: Path, target: HFModel) -> list[Tensor]:
    """[S - 1, V] logits by z-lab's package behind each of ``ENDS`` tokens."""
    from dflash import DFlashDraftModel, extract_context_feature

    model: Any = DFlashDraftModel(Qwen3Config(**recipe.config)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    weights: Any = target.model
    states = weights(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    features, cache, before, found = extract_context_feature(states, recipe.ids), DynamicCache(), 0, []
    for end in ENDS:
        block = torch.tensor([[TEXT[end - 1]] + [recipe.mask] * (recipe.block - 1)])
        hidden = model(
            position_ids=torch.arange(before, end - 1 + recipe.block)[None],
            noise_embedding=weights.get_input_embeddings()(block) * recipe.config.get("input_embedding_scale", 1.0),
            target_hidden=features[:, before : end - 1],
            past_key_values=cache,
            use_cache=True,
        )
        cache.crop(-recipe.block)  # transformers counts what goes
        before = end - 1
        found.append(model.compute_logits(hidden[0, 1:], weights.get_output_embeddings()))
    return found


@torch.no_grad()
def difference(recipe: DFlashRecipe) -> float:
    """Largest difference of logits."""
    target = HFModel(tiny(), name="tiny", self_test=False)
    with TemporaryDirectory() as place:
        folder = recipe.save(Path(place))
        head, want = load_head(folder, target), theirs(recipe, folder, target)
    if not isinstance(head, DFlashModel):
        raise TypeError(f"{head} is no DFlash head")
    row, found = head.open(), []
    for end in ENDS:
        given = features_of(target, TEXT[:end], head.features)[row.length :]
        found.append(head.marginals([row], [torch.tensor(TEXT[row.length + 1 : end])], [given])[0])
    return max(float((ours - own).abs().max()) for ours, own in zip(found, want, strict=True))


def main() -> int:
    """Compare all."""
    found = {name: difference(recipe) for name, recipe in RECIPES.items()}
    for name, worst in found.items():
        sys.stdout.write(f"{name:20} {worst:.1e}\n")
    return int(max(found.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
