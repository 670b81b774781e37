"""The network of an EAGLE draft head, and its checkpoints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..artifacts import parse_json, write_whole
from ..errors import ConfigError, ModelFileError, RunError, UnknownNameError
from .eagle_model import HeadModel
from .huggingface import HFModel
from .pretrained import first_line


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
        ConfigError: a value is out of range.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ConfigError(f"{field.name} is {value!r}: use a {'whole ' if whole else ''}number")
            if not 0 < value <= sys.float_info.max:
                raise ConfigError(f"{field.name} is {value}: use a positive number")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads of {self.head_dim} share {self.kv_heads} key heads: use a divisor and an even size"
            )

    @classmethod
    def like(cls, target: PreTrainedModel, embedding_scale: float) -> HeadConfig:
        """The sizes of one of the target's own layers, where its config names them."""
        config = target.config.get_text_config(decoder=True)
        hidden = embeddings(target).shape[1]
        heads = int(getattr(config, "num_attention_heads", 0) or max(1, hidden // 64))
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        return cls(
            hidden_size=hidden,
            vocab_size=embeddings(target).shape[0],
            intermediate_size=int(getattr(config, "intermediate_size", 0) or 3 * hidden),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=dim + dim % 2,
            embedding_scale=embedding_scale,
        )

    def as_dict(self) -> dict[str, float]:
        """For a file."""
        return asdict(self)


class HeadNetwork(nn.Module):
    """The trained part of a head.

    The layer's own contribution starts at zero: an untrained network gives what its input projection does.
    """

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
        states = self.qkv.forward(_normed(self.attention_norm, inputs)).unflatten(
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
        gate, up = self.gate_up.forward(_normed(self.mlp_norm, middle)).chunk(2, dim=-1)
        out: Tensor = middle + self.down.forward(nn.functional.silu(gate) * up)
        return out

    def turns(self, positions: Tensor) -> Tensor:
        """[...] positions -> [..., 1, D / 2] complex64 rotations."""
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device) / self.config.head_dim
        angles = positions[..., None, None].float() * self.config.rope_theta**-half
        return torch.polar(torch.ones_like(angles), angles)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """``norm`` of [..., H]; on a CPU PyTorch's own takes ten times as long as this."""
    if x.device.type != "cpu":
        return norm(x)  # type: ignore[no-any-return]
    wide = x.float()
    wide = wide * (wide * wide).mean(-1, keepdim=True).add(norm.eps or 0.0).rsqrt()
    return wide.to(x.dtype) * norm.weight


def embeddings(target: PreTrainedModel) -> Tensor:
    """[V, H] token embeddings."""
    weight: Tensor = target.get_input_embeddings().weight  # type: ignore[assignment]
    return weight


_UNITS = 64
"""Unit vectors that an output layer is given at once."""


class OutputLayer(NamedTuple):
    """What turns hidden states into logits.

    Attributes:
        weight: [V, H].
        bias: [V], or None.
    """

    weight: Tensor
    bias: Tensor | None


@torch.inference_mode()
def output_layer(target: PreTrainedModel) -> OutputLayer:
    """The target's output layer.

    Where its weights have been put into another form, they are those of the embeddings if it shares them, else found
    out: a linear layer's output for the unit vectors is its weight.
    """
    layer = target.get_output_embeddings()
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return OutputLayer(weight.detach(), bias.detach() if isinstance(bias, Tensor) else None)
    like = embeddings(target).detach()
    if target.config.get_text_config(decoder=True).tie_word_embeddings:
        return OutputLayer(like, None)
    zero = layer(like.new_zeros((1, like.shape[1])))[0]
    units = torch.eye(like.shape[1], dtype=like.dtype, device=like.device).split(_UNITS)
    found = torch.cat([(layer(some) - zero).T for some in units], dim=1)
    return OutputLayer(found, zero if bool(zero.any()) else None)


FORMAT, VERSION = "draftree-head", 1
CONFIG, WEIGHTS = "config.json", "head.safetensors"
SHIPPED = Path(__file__).parent.parent / "heads"
"""Folder of the heads that come with the package."""

_SAMPLED = (64, 32)
"""Rows and columns of the embeddings that are kept to know the target by."""
_SAME = 0.9
"""Correlation of two samples of one model: quantised and fine-tuned copies pass, other models have about 0."""


def is_head(folder: Path) -> bool:
    """Is there a head in this folder, whole or not?"""
    try:
        return bool(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["format"] == FORMAT)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return (folder / WEIGHTS).is_file()


def sample(target: HFModel) -> Tensor:
    """[64, 32] float32, or less of a smaller model: evenly spaced rows of the embeddings."""
    weight = embeddings(target.model)
    rows = torch.linspace(0, len(weight) - 1, min(_SAMPLED[0], len(weight)), device=weight.device).long()
    return weight.detach()[rows, : _SAMPLED[1]].float().cpu()


def save_head(folder: Path, network: HeadNetwork, vocabulary: Tensor, target: HFModel) -> None:
    """Write a head in half precision; the config comes last, and without it there is no head.

    Raises:
        RunError: it cannot be written.
    """
    tensors = {name: value.detach().cpu().half().contiguous() for name, value in network.state_dict().items()}
    tensors |= {"vocabulary": vocabulary.cpu().int(), "target_sample": sample(target)}
    path = folder / WEIGHTS
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(save(tensors))
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error}: free some disk space") from None
    document = {"format": FORMAT, "version": VERSION, "target": target.capabilities.name}
    write_whole(folder / CONFIG, json.dumps(document | network.config.as_dict(), indent=1) + "\n")


def read_head(folder: Path) -> tuple[str, HeadNetwork, Tensor, Tensor]:
    """The name of the target, the network, the draft vocabulary [D] and the sample of the target.

    Raises:
        UnknownNameError: there is no head.
        ModelFileError: it cannot be read, or is not whole.
    """
    if not (folder / CONFIG).is_file():
        raise UnknownNameError(f"no draft head in {folder}: give a folder that 'draftree train head' wrote")
    with _reading(folder):
        target, config = _read_config(folder)
        with torch.device("meta"):  # no random weights, which would take longer than reading these
            network = HeadNetwork(config)
        tensors = load_file(folder / WEIGHTS)
        vocabulary, known = tensors.pop("vocabulary"), _numbers(tensors.pop("target_sample"), "target_sample")
        if vocabulary.dtype not in (torch.int32, torch.int64) or vocabulary.dim() != 1:
            raise ValueError("its draft vocabulary is not a list of tokens")
        vocabulary = vocabulary.long()
        network.load_state_dict({name: _numbers(value, name) for name, value in tensors.items()}, assign=True)
        if not len(vocabulary) or bool((vocabulary.diff() <= 0).any()) or not 0 <= int(vocabulary[0]):
            raise ValueError("its draft vocabulary is not a list of different tokens")
        if int(vocabulary[-1]) >= network.config.vocab_size:
            raise ValueError("its draft vocabulary goes beyond the target's")
    return target, network, vocabulary, known


def _read_config(folder: Path) -> tuple[str, HeadConfig]:
    """The name of the target, and the sizes."""
    document: Any = parse_json((folder / CONFIG).read_bytes())
    if not isinstance(document, dict) or (document.pop("format"), document.pop("version")) != (FORMAT, VERSION):
        raise ValueError("another format")
    return str(document.pop("target")), HeadConfig(**document)


def _numbers(weight: Tensor, name: str) -> Tensor:
    """A weight as float32.

    Raises:
        ValueError: it is of whole numbers, or some are not finite.
    """
    if not weight.is_floating_point() or not bool((numbers := weight.float()).isfinite().all()):
        raise ValueError(f"its {name} is not all finite numbers")
    return numbers


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RuntimeError, SafetensorError) as error:
        raise ModelFileError(
            f"cannot read the draft head {folder}: {first_line(error)}: copy it again, or train another"
        ) from None


