"""Draft heads in folders: ``config.json`` and weights, safetensors or pickles of nothing but tensors.

One reader takes the names of SafeAILab and SpecForge (``midlayer.*``) and of speculators (``layers.0.*``), which are
those of draftree too (``eagle_network``). The vocabulary is ``d2t``, for each of the head's tokens the distance to the
target's id, or ``t2d``, which of the target's tokens they are; without both it is the target's. ``target_sample`` is a
part of the target's embeddings, by which draftree's heads know it.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ...artifacts import first_error, read_bytes
from ...errors import (
    ConfigError,
    DraftreeError,
    DraftreeWarning,
    ModelFileError,
    UnknownNameError,
    first_line,
    needs_extra,
)
from ..base import FINAL_STATE, FeatureSpec, LanguageModel
from ..native.native_head import NativeHead
from ..native.native_model import NativeModel
from ..protocols import DraftHead, FeatureModel, feature_model
from .head_config import Array, EagleConfig, HeadArrays, HeadWeights, default_layers, taken
from .head_tensors import CONFIG, UNREADABLE, is_same, read_sample, read_tensors, sample, tensor_names, vocabulary_in

if TYPE_CHECKING:
    from torch import Tensor

    from .eagle_model import HeadModel
    from .eagle_network import EagleNetwork

EAGLE3, EAGLE = "eagle3", "eagle"
KINDS = {EAGLE3: "EAGLE-3", EAGLE: "EAGLE-1, EAGLE-2 or HASS"}
"""Kind of head -> its name for users."""
_BASES = "(Llama|Mistral|Qwen2|Qwen3)"
_ARCHITECTURES = {
    EAGLE3: re.compile(rf"{_BASES}ForCausalLMEagle3|Eagle3{_BASES}ForCausalLM|Eagle3(Speculator|DraftModel)"),
    EAGLE: re.compile(rf"{_BASES}ForCausalLMEagle|Eagle{_BASES}ForCausalLM"),
}
_OTHER_HEADS = re.compile("eagle|medusa|hydra|dflash|dspark|speculator|mtp|draft", re.IGNORECASE)
_OTHER_KEYS = ("dflash_config", "dspark_config", "hydra_num_heads", "medusa_num_heads")
_MOST_LAYERS = 2
"""A folder whose config names no kind of head is a head only where it has at most so many layers."""
_UNUSED = re.compile(
    r"verifier_(norm|lm_head)\..*|.*rotary_emb\.inv_freq|[td]2[td]|target_sample|.*self_attn\.rotary.*"
)
_NAMED = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class HeadFolder:
    """A head in a folder.

    Attributes:
        folder: where it lies.
        document: its ``config.json``.
        kind: a name of ``KINDS``.
    """

    folder: Path
    document: Mapping[str, Any]
    kind: str

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

    def tensors(self) -> dict[str, Array]:
        """Its weights, by the names of speculators.

        Raises:
            ModelFileError: they cannot be read.
        """
        with self._reading():
            return read_tensors(self.folder)

    def count(self, tensors: Mapping[str, Array]) -> int:
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
        if layers is not None:
            self._check_layers(ids, layers)
        return FeatureSpec(ids)

    def arrays(self, layers: int | None) -> HeadArrays:
        """Its weights by what they do.

        Args:
            layers: of the target, which counts hidden states from its end; None: it is not known.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it reads layers that the target has not.
        """
        tensors = self.tensors()
        features = self.features(self.count(tensors), layers)
        with self._reading():
            ids, config = vocabulary_in(tensors, self.config)
        weights = HeadWeights({name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)})
        arrays = taken(config, weights, features, ids, fuses_states=self.kind != EAGLE)
        self._check_weights(weights)
        return arrays

    def network(self, layers: int | None) -> tuple[EagleNetwork, Tensor]:
        """The network of torch, and the target's ids of its vocabulary (``arrays``)."""
        with needs_extra("torch", f"draft head {self.folder}"):
            import torch

            from ..huggingface.hf_loading import quiet
            from .eagle_network import EagleNetwork
        arrays = self.arrays(layers)
        try:
            with quiet():
                return EagleNetwork(arrays).eval(), torch.from_numpy(arrays.ids)
        except ConfigError as error:
            raise self._unreadable(f"its {CONFIG} is wrong: {error}") from None

    def load(self, target: LanguageModel) -> DraftHead:
        """The head, for a target: by the native engine where that runs the target, else by torch.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it was made for another target.
            UnsupportedModelError: the target's hidden states cannot be read, or the native engine does not compute it.
            MissingPackageError: it needs torch, which is missing.
        """
        if isinstance(target, NativeModel):
            self._check_target(target)
            arrays = self.arrays(target.layers)
            if arrays.embeddings is not None and _are_of(target, arrays.embeddings):
                arrays = replace(arrays, embeddings=None)
            return NativeHead(arrays, target, f"head {self.folder.name}")
        return self.torch_head(feature_model(target))

    def torch_head(self, target: FeatureModel) -> HeadModel:
        """The head by torch, which reads hidden states that are given to it (``load``)."""
        network, ids = self.network_for(target)
        from .eagle_model import HeadModel

        return HeadModel(network, ids, target, f"head {self.folder.name}")

    def network_for(self, target: FeatureModel) -> tuple[EagleNetwork, Tensor]:
        """Its network without embeddings that are the target's own, and the ids of its vocabulary.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it was made for another target.
        """
        self._check_target(target)
        network, ids = self.network(target.layers)
        if network.embed_tokens is not None and _are_of(target, network.embed_tokens.weight.float().numpy()):
            network.embed_tokens = None
        return network, ids

    def _check_target(self, target: FeatureModel) -> None:
        """Raise ConfigError if it was made for another target."""
        if mismatch := self.mismatch(target):
            raise ConfigError(
                f"draft head {self.folder} was made for {mismatch}: use the target that it was made for, train a head "
                f"with 'draftree train head --target {target.capabilities.name}', or use drafter 'auto'"
            )

    def mismatch(self, target: FeatureModel) -> str | None:
        """What it was made for and what the target has in place of that; None: it was made for this target.

        Of the weights only ``target_sample`` is read.

        Raises:
            ModelFileError: it cannot be read.
        """
        can, own = target.capabilities, (self.config.target_size, self.config.vocab_size)
        if own != (its := (target.hidden_size, can.vocab_size)):
            return (
                f"{self.target or 'a model'} of hidden size {own[0]} and {own[1]} tokens, and {can.name} has hidden "
                f"size {its[0]} and {its[1]} tokens"
            )
        with self._reading():
            known = read_sample(self.folder)
        if known is not None and not is_same(known, sample(target)):
            return f"{self.made_for}, and {can.name}'s embeddings are others"
        return None

    def describe(self) -> dict[str, str]:
        """What it is, in words; it is read whole.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """
        arrays = self.arrays(None)
        with self._reading():
            is_own = read_sample(self.folder) is not None
        config, named = self.config, self.config.eagle_aux_hidden_state_layer_ids
        read = f"{len(arrays.features.layers)} of the target"
        if arrays.features != FINAL_STATE:
            which = "2, half and all but 3" if named is None else ", ".join(map(str, arrays.features.layers))
            read += f", before layers {which}"
        else:
            read += ", the final one"
        parameters = sum(weight.size for weight in arrays.weights)
        writer = "draftree" if is_own else "speculators" if self.of_speculators else "SafeAILab or SpecForge"
        layers, size, of_text = config.num_hidden_layers, config.hidden_size, ", and those of the text"
        return {
            "draft head": f"{KINDS[self.kind]}, {writer} config",
            "target": f"{self.target or 'not named'}: hidden size {config.target_size}, {config.vocab_size} tokens",
            "hidden states": read,
            "network": f"{layers} layer{'s' * (layers > 1)} of {size}, {parameters / 1e6:.1f} million parameters",
            "drafts": f"{len(arrays.ids)} of the target's tokens" + of_text * (self.kind == EAGLE),
        }

    @property
    def made_for(self) -> str:
        """The target, in words."""
        return self.target or "its target"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is raised in here by damaged files comes as a ``ModelFileError``."""
        try:
            yield
        except DraftreeError:
            raise
        except pickle.UnpicklingError:
            raise self._unreadable("a pickle of it holds more than tensors, which may be code: it is not run") from None
        except UNREADABLE as error:
            raise self._unreadable(first_line(error)) from None

    def _unreadable(self, why: str) -> ModelFileError:
        """What is raised where it cannot be read."""
        return ModelFileError(f"cannot read the draft head {self.folder}: {why}: copy it again, whole")

    def _check_weights(self, weights: HeadWeights) -> None:
        """Check what a network has taken of its tensors; those that it has not are warned of.

        Raises:
            ModelFileError: some are missing, or of other shapes.
        """
        if weights.missing:
            raise self._unreadable(f"it lacks {_list(weights.missing)}")
        if weights.wrong:
            raise self._unreadable(weights.wrong[0])
        if weights.left:
            message = f"draft head {self.folder} has {_list(sorted(weights.left))} more than its kind uses"
            warnings.warn(message, DraftreeWarning, stacklevel=4)

    def _check_layers(self, layers: Sequence[int], among: int) -> None:
        """Check that a target of ``among`` layers has these hidden states (``FeatureSpec``).

        Raises:
            ConfigError: it has not.
        """
        if not all(0 <= layer <= among for layer in layers):
            raise ConfigError(
                f"draft head {self.folder} reads the hidden states {list(layers)} of {self.made_for}, and the target "
                f"has {among} layers: use the target that it was made for"
            )


def find_head(folder: Path) -> HeadFolder | None:
    """The head in a folder, whole or not; None: its config is that of something else.

    Raises:
        ConfigError: it is a head of a kind that is not read.
    """
    try:
        document = json.loads(read_bytes(folder / CONFIG))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    declared = document.get("speculators_model_type")
    if declared == EAGLE3:
        return HeadFolder(folder, document, declared)
    if declared is not None:
        raise _unknown(folder, declared)
    names = document.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    for kind, pattern in _ARCHITECTURES.items():
        if pattern.fullmatch(architecture):
            return HeadFolder(folder, document, kind)
    if _OTHER_HEADS.search(architecture):
        raise _unknown(folder, architecture)
    if other := next((key for key in _OTHER_KEYS if key in document), None):
        raise _unknown(folder, other)
    if "draft_vocab_size" in document or "eagle_config" in document:
        return HeadFolder(folder, document, EAGLE3)
    layers = document.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return None
    head = HeadFolder(folder, document, EAGLE)  # EAGLE-1 has the config of its target: its tensors tell
    try:
        found = tensor_names(folder)
    except UNREADABLE:  # whoever reads it as a model says why
        return None
    if "fc.weight" not in found:
        return None
    return replace(head, kind=EAGLE3) if "layers.0.hidden_norm.weight" in found else head


def load_head(folder: Path, target: LanguageModel) -> DraftHead:
    """The head in a folder, for a target (``HeadFolder.load``).

    Raises:
        UnknownNameError: there is none.
    """
    return head_in(folder).load(target)


def head_in(folder: Path) -> HeadFolder:
    """What a folder with a head holds.

    Raises:
        UnknownNameError: there is none.
    """
    if (head := find_head(folder)) is None:
        raise UnknownNameError(f"no draft head in {folder}: give a folder that 'draftree train head' wrote")
    return head


def describe(folder: Path) -> dict[str, str]:
    """What the head in a folder is (``HeadFolder.describe``), which is one.

    Raises:
        UnknownNameError: there is none.
    """
    return head_in(folder).describe()


def _are_of(target: FeatureModel, embeddings: Array) -> bool:
    """Are these [V, H] the target's own embeddings?"""
    if embeddings.shape[1] != target.hidden_size:
        return False
    return all(
        np.array_equal(target.embedding_rows(ids), embeddings[ids])
        for ids in np.array_split(np.arange(len(embeddings)), -(-len(embeddings) // 4096))
    )


def _unknown(folder: Path, kind: object) -> ConfigError:
    return ConfigError(
        f"draft head {folder} is of kind {kind!r}: draftree reads EAGLE-1 to 3, HASS and its own (draftree train head)"
    )


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table inside a document; empty where there is none."""
    found = document.get(key)
    return found if isinstance(found, dict) else {}


def _list(names: list[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_NAMED])}{more})"
