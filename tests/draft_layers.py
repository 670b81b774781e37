"""A tiny Qwen 3.5 with a draft layer that has learned its target, of layers of transformers, and its GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from .checkpoints import checkpoint, converted
from .families import FAMILIES

PROMPTS = [[(7 * i + 3 * j) % 250 + 3 for j in range(6)] for i in range(4)]
_TOKENS, _STEPS, _DEPTH = 40, 50, 2


class TorchDraftLayer(nn.Module):
    """The layer behind a target's, in llama.cpp's order of operations (``tests.llama_draft_layer``)."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attends = (config.layer_types or []).index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attends)])
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Qwen3_5RMSNorm(hidden, eps) for _ in range(2))
        self.norm, self._rotary = Qwen3_5RMSNorm(hidden, eps), Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[B, n, H] embeddings of tokens and states before them -> [B, n, H] states."""
        joined = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(joined, -1))
        n = x.shape[1]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        x = self.layers[0](x, self._rotary(x, torch.arange(n)[None]), attention_mask=mask)
        found: Tensor = self.norm(x)
        return found


@dataclass(frozen=True)
class Predictor:
    """A target and its draft layer.

    Attributes:
        embeddings, output: [V, H] that the layer reads, and that its logits are of.
        texts: [B, n] of the target's.
    """

    target: PreTrainedModel
    layer: TorchDraftLayer
    embeddings: Tensor
    output: Tensor
    texts: Tensor

    def states(self, ids: Tensor) -> Tensor:
        """[B, n, H] the target's, after its last norm."""
        found: Tensor = self.target.model(ids, use_cache=False).last_hidden_state
        return found

    @torch.no_grad()
    def logits(self, text: Sequence[int], further: Sequence[int]) -> Tensor:
        """[1 + m, V] after a text, and after each of m further tokens that are drafted."""
        ids, found = torch.tensor([[*text, *further]])[:, 1:], list[Tensor]()
        states = self.states(torch.tensor([text]))[:, :-1]
        while len(found) <= len(further):
            last = self.layer(self.embeddings[ids[:, : states.shape[1]]], states)[:, -1:]
            states = torch.cat([states, last], 1)
            found.append(last[0] @ self.output.T)
        return torch.cat(found)

    def learn(self) -> None:
        """Learn the texts nearly by heart, also behind its own predictions."""
        with torch.no_grad():
            states, embedded = self.states(self.texts), self.embeddings[self.texts[:, 1:]]
            wanted = (states[:, 1:] @ self.output.T).argmax(-1)
        optimizer = torch.optim.AdamW(self.layer.parameters(), 1e-2, weight_decay=0)
        for _ in range(_STEPS):
            before, loss = states[:, :-1], torch.zeros(())
            for step in range(_DEPTH):
                after = self.layer(embedded, before)
                logits = after[:, step:] @ self.output.T
                loss = loss + cross_entropy(logits.flatten(0, 1), wanted[:, step:].flatten())
                before = torch.cat([states[:, : step + 1], after[:, step:-1]], 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def predictor(folder: Path, *, trained: bool = True) -> tuple[Predictor, Path]:
    """A target with random weights and its draft layer, and their GGUF file, which llama.cpp's converter makes."""
    configuration = FAMILIES["qwen35"].configuration()
    assert isinstance(configuration, Qwen3_5TextConfig)
    target = checkpoint(configuration, folder)
    target.requires_grad_(False)
    torch.manual_seed(1)
    layer = TorchDraftLayer(configuration)
    embeddings: Any = target.get_input_embeddings().weight
    output: Any = target.get_output_embeddings().weight
    made = Predictor(target, layer, embeddings, output, greedy(target))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.1)
    if trained:
        made.learn()
    layer.requires_grad_(False)
    numbers = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(numbers))
    file = folder / "model.safetensors"
    own = {f"mtp.{name}": values.contiguous() for name, values in layer.state_dict().items()}
    save_file(load_file(file) | own, file, {"format": "pt"})
    return made, converted(folder)[0]


@torch.no_grad()
def greedy(target: PreTrainedModel) -> Tensor:
    """[B, n] the target's greedy texts behind ``PROMPTS``."""
    ids = torch.tensor(PROMPTS)
    while ids.shape[1] < _TOKENS:
        ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids
