"""Compares published heads with the forward of speculators itself, which is no part of the test environment:

    pip install --no-deps speculators==0.9.0 hs-connectors loguru pydantic-settings datasets dill multiprocess xxhash \
        pandas pyarrow python-dotenv
    python -m tests.speculators_oracle

Heads of random weights, in both styles of names, and one that is trained here and that speculators loads by its folder,
with the target that its config names: the logits of step 0 and of three further steps at every position of a text.
Prints the largest difference of each, ends with 1 if one is above
1e-5.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from draftree.models.base import FINAL_STATE, Nodes, prefill
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.eagle_network import save_head
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.train.eagle_fit import Fit, FitRecipe
from draftree.train.eagle_training import draft_vocabulary
from draftree.train.head_architectures import ARCHITECTURES

from .heads import frozen, responses
from .published import FLAGS, ROPES, Recipe, eagle_head
from .references import extended
from .tiny import save_tiny, tiny

TEXT = [3, 1, 41, 59, 26, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6]
STEPS = 4
RECIPES = {
    **{
        f"{rope}, size {size}": Recipe(rope=ROPES[rope], size=size, target_size=size)
        for rope in ROPES
        for size in (32, 48, 64)
    },
    **{flags: Recipe(flags=FLAGS[flags]) for flags in FLAGS if flags != "scaled"},  # it has no logit_scale
    "norms of queries and keys": Recipe(qk_norm=True),
    "all tokens": Recipe(drafted=None),
    "four hidden states": Recipe(ids=(2, 2, 0, 1), states=4),
}


def target_of(size: int) -> HFModel:
    """A tiny target of this hidden size."""
    if size == 32:
        return HFModel(tiny(), name="tiny", self_test=False)
    sizes: dict[str, Any] = {"hidden_size": size, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    weights = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    with torch.no_grad():
        for weight in weights.parameters():
            if weight.ndim > 1:  # as in ``tiny``
                weight.normal_(std=0.3)
    return HFModel(weights, name="tiny", self_test=False)


def theirs(recipe: Recipe, embeddings: Tensor, folder: Path) -> Any:
    """A head in a folder as a model of speculators, with these embeddings."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    document = json.loads((folder / "config.json").read_text())
    kind: Any = Qwen3Config if recipe.qk_norm else LlamaConfig
    layers = kind(**document["transformer_layer_config"])
    layers._attn_implementation = "eager"
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=len(recipe.drafted or range(recipe.vocab)),
        eagle_aux_hidden_state_layer_ids=list(recipe.ids or ()),
        **{flag: document[flag] for flag in flags if flag in document},
    )
    model = Eagle3DraftModel(config).eval()
    tensors = {"embed_tokens.weight": embeddings, **load_file(folder / "model.safetensors")}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or not set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    return model


def loaded(folder: Path) -> Any:
    """A head in a folder as speculators loads it."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(folder, config=config).eval()


def logits_of(model: Any, features: Tensor) -> list[Tensor]:
    """[n, D] logits of each step by speculators: of step k at position i after k further tokens of the text."""
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0].detach()))
    ids = torch.tensor([TEXT[1:]])
    model(hidden_states=features[None], input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=STEPS)
    return found


@torch.no_grad()
def difference(recipe: Recipe, style: str) -> float:
    """Largest difference of the logits of a head with random weights."""
    target = target_of(recipe.target_size)
    embeddings = target.embeddings(torch.arange(recipe.vocab))
    with TemporaryDirectory() as place:
        head = eagle_head(recipe.save(Path(place) / "ours", style), target)
        return worst(head, target, theirs(recipe, embeddings, recipe.save(Path(place) / "theirs")))


def trained_difference() -> float:
    """Largest difference of the logits of a head that is trained here."""
    architecture = ARCHITECTURES["eagle3"]
    with TemporaryDirectory() as place:
        target = HFModel(tiny(), name=str(save_tiny(Path(place) / "tiny")), self_test=False)
        target.track_features(architecture.features(target) | FINAL_STATE)
        learned = responses(target)
        vocabulary = draft_vocabulary(learned, target.capabilities.vocab_size, 40)
        parts = frozen(target, vocabulary)
        network = architecture.begin(target, parts, vocabulary, learned, 0)
        assert len(list(Fit(FitRecipe(batch=4), network, parts, learned, 30, "").run())) == 30
        save_head(Path(place) / "head", network, vocabulary, target)
        return worst(eagle_head(Path(place) / "head", target), target, loaded(Path(place) / "head"))


@torch.no_grad()
def worst(head: HeadModel, target: HFModel, model: Any) -> float:
    """Largest difference of the logits of a head here and as a model of speculators."""
    largest = 0.0
    features = feature_row(prefill(target, TEXT)).last_features(wanted=head.features)[:-1].clone()
    want = logits_of(model, features)
    for cut in range(1, len(TEXT) - STEPS):
        row = head.open()
        found = [head.advance([row], [TEXT[1 : 1 + cut]], [features[:cut]]).tensor[0]]
        for k in range(STEPS - 1):
            found.append(extended(head, [row], [Nodes([TEXT[1 + cut + k]], [k - 1])])[0, 0])
        head.close(row)
        for logits, step in zip(found, want, strict=True):
            largest = max(largest, float((logits[: step.shape[1]] - step[cut - 1]).abs().max()))
    return largest


def main() -> int:
    """Compare all."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    found = {
        (style, name): difference(RECIPES[name], style) for style in ("speculators", "midlayer") for name in RECIPES
    }
    found["draftree", "trained, loaded by its folder"] = trained_difference()
    for (style, name), largest in found.items():
        sys.stdout.write(f"{style:12} {name:30} {largest:.1e}\n")
    return int(max(found.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
