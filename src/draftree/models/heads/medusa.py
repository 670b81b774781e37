"""Medusa heads: what stands at each of the next positions, of one hidden state (Cai et al., *Medusa*, 2024).

Head i of K makes x = x + SiLU(W x + b), layer by layer, of the target's final hidden state at a token, and logits by an
output layer of its own. The target's output layer gives the token after that one, head i the token i + 1 further on. In
a draft tree the first of these is the root, so that head i predicts the nodes of depth i + 1.

Files have the names of the authors (``i.j.linear.weight``, and ``i.n.weight`` for the output layer), or vLLM's
(``blocks.i.layers.j.weight``, ``lm_heads.i.weight``, and ``token_map``, the tokens of a smaller vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ..abilities import feature_model
from ..base import FINAL_STATE, LanguageModel, Row
from ..huggingface.inspection import fingerprint
from .eagle_head import PositiveNumber
from .eagle_model import settled
from .eagle_network import HeadWeights
from .head_folder import CONFIG, HeadFolder, checked_ids, read_tensors, renamed

_HEADS = "medusa_num_heads"
_ARCHITECTURE = "MedusaModel"
_WEIGHTS = "medusa_lm_head"
"""Of a file without its suffix: weights of the target may lie beside it."""
_RESIDUAL = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)(?:\.linear)?\.(weight|bias)")
_OUTPUT = re.compile(r"lm_heads\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """What the ``config.json`` of Medusa heads says; the names are those of vLLM.

    Attributes:
        num_heads: K, how many there are.
        num_hidden_layers: of each, before its output layer.
        hidden_size, vocab_size: of the target; None: the weights tell.
        truncated_vocab_size: tokens of ``token_map``; None: as many as it has.
        original_lm_head: one output layer serves all heads.
        logit_scale: logits are multiplied by it.
    """

    num_heads: PositiveInt
    num_hidden_layers: Annotated[int, Field(ge=0)] = 1
    hidden_size: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    truncated_vocab_size: PositiveInt | None = None
    original_lm_head: bool = False
    logit_scale: PositiveNumber = 1.0


class MedusaNetwork(nn.Module):
    """The heads.

    Args:
        config: of the file.
        weights: of the file, by the names of vLLM; tensors of it are taken.
        sizes: H of the target, and D of the vocabulary.
    """

    def __init__(self, config: MedusaConfig, weights: HeadWeights, sizes: tuple[int, int]) -> None:
        super().__init__()
        size, tokens = sizes
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                weights.linear([f"blocks.{i}.layers.{j}"], size, [size]) for j in range(config.num_hidden_layers)
            )
            for i in range(config.num_heads)
        )
        count = 1 if config.original_lm_head else config.num_heads
        self.outputs = nn.ModuleList(weights.linear([f"lm_heads.{i}"], size, [tokens]) for i in range(count))
        self._scale = config.logit_scale

    def forward(self, states: Tensor) -> Tensor:
        """[B, H] final hidden states of the target -> [B, K, D] logits."""
        found = []
        for i, block in enumerate(self.blocks):
            x = states
            for layer in block:  # type: ignore[attr-defined]
                x = x + nn.functional.silu(layer(x))
            found.append(self.outputs[min(i, len(self.outputs) - 1)](x))
        logits = torch.stack(found, dim=1)
        return logits if self._scale == 1 else logits * self._scale


class MedusaModel:
    """Medusa heads for one target (``MarginalHead``). A row keeps nothing: they read one hidden state alone.

    Attributes:
        vocabulary: [D] int64 the target's ids of its tokens; None: all.
        capabilities: as the target's, whose tokens it takes.
        depth: K.
    """

    features = FINAL_STATE

    def __init__(self, network: MedusaNetwork, vocabulary: Tensor | None, target: LanguageModel, name: str) -> None:
        feature_model(target).track_features(self.features)
        parameters, weights = sum(p.numel() for p in network.parameters()), fingerprint(network.parameters())
        self.depth, self._layers = len(network.blocks), nn.ModuleDict({"network": network})
        self.capabilities = replace(
            settled(self._layers, target, name),
            architecture=type(self).__name__,
            parameters=parameters,
            slot_bytes=0,
            fingerprint=weights,
        )
        self.vocabulary = None if vocabulary is None else vocabulary.to(self.capabilities.device)

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing to make room for."""

    def open(self) -> Row:
        """A new row without tokens."""
        return Row()

    @torch.inference_mode()
    def marginals(self, rows: Sequence[Row], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """[B, K, D] logits (``MarginalHead.marginals``)."""
        for row, new in zip(rows, tokens, strict=True):
            row.length += len(new)
        logits: Tensor = self._layers["network"](torch.stack([own[-1] for own in features]))
        return logits

    def close(self, row: Row) -> None:
        """Nothing to forget."""


@dataclass(frozen=True)
class MedusaFolder(HeadFolder):
    """Medusa heads in a folder."""

    @property
    def target(self) -> str | None:
        """The model that they were made for, if the config names one."""
        name = self.document.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @cached_property
    def config(self) -> MedusaConfig:
        """Sizes and flags; how many heads and layers there are has names of its own in the authors' files.

        Raises:
            ModelFileError: some are missing or wrong.
        """
        counts = {
            ours: next(
                (self.document[name] for name in (f"medusa_{theirs}", theirs, ours) if name in self.document), None
            )
            for ours, theirs in (("num_heads", "num_heads"), ("num_hidden_layers", "num_layers"))
        }
        return self.parsed(MedusaConfig, {**self.document, **counts})

    def load(self, target: LanguageModel) -> MedusaModel:
        """The heads, for a target (``HeadFolder.load``)."""
        given = feature_model(target)
        network, ids, sizes = self.network()
        self.check_sizes(given, *sizes)
        return MedusaModel(network, ids, target, f"head {self.folder.name}")

    def network(self) -> tuple[MedusaNetwork, Tensor | None, tuple[int, int]]:
        """The network, the target's ids of its vocabulary (None: all), and the target's hidden size and vocabulary.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """
        with self.reading():
            files = [sorted(self.folder.glob(f"{_WEIGHTS}{suffix}")) for suffix in (".safetensors", ".pt")]
            tensors = renamed(read_tensors(self.folder, *files), self._new_name)
            config = self.config
            output = tensors.get("lm_heads.0.weight")
            if output is None or output.dim() != 2:
                raise ValueError("it lacks lm_heads.0.weight, the output layer of its first head")
            mapped = tensors.pop("token_map", None)
            if mapped is None and config.truncated_vocab_size not in (None, config.vocab_size):
                raise ValueError(f"it drafts {config.truncated_vocab_size} tokens and lacks token_map, which are which")
            if mapped is not None and config.vocab_size is None:
                raise ValueError(f"it has token_map, and its {CONFIG} no vocab_size")
            vocab, ids = config.vocab_size or len(output), None
            if mapped is not None and len(mapped) < vocab:
                ids = self._checked_map(mapped, vocab)
                for name, tensor in tensors.items():
                    if _OUTPUT.fullmatch(name) and len(tensor) == vocab:
                        tensors[name] = tensor[ids]
            sizes = config.hidden_size or output.shape[1], vocab
            weights = HeadWeights(tensors)
            network = MedusaNetwork(config, weights, (sizes[0], vocab if ids is None else len(ids)))
            self.check_weights(weights)
        return network.eval(), ids, sizes

    def _checked_map(self, mapped: Tensor, vocab: int) -> Tensor:
        if mapped.is_floating_point() or mapped.dim() != 1:
            raise ValueError(f"token_map is {list(mapped.shape)} of {mapped.dtype}, not a list of tokens")
        if (size := self.config.truncated_vocab_size) not in (None, len(mapped)):
            raise ValueError(f"it drafts {size} tokens, and token_map has {len(mapped)}")
        return checked_ids(mapped.long(), "token_map", vocab)

    def _new_name(self, name: str) -> str:
        """The name of a tensor as vLLM has it."""
        name = name.removeprefix("model.").removeprefix("medusa_heads.").removeprefix("medusa_head.")
        if found := _RESIDUAL.fullmatch(name):
            i, j, kind = found.groups()
            is_output = not name.startswith("blocks.") and ".linear." not in name
            return f"lm_heads.{i}.{kind}" if is_output else f"blocks.{i}.layers.{j}.{kind}"
        return "lm_heads.0.weight" if name == "lm_head.weight" else name

    def describe(self) -> dict[str, str]:
        """What it is, in words (``HeadFolder.describe``)."""
        network, ids, (size, vocab) = self.network()
        parameters, config = sum(p.numel() for p in network.parameters()), self.config
        layers = config.num_hidden_layers
        return {
            "draft head": "Medusa",
            "target": f"{self.target or 'not named'}: hidden size {size}, {vocab} tokens",
            "hidden states": "1 of the target, the final one",
            "network": f"{config.num_heads} heads of {layers} layer{'s' * (layers != 1)} each, {parameters / 1e6:.1f} "
            "million parameters",
            "drafts": f"{vocab if ids is None else len(ids)} of the target's tokens, {config.num_heads} a pass",
        }


def is_medusa(document: Mapping[str, Any]) -> bool:
    """Whether this is the ``config.json`` of Medusa heads."""
    return _HEADS in document or document.get("architectures") == [_ARCHITECTURE]
