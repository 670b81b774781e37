"""DFlash heads: a block of tokens in one pass that reads the target's hidden states (z-lab, arXiv 2602.06036).

The block is the last token and S - 1 times a mask token, at the positions that follow. With h_p the target's hidden
states at position p after a few of its layers, side by side, c_p = hidden_norm(fc h_p) is context: every layer's keys
and values are those of c_p, for all positions before the block, and those of the block's own normed states. All
positions of the block see all of them, so attention is not causal. What norm gives at a mask, by the target's output
layer, is the distribution of the token in its place. Embeddings are the target's too. Layers are Qwen3's.

Layers of sliding attention see the window alone, and are causal unless the config says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ..abilities import FeatureModel, feature_model
from ..base import FINAL, FeatureSpec, LanguageModel, Row
from ..huggingface.attention import attend_as_one
from ..huggingface.cache import Rows
from ..huggingface.inspection import fingerprint, torch_dtype
from .eagle_head import PositiveNumber, normed
from .eagle_model import output_for, settled
from .eagle_network import EagleLayer, HeadWeights, LayerConfig, LayerId, TokenId, turns_by
from .head_folder import HeadFolder, part, read_tensors, renamed

ARCHITECTURE = "DFlashDraftModel"
_SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """What the ``config.json`` of a DFlash head says, ``dflash_config`` included; the names are those of the format.

    Attributes:
        block_size: S, the last token included.
        mask_token_id: of the token that stands at the positions which are predicted.
        target_layer_ids: the layers of the target, counted from 0, whose outputs are read.
        input_embedding_scale: embeddings are multiplied by it.
        output_multiplier, final_logit_softcapping: logits x become m x, and of these c tanh(x / c).
        layer_types: of each layer, how it attends; None: by ``use_sliding_window`` and ``max_window_layers``.
        sliding_window: positions that a layer of sliding attention sees.
        is_causal: all layers are, or none; None: those of sliding attention are.
    """

    block_size: Annotated[int, Field(ge=2)] = 16
    mask_token_id: TokenId
    target_layer_ids: Annotated[tuple[LayerId, ...], Field(min_length=1)]
    input_embedding_scale: PositiveNumber = 1.0
    output_multiplier: PositiveNumber = 1.0
    final_logit_softcapping: Annotated[float, Field(ge=0)] = 0.0
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    sliding_window: PositiveInt | None = None
    is_causal: bool | None = None

    def sees(self, layer: int) -> tuple[bool, int | None]:
        """How a layer attends: whether it is causal, and within which window; None: within any."""
        window = self.sliding_window if self.use_sliding_window else None
        if self.layer_types is not None and layer < len(self.layer_types):
            is_sliding = self.layer_types[layer] == _SLIDING
        else:
            is_sliding = window is not None and layer >= self.max_window_layers
        return is_sliding if self.is_causal is None else self.is_causal, window if is_sliding else None


class DFlashNetwork(nn.Module):
    """The trained part of a DFlash head.

    Args:
        config: of its file.
        weights: of its file; tensors of it are taken.
    """

    def __init__(self, config: DFlashConfig, weights: HeadWeights) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.fc = weights.linear(["fc"], len(config.target_layer_ids) * size, [size])
        self.hidden_norm = weights.norm("hidden_norm", size, eps)
        self.layers = nn.ModuleList(
            EagleLayer(config, weights, f"layers.{i}", has_norms=True) for i in range(config.num_hidden_layers)
        )
        self.norm = weights.norm("norm", size, eps)
        self._rotary = (config.rotary(),)  # no module of this one: its frequencies stay float32

    @property
    def blocks(self) -> Sequence[EagleLayer]:
        """Its layers."""
        return tuple(self.layers)  # type: ignore[arg-type]

    def context(self, features: Tensor) -> Tensor:
        """[..., F] hidden states of the target -> [..., H]."""
        return normed(self.hidden_norm, self.fc.forward(features))

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, 2, D] cos and sin."""
        return turns_by(self._rotary[0], positions)

    def readout(self, logits: Tensor) -> Tensor:
        """Logits of the target's output layer -> those of the head."""
        config = self.config
        logits = logits if config.output_multiplier == 1 else logits * config.output_multiplier
        cap = config.final_logit_softcapping
        return logits if not cap else torch.tanh(logits / cap) * cap


