"""Published draft heads in folders: EAGLE-3, EAGLE-1, EAGLE-2 and HASS.

``config.json`` tells the kind; weights are safetensors, or a pickle of nothing but tensors. One reader takes the names
of SafeAILab and SpecForge (``midlayer.*``) and of speculators (``layers.0.*``). The vocabulary is ``d2t``, for each of
the head's tokens the distance to the target's id, or ``t2d``, which of the target's tokens they are; without both it is
the target's.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ...artifacts import first_error
from ...errors import ConfigError, DraftreeError, DraftreeWarning, ModelFileError
from ..abilities import FeatureModel, feature_model
from ..base import FINAL_STATE, FeatureSpec, LanguageModel
from ..pretrained import first_line, quiet
from .eagle_model import HeadModel
from .eagle_network import EagleConfig, EagleNetwork, HeadWeights, default_layers

CONFIG = "config.json"
EAGLE3, EAGLE = "eagle3", "eagle"
KINDS = {EAGLE3: "EAGLE-3", EAGLE: "EAGLE-1, EAGLE-2 or HASS"}
"""What is read, by the name of speculators."""

_BASES = "(Llama|Mistral|Qwen2|Qwen3)"
_ARCHITECTURES = {
    EAGLE3: re.compile(rf"{_BASES}ForCausalLMEagle3|Eagle3{_BASES}ForCausalLM|Eagle3(Speculator|DraftModel)"),
    EAGLE: re.compile(rf"{_BASES}ForCausalLMEagle|Eagle{_BASES}ForCausalLM"),
}
_OTHER_HEADS = re.compile("eagle|medusa|hydra|dflash|dspark|speculator|mtp|draft", re.IGNORECASE)
_OTHER_KEYS = ("medusa_num_heads", "dflash_config", "dspark_config")
_MOST_LAYERS = 2
"""A model with more is no head whose config says nothing of it."""
_UNUSED = re.compile(r"verifier_(norm|lm_head)\..*|.*rotary_emb\.inv_freq|t2d|d2t|layers\.\d+\.self_attn\.rotary.*")
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""What readers of damaged files raise."""
_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class PublishedHead:
    """A head in a folder.

    Attributes:
        folder: where it lies.
        kind: a name of ``KINDS``.
        document: its ``config.json``.
    """

    folder: Path
    kind: str
    document: Mapping[str, Any]

    @property
    def of_speculators(self) -> bool:
        """It has speculators' config: ids of layers are what these read."""
        return "speculators_model_type" in self.document

    @property
    def target(self) -> str | None:
        """The model that it was made for, if its config names one."""
        verifier = _part(_part(self.document, "speculators_config"), "verifier").get("name_or_path")
        return verifier if isinstance(verifier, str) and verifier else None

    @cached_property
    def config(self) -> EagleConfig:
        """Its sizes and flags.

        Raises:
            ModelFileError: some are missing or wrong.
        """
        flat = {
            **_part(self.document, "transformer_layer_config"),
            **self.document,
            **_part(self.document, "eagle_config"),
        }
        if "fc_norm" not in flat and "use_aux_norm" in flat:
            flat["fc_norm"] = flat["use_aux_norm"]
        known = {key: value for key, value in flat.items() if value is not None}
        try:
            return TypeAdapter(EagleConfig).validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            raise self._unreadable(f"its {CONFIG} is wrong: {first_error(error)}") from None
        except ConfigError as error:
            raise self._unreadable(f"its {CONFIG} is wrong: {error}") from None

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the names of speculators.

        Raises:
            ModelFileError: they cannot be read.
        """
        with self._reading():
            return _renamed(_read(self.folder))

    def count(self, tensors: Mapping[str, Tensor]) -> int:
        """How many hidden states of the target it reads.

        Raises:
            ModelFileError: its ``fc`` fits no number.
        """
        ids = self.config.eagle_aux_hidden_state_layer_ids
        if self.kind == EAGLE or not self.config.use_aux_hidden_state:
            return 1
        if "fc.weight" not in tensors:
            return len(default_layers(0) if ids is None else ids)
        shape, size = tensors["fc.weight"].shape, self.config.target_size
        if len(shape) != 2 or shape[1] % size:
            raise self._unreadable(f"fc.weight is {list(shape)}: it reads no hidden states of size {size}")
        return int(shape[1]) // size

    def features(self, count: int, layers: int | None) -> FeatureSpec:
        """Which hidden states these are, of a target of so many layers; None: of one that has enough.

        Raises:
            ModelFileError: the config names another number of layers, or none where there is no default.
            ConfigError: they are beyond the target.
        """
        ids = self.config.eagle_aux_hidden_state_layer_ids
        if self.kind == EAGLE or not self.config.use_aux_hidden_state:
            return FINAL_STATE
        if ids is None:
            default = default_layers(layers or 0)
            if count != len(default):
                raise self._unreadable(f"fc.weight reads {count} hidden states, and its {CONFIG} does not say which")
            ids = default if layers is not None else (0,) * count
        elif ids[:1] == (1,) and not self.of_speculators:  # what layers give, counted from 0: what the next ones read
            ids = tuple(layer + 1 for layer in ids)
        if len(ids) != count:
            raise self._unreadable(f"fc.weight reads {count} hidden states, and its {CONFIG} names {len(ids)}")
        if layers is not None and not all(0 <= layer <= layers for layer in ids):
            raise ConfigError(
                f"draft head {self.folder} reads the hidden states {list(ids)} of {self._made_for}, and the target has "
                f"{layers} layers: use the target that it was made for"
            )
        return FeatureSpec(ids)

    @property
    def _made_for(self) -> str:
        return self.target or "its target"

    def network(self, layers: int | None) -> tuple[EagleNetwork, Tensor]:
        """The network, and the target's ids of its vocabulary.

        Args:
            layers: of the target, which counts hidden states from its end; None: it is not known.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it reads layers that the target has not.
        """
        tensors = self.tensors()
        features = self.features(self.count(tensors), layers)
        with self._reading():
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise ValueError(f"its {name} is not all finite numbers")
            ids, config = _vocabulary(tensors, self.config, own=self.kind == EAGLE3)
            weights = HeadWeights({name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)})
            with quiet():
                network = EagleNetwork(config, weights, features, fuses_states=self.kind == EAGLE3)
            if weights.missing:
                raise ValueError(f"it lacks {_list(weights.missing)}")
            if weights.wrong:
                raise ValueError(weights.wrong[0])
        if weights.left:
            message = f"draft head {self.folder} has {_list(sorted(weights.left))} more than its kind uses"
            warnings.warn(message, DraftreeWarning, stacklevel=3)
        return network.eval(), ids

    def check_target(self, given: FeatureModel) -> None:
        """Compare its sizes with a target's.

        Raises:
            ConfigError: they differ.
        """
        config, can = self.config, given.capabilities
        own, its = (config.target_size, config.vocab_size), (given.hidden_size, can.vocab_size)
        if own != its:
            raise ConfigError(
                f"draft head {self.folder} was made for {self.target or 'a model'} of hidden size {own[0]} and "
                f"{own[1]} tokens, and {can.name} has hidden size {its[0]} and {its[1]} tokens: use the target that it "
                "was made for, or drafter 'auto'"
            )

    def network_for(self, target: FeatureModel) -> tuple[EagleNetwork, Tensor]:
        """Its network without embeddings that are the target's own, and the ids of its vocabulary.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it was made for another target.
        """
        self.check_target(target)
        network, ids = self.network(target.layers)
        if network.embed_tokens is not None and _are_of(target, network.embed_tokens.weight):
            network.embed_tokens = None
        return network, ids

    def describe(self) -> dict[str, str]:
        """What it is, in words, by what is said of it; it is read whole.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """
        network, ids = self.network(None)
        config, named = self.config, self.config.eagle_aux_hidden_state_layer_ids
        read = f"{len(network.features.layers)} of the target"
        if network.features != FINAL_STATE:
            which = "2, half and all but 3" if named is None else ", ".join(map(str, network.features.layers))
            read += f", before layers {which}"
        else:
            read += ", the final one"
        parameters = sum(p.numel() for p in network.parameters())
        writer = "speculators" if self.of_speculators else "SafeAILab or SpecForge"
        layers, size = config.num_hidden_layers, config.hidden_size
        return {
            "draft head": f"{KINDS[self.kind]}, {writer} config",
            "target": f"{self.target or 'not named'}: hidden size {config.target_size}, {config.vocab_size} tokens",
            "hidden states": read,
            "network": f"{layers} layer{'s' * (layers > 1)} of {size}, {parameters / 1e6:.1f} million parameters",
            "drafts": f"{len(ids)} of the target's tokens",
        }

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except DraftreeError:
            raise
        except pickle.UnpicklingError:
            raise self._unreadable("a pickle of it holds more than tensors, which may be code: it is not run") from None
        except _UNREADABLE as error:
            raise self._unreadable(first_line(error)) from None

    def _unreadable(self, why: str) -> ModelFileError:
        return ModelFileError(f"cannot read the draft head {self.folder}: {why}: copy it again, whole")


def published_head(folder: Path) -> PublishedHead | None:
    """The published head in a folder; None: its config is that of something else.

    Raises:
        ConfigError: it is a head of a kind that is not read.
    """
    try:
        document = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    declared = document.get("speculators_model_type")
    if declared == EAGLE3:
        return PublishedHead(folder, EAGLE3, document)
    if declared is not None:
        raise _unknown(folder, declared)
    names = document.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    for kind, pattern in _ARCHITECTURES.items():
        if pattern.fullmatch(architecture):
            return PublishedHead(folder, kind, document)
    other = next((key for key in _OTHER_KEYS if key in document), None)
    if other or _OTHER_HEADS.search(architecture):
        raise _unknown(folder, architecture if _OTHER_HEADS.search(architecture) else other)
    if "draft_vocab_size" in document or "eagle_config" in document:
        return PublishedHead(folder, EAGLE3, document)
    layers = document.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return None
    head = PublishedHead(folder, EAGLE, document)  # EAGLE-1 has the config of its target: its tensors tell
    try:
        found = _names(folder)
    except _UNREADABLE:  # whoever reads it as a model says why
        return None
    if "fc.weight" not in found:
        return None
    return replace(head, kind=EAGLE3) if "layers.0.hidden_norm.weight" in found else head


def load_published(head: PublishedHead, target: LanguageModel) -> HeadModel:
    """A published head, for a target.

    Raises:
        ModelFileError: it cannot be read, or is not whole.
        ConfigError: it was made for another target.
        UnsupportedModelError: the target's hidden states cannot be read.
    """
    network, ids = head.network_for(feature_model(target))
    return HeadModel(network, ids, target, f"head {head.folder.name}")


def _are_of(target: FeatureModel, embeddings: Tensor) -> bool:
    """Are these [V, H] the target's own embeddings?"""
    if embeddings.shape[1] != target.hidden_size:
        return False
    ids = torch.arange(len(embeddings), device=target.capabilities.device)
    return all(
        torch.equal(target.embeddings(some).float().cpu(), own.float())
        for some, own in zip(ids.split(4096), embeddings.split(4096), strict=True)
    )


