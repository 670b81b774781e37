"""The network of the EAGLE draft heads that draftree trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from ...errors import ConfigError
from ..abilities import TrainableModel
from ..base import FINAL_STATE, FeatureSpec

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of a head.

    Attributes:
        hidden_size: H of the target.
        vocab_size: V of the target.
        intermediate_size: of the feed-forward part.
        heads, kv_heads, head_dim: of the attention; ``kv_heads`` divides ``heads``, ``head_dim`` is even.
        rope_theta: base of the rotary positions.
        norm_eps: of the RMS norms.
        embedding_scale: embeddings are multiplied by this, so that they weigh as much as hidden states.

    Raises:
        ConfigError: heads cannot share key heads so, or the size of a head is odd.
    """

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    intermediate_size: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    rope_theta: PositiveNumber = 10000.0
    norm_eps: PositiveNumber = 1e-5
    embedding_scale: PositiveNumber = 1.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads of {self.head_dim} share {self.kv_heads} key heads: use a divisor and an even size"
            )

    @classmethod
    def like(cls, target: TrainableModel, embedding_scale: float) -> HeadConfig:
        """The sizes of one of the target's own layers, where its config names them."""
        config = target.model.config.get_text_config(decoder=True)
        hidden = target.hidden_size
        heads = int(getattr(config, "num_attention_heads", 0) or max(1, hidden // 64))
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        return cls(
            hidden_size=hidden,
            vocab_size=target.capabilities.vocab_size,
            intermediate_size=int(getattr(config, "intermediate_size", 0) or 3 * hidden),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=dim + dim % 2,
            embedding_scale=embedding_scale,
        )


class HeadLayer(Protocol):
    """A decoder layer of a head, around its attention."""

    def attend_with(self, inputs: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, n, I] inputs, turned to their positions (``DraftNetwork.turns``).

        Returns:
            queries [B, n, heads, D], keys and values [B, n, kv_heads, D].
        """

    def finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """[..., I] inputs, [..., heads x D] found by attention -> [..., H] outputs."""


class DraftNetwork(Protocol):
    """The network of a draft head: token embeddings and states of the tokens before, to states (``DraftHead``).

    Attributes:
        features: which hidden states of the target it reads.
        predicts_features: its states are these hidden states, or predict them.
        embed_tokens: its own embeddings; None: it reads the target's.
        lm_head: its own output layer, over its vocabulary; None: the target's.
    """

    features: FeatureSpec
    predicts_features: bool
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        """Its layers."""

    @property
    def slot(self) -> tuple[int, int, int]:
        """Layers, key heads and the size of a head: what a token takes in the cache."""

    @property
    def sizes(self) -> tuple[int, int]:
        """H of states, and F of the target's hidden states."""

    def fused(self, features: Tensor) -> Tensor:
        """[..., F] hidden states of the target -> [..., H] states."""

    def read(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[..., E] token embeddings and [..., H] states of the tokens before -> [..., I] input of the first layer."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """[..., H] outputs of the last layer -> [..., H] states."""

    def readout(self, states: Tensor) -> Tensor:
        """[..., H] states -> [..., H], what the output layer reads."""

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, *] rotations."""


class HeadNetwork(nn.Module):
    """The trained part of a head (``DraftNetwork``): its states are the target's final hidden states, or predict them.

    The layer's own contribution starts at zero: an untrained network gives what its input projection does.
    """

    features, predicts_features = FINAL_STATE, True
    embed_tokens: nn.Embedding | None = None
    lm_head: nn.Linear | None = None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.heads * config.head_dim
        self.project = nn.Linear(2 * hidden, hidden)
        self.attention_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.qkv = nn.Linear(hidden, width + 2 * config.kv_heads * config.head_dim, bias=False)
        self.attended = nn.Linear(width, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        nn.init.zeros_(self.attended.weight)
        nn.init.zeros_(self.down.weight)

    @property
    def blocks(self) -> Sequence[HeadLayer]:
        """It is its only layer."""
        return (self,)

    @property
    def slot(self) -> tuple[int, int, int]:
        """Layers, key heads and the size of a head."""
        return 1, self.config.kv_heads, self.config.head_dim

    @property
    def sizes(self) -> tuple[int, int]:
        """H of states, and F of the target's hidden states."""
        return self.config.hidden_size, self.config.hidden_size

    def fused(self, features: Tensor) -> Tensor:
        """Themselves."""
        return features

    def predicted(self, outputs: Tensor) -> Tensor:
        """Themselves."""
        return outputs

    def readout(self, states: Tensor) -> Tensor:
        """Themselves."""
        return states

    def read(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """[..., H] token embeddings and hidden states of the tokens before -> [..., H] input of the layer."""
        out: Tensor = self.project.forward(torch.cat([embeddings * self.config.embedding_scale, features], dim=-1))
        return out.to(embeddings.dtype)  # under autocast too, what is summed up stays as precise as it came

    def attend_with(self, inputs: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, n, H] inputs, turned to their positions (``turns``: [B or 1, n, 1, D / 2]).

        Returns:
            queries [B, n, heads, D], keys and values [B, n, kv_heads, D].
        """
        c = self.config
        states = self.qkv.forward(normed(self.attention_norm, inputs)).unflatten(
            -1, (c.heads + 2 * c.kv_heads, c.head_dim)
        )
        turned, values = states.tensor_split([c.heads + c.kv_heads], dim=-2)
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns).flatten(-2).to(values.dtype)
        queries, keys = turned.tensor_split([c.heads], dim=-2)
        return queries, keys, values

    def finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """[..., H] inputs of the layer, [..., heads x D] found by attention -> [..., H] predicted hidden states."""
        middle = inputs + self.attended.forward(attended)
        gate, up = self.gate_up.forward(normed(self.mlp_norm, middle)).chunk(2, dim=-1)
        out: Tensor = middle + self.down.forward(nn.functional.silu(gate) * up)
        return out

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, D / 2] complex64 rotations."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device) / self.config.head_dim
        angles = positions[..., None, None].float() * self.config.rope_theta**-half
        return torch.polar(torch.ones_like(angles), angles)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """``norm`` of [..., H]; on a CPU PyTorch's own takes ten times as long as this."""
    if x.device.type != "cpu":
        return norm(x)  # type: ignore[no-any-return]
    wide = x.float()
    wide = wide * (wide * wide).mean(-1, keepdim=True).add(norm.eps or 0.0).rsqrt()
    return wide.to(x.dtype) * norm.weight