class DFlashModel:
    """A DFlash head for one target (``MarginalHead``). Its rows keep the keys and values of the context.

    Attributes:
        network: the trained part.
        capabilities: as the target's, whose tokens it takes.
        depth: S - 1.
        vocabulary: None: it drafts all of the target's tokens.
    """

    vocabulary: Tensor | None = None

    def __init__(self, network: DFlashNetwork, features: FeatureSpec, target: LanguageModel, name: str) -> None:
        self._target, self.network, self.features = feature_model(target), network, features
        self._target.track_features(features)
        can, config = target.capabilities, network.config
        parameters, weights = sum(p.numel() for p in network.parameters()), fingerprint(network.parameters())
        output = output_for(self._target, torch.arange(can.vocab_size, device=can.device))
        self.depth, self.layers = config.block_size - 1, nn.ModuleDict({"network": network, "output": output})
        self.capabilities = replace(
            settled(self.layers, target, name),
            architecture=type(self).__name__,
            parameters=parameters,
            slot_bytes=2 * config.num_hidden_layers * config.kv_heads * config.head_size * torch_dtype(can).itemsize,
            fingerprint=weights,
        )
        block = torch.full((config.block_size,), config.mask_token_id, device=can.device)
        self._masks = self._embedded(block)
        self._rows: Rows[Row] = Rows(config.num_hidden_layers)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[n, H] what the first layer reads for tokens."""
        found, scale = self._target.embeddings(tokens), self.network.config.input_embedding_scale
        return found if scale == 1 else found * scale

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens at once."""
        self._rows.cache.reserve(rows, tokens)

    def open(self) -> Row:
        """A new row without tokens."""
        row = Row()
        self._rows.add(row)
        return row

    @torch.inference_mode()
    def close(self, row: Row) -> None:
        """Forget a row."""
        self._rows.close(self._rows.own(row))

    @torch.inference_mode()
    def marginals(self, rows: Sequence[Row], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """[B, S - 1, V] logits (``MarginalHead.marginals``): of each row's tokens the block has the last one.

        The block lies behind the context in the cache, where the next context overwrites it.
        """
        device, size = self.capabilities.device, self.network.config.block_size
        own, fresh = [self._rows.own(row) for row in rows], [len(given) for given in features]
        starts = [row.length + n for row, n in zip(own, fresh, strict=True)]  # of the blocks
        self._rows.place(own, [n + size for n in fresh], device)
        at, masks = self._rows.cache.placement, self._seen(starts)
        lines = [row.slot - at.first for row in own]
        positions = torch.cat([torch.arange(row.length, start) for row, start in zip(own, starts, strict=True)])
        ahead = torch.tensor(starts)[:, None] + torch.arange(size)
        turns = self.network.turns(positions.to(device)), self.network.turns(ahead.to(device))
        context = self.network.context(torch.cat(list(features)))[None]
        states = self._masks.expand(len(own), -1, -1).clone()
        states[:, 0] = self._embedded(torch.stack([new[-1] for new in tokens]).to(device))
        for number, layer in enumerate(self.network.blocks):
            _, *old = layer.project(context, turns[0][None])
            queries, *new = layer.attend_with(states, turns[1])
            keys, values = (_by_row(x[0], y, fresh) for x, y in zip(old, new, strict=True))
            keys, values = self._rows.cache.update(keys, values, number)
            if lines != list(range(at.count)):
                keys, values = keys[lines], values[lines]
            mask = masks[self.network.config.sees(number)]
            found = attend_as_one(queries.transpose(1, 2), keys, values, mask, None)
            states = layer.finish(states, found.flatten(2))
        for row, n in zip(own, fresh, strict=True):
            row.length += n
        logits: Tensor = self.layers["output"](normed(self.network.norm, states[:, 1:]))
        return self.network.readout(logits)

    def _seen(self, starts: Sequence[int]) -> dict[tuple[bool, int | None], Tensor]:
        """[B, 1, S, slots] bool, what blocks that start there may attend to, for each way in which layers attend."""
        device, config = self.capabilities.device, self.network.config
        slots = torch.arange(self._rows.cache.placement.end, device=device)
        first = torch.tensor(starts, device=device)[:, None, None, None]
        own = first + torch.arange(config.block_size, device=device)[:, None]  # positions are slots
        found = {}
        for is_causal, window in {config.sees(number) for number in range(config.num_hidden_layers)}:
            seen = (slots < first + config.block_size).expand(*own.shape[:-1], len(slots))
            if is_causal:
                seen = seen & (slots <= own)
            if window is not None:
                seen = seen & (own - slots < window) & (slots - own < window)
            found[is_causal, window] = seen
        return found


def _by_row(context: Tensor, block: Tensor, fresh: Sequence[int]) -> Tensor:
    """[1, heads, T, D] of each row's part of [C, heads, D], and behind it its own of [B, S, heads, D]."""
    parts = [part for pair in zip(context.split(list(fresh)), block, strict=True) for part in pair]
    return torch.cat(parts).transpose(0, 1)[None]


@dataclass(frozen=True)
class DFlashFolder(HeadFolder):
    """A DFlash head in a folder."""

    @property
    def target(self) -> str | None:
        """Its config names none."""
        return None

    @cached_property
    def config(self) -> DFlashConfig:
        """Its sizes and flags.

        Raises:
            ModelFileError: some are missing or wrong.
        """
        return self.parsed(DFlashConfig, {**self.document, **part(self.document, "dflash_config")})

    def features(self, layers: int) -> FeatureSpec:
        """Which hidden states it reads of a target of so many layers: of the last one that after the final norm.

        Raises:
            ConfigError: they are beyond the target.
        """
        read = [layer + 1 for layer in self.config.target_layer_ids]  # what a layer gives is what the next one reads
        self.check_layers(read, layers)
        return FeatureSpec(tuple(FINAL if layer == layers else layer for layer in read))

    def check_target(self, given: FeatureModel) -> None:
        """Compare its sizes with a target's.

        Raises:
            ConfigError: they differ.
        """
        self.check_sizes(given, self.config.hidden_size, self.config.vocab_size)

    def load(self, target: LanguageModel) -> DFlashModel:
        """The head, for a target (``HeadFolder.load``)."""
        given = feature_model(target)
        self.check_target(given)
        features = self.features(given.layers)
        return DFlashModel(self.network(), features, target, f"head {self.folder.name}")

    def network(self) -> DFlashNetwork:
        """The network.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """
        with self.reading():
            config = self.config
            if config.mask_token_id >= config.vocab_size:
                raise ValueError(f"its mask token is {config.mask_token_id}, beyond {config.vocab_size} tokens")
            weights = HeadWeights(renamed(read_tensors(self.folder), lambda name: name.removeprefix("model.")))
            network = DFlashNetwork(config, weights)
            self.check_weights(weights)
        return network.eval()

    def describe(self) -> dict[str, str]:
        """What it is, in words (``HeadFolder.describe``)."""
        network, config = self.network(), self.config
        parameters, count = sum(p.numel() for p in network.parameters()), config.num_hidden_layers
        return {
            "draft head": "DFlash",
            "target": f"not named: hidden size {config.hidden_size}, {config.vocab_size} tokens",
            "hidden states": f"{len(config.target_layer_ids)} of the target, after layers "
            f"{', '.join(map(str, config.target_layer_ids))}",
            "network": f"{count} layer{'s' * (count > 1)} of {config.hidden_size}, {parameters / 1e6:.1f} million "
            "parameters",
            "drafts": f"{config.vocab_size} of the target's tokens, {config.block_size - 1} a pass",
        }