def _unknown(folder: Path, kind: object) -> ConfigError:
    return ConfigError(
        f"draft head {folder} is of kind {kind!r}: draftree reads {', '.join(KINDS)} and its own (draftree train head)"
    )


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Its files of safetensors, and of pickles."""
    pickled = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.bin"))
    return sorted(folder.glob("*.safetensors")), pickled


def _names(folder: Path) -> set[str]:
    """Names of its tensors, as ``_renamed``; only those of a pickle are read to know them."""
    safe, _ = _files(folder)
    if not safe:
        return set(_renamed(_read(folder)))
    found = set[str]()
    for path in safe:
        with safe_open(path, framework="pt") as file:
            found.update(map(_new_name, file.keys()))
    return found


def _read(folder: Path) -> dict[str, Tensor]:
    safe, pickled = _files(folder)
    if not safe and not pickled:
        raise ValueError("it has no weights (*.safetensors or pytorch_model.bin)")
    found: dict[str, Tensor] = {}
    for path in safe or pickled:
        if safe:
            found |= load_file(path)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of pickles, which end as errors or do not
            read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or not all(isinstance(tensor, Tensor) for tensor in read.values()):
            raise ValueError(f"{path.name} is not a table of tensors")
        found |= read
    return found


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_new_name(name): tensor for name, tensor in tensors.items()}


def _new_name(name: str) -> str:
    """The name of a tensor as speculators has it."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t" if name == "draft_id_to_target_id" else name.replace("fc_norms.", "fc_norm.")