def load_head(folder: Path, target: HFModel) -> HeadModel:
    """The head in a folder, for a target.

    Raises:
        UnknownNameError, ModelFileError: there is none that can be read.
        ConfigError: it was trained for another target.
        UnsupportedModelError: the target's hidden states cannot be read.
    """
    made_for, network, vocabulary, known = read_head(folder)
    name = target.capabilities.name
    way_out = f"train one for it with 'draftree train head --target {name}', or use drafter 'auto'"
    for what, own, size in _sizes(network.config, embeddings(target.model)):
        if own != size:
            raise ConfigError(
                f"draft head {folder} was trained for {made_for}, {what} {own}, but {name} has {size}: {way_out}"
            )
    if not _same(known, sample(target)):
        raise ConfigError(
            f"draft head {folder} was trained for {made_for}, and {name}'s embeddings are others: {way_out}"
        )
    return HeadModel(network, vocabulary, target, f"head {folder.name}")


def _sizes(config: HeadConfig, given: Tensor) -> tuple[tuple[str, int, int], ...]:
    """What must agree: its name, the head's size, and that of the target's embeddings."""
    return (
        ("hidden size", config.hidden_size, given.shape[1]),
        ("vocabulary size", config.vocab_size, given.shape[0]),
    )


def _same(known: Tensor, found: Tensor) -> bool:
    """Are these samples of one model?"""
    return found.shape == known.shape and bool(torch.corrcoef(torch.stack([found, known]).flatten(1))[0, 1] >= _SAME)


def shipped_for(target: HFModel) -> Path | None:
    """Folder of the head that comes with the package for a target, by whatever name it was loaded; None: there is none.

    Reads no weights but the samples of those heads that have the target's sizes.

    Raises:
        ModelFileError: the package is not whole.
    """
    return next((folder for folder in sorted(SHIPPED.glob("*/")) if fits(folder, target)), None)


def fits(folder: Path, target: HFModel) -> bool:
    """Was the head in this folder trained for this model, or for another form of it? Reads no weights but the sample.

    Raises:
        ModelFileError: it cannot be read.
    """
    try:
        given = embeddings(target.model)
    except (AttributeError, NotImplementedError):  # a model with embeddings of its own kind
        return False
    with _reading(folder):
        if any(own != size for _, own, size in _sizes(_read_config(folder)[1], given)):
            return False
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            known = _numbers(file.get_tensor("target_sample"), "target_sample")
    return _same(known, sample(target))


def shipped_head(target: HFModel) -> HeadModel:
    """The head that comes with the package for a target, by whatever name it was loaded.

    Raises:
        UnknownNameError: there is none.
        ModelFileError: the package is not whole.
    """
    if folder := shipped_for(target):
        return load_head(folder, target)
    name = target.capabilities.name
    raise UnknownNameError(
        f"no draft head comes with draftree for {name}: train one with 'draftree train head --target {name}' and give "
        "its folder, or use drafter 'auto'"
    )