def _vocabulary(tensors: Mapping[str, Tensor], config: EagleConfig, *, own: bool) -> tuple[Tensor, EagleConfig]:
    """[D] int64 the target's ids of the head's tokens, and the config with D.

    Args:
        own: the head has a vocabulary of its own; else it is the target's.

    Raises:
        ValueError: they are none.
    """
    distances, marked, size = tensors.get("d2t"), tensors.get("t2d"), config.draft_vocab_size or config.vocab_size
    if not own or (distances is None and marked is None):
        if own and size != config.vocab_size:
            raise ValueError(f"it drafts {size} of {config.vocab_size} tokens and lacks d2t, which are which")
        return torch.arange(config.vocab_size), config
    chosen = None
    if marked is not None:
        if marked.is_floating_point() or tuple(marked.shape) != (config.vocab_size,):
            raise ValueError(f"t2d is {list(marked.shape)}, not a truth value for each of {config.vocab_size} tokens")
        chosen = marked.bool().nonzero()[:, 0]
    if distances is None:
        assert chosen is not None  # noqa: S101 - one of them is there
        ids = chosen
    elif distances.is_floating_point() or distances.dim() != 1:
        raise ValueError(f"d2t is {list(distances.shape)} of {distances.dtype}, not a whole number for each token")
    else:
        ids = torch.arange(len(distances)) + distances.long()
    if config.draft_vocab_size is not None and len(ids) != size:
        raise ValueError(f"it drafts {size} tokens, and d2t or t2d has {len(ids)}")
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ValueError(f"d2t leads to token {int(ids.max()) if len(ids) else 0}, beyond {config.vocab_size} tokens")
    if len(ids.unique()) != len(ids):
        raise ValueError("d2t leads to a token twice")
    if chosen is not None and not torch.equal(ids.sort().values, chosen):
        raise ValueError("d2t and t2d are of different tokens")
    return ids, replace(config, draft_vocab_size=len(ids))


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_NAMED])}{more})"
