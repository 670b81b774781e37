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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
    UnsupportedModelError,
    first_line,
    listed,
    needs_extra,
)
from ..base import FINAL_STATE, FeatureSpec, LanguageModel
from ..model_files import shipped
from ..native.draft_layer import StoredDraftLayer
from ..native.native_head import NativeHead, describe_head
from ..native.native_model import NativeModel
from ..protocols import DraftHead, FeatureModel, feature_model
from .head_format import (
    CONFIG,
    UNREADABLE,
    Array,
    EagleConfig,
    HeadArrays,
    default_layers,
    is_same,
    read_sample,
    read_tensors,
    sample,
    tensor_shapes,
    vocabulary_in,
)
from .own_heads import own_heads, own_heads_for

if TYPE_CHECKING:
    from torch import Tensor

    from .eagle_model import HeadModel
    from .eagle_network import EagleNetwork

SHIPPED = "heads/*/"
"""Folders of the heads that come with draftree, in its checkout or its data packages."""
EAGLE3, EAGLE = "eagle3", "eagle"
KINDS = {EAGLE3: "EAGLE-3", EAGLE: "EAGLE-1, EAGLE-2 or HASS"}
"""Kind of head -> its name for users."""
_BASES = "(Llama|Mistral|Qwen2|Qwen3)"
_NAMES = {
    EAGLE3: re.compile(rf"eagle3|{_BASES}ForCausalLMEagle3|Eagle3{_BASES}ForCausalLM|Eagle3(Speculator|DraftModel)"),
    EAGLE: re.compile(rf"{_BASES}ForCausalLMEagle|Eagle{_BASES}ForCausalLM"),
}
_OTHER_HEADS = re.compile("eagle|medusa|hydra|dflash|dspark|speculator|mtp|draft", re.IGNORECASE)
_OTHER_KEYS = ("dflash_config", "dspark_config", "hydra_num_heads", "medusa_num_heads")
_MOST_LAYERS = 2
"""A folder whose config names no kind of head is a head only where it has at most so many layers."""
_UNUSED = re.compile(
    r"verifier_(norm|lm_head)\..*|.*rotary_emb\.inv_freq|[td]2[td]|target_sample|.*self_attn\.rotary.*"
)
_EMBEDDINGS = "embed_tokens.weight"


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
        parts = _part(self.document, "transformer_layer_config"), self.document, _part(self.document, "eagle_config")
        known = {key: value for part in parts for key, value in part.items() if value is not None}
        try:
            return TypeAdapter(EagleConfig).validate_json(json.dumps(known), strict=True)
        except (ValidationError, ConfigError) as error:
            why = first_error(error) if isinstance(error, ValidationError) else error
            raise self._unreadable(f"its {CONFIG} is wrong: {why}") from None

    def tensors(self) -> dict[str, Array]:
        """Its weights, by the names of speculators.

        Raises:
            ModelFileError: they cannot be read.
        """
        with self._reading():
            return read_tensors(self.folder)

    def features(self, layers: int | None) -> FeatureSpec:
        """Which hidden states of the target it reads.

        Args:
            layers: of the target, which counts hidden states from its end; None: it is not known.

        Raises:
            ModelFileError: its config cannot be read.
            ConfigError: they are beyond the target.
        """
        ids = self.config.eagle_aux_hidden_state_layer_ids
        if self.kind == EAGLE or not self.config.use_aux_hidden_state:
            return FINAL_STATE
        if ids is None:
            ids = default_layers(layers or 0)
        elif ids[:1] == (1,) and "speculators_model_type" not in self.document:
            ids = tuple(layer + 1 for layer in ids)  # what layers give, counted from 0: what the next ones read
        if layers is not None and not all(0 <= layer <= layers for layer in ids):
            its = self.target or "its target"
            raise ConfigError(
                f"draft head {self.folder} reads the hidden states {list(ids)} of {its}, and the target has {layers} "
                "layers: use the target that it was made for"
            )
        return FeatureSpec(ids)

    def arrays(self, layers: int | None) -> HeadArrays:
        """Its weights by what they do.

        Args:
            layers: of the target, which counts hidden states from its end; None: it is not known.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it reads layers that the target has not.
        """
        tensors, features = self.tensors(), self.features(layers)
        with self._reading():
            ids, config = vocabulary_in(tensors, self.config)
        tensors = {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}
        fuses_states = self.kind != EAGLE
        shapes = tensor_shapes(config, tensors, features, len(ids), fuses_states=fuses_states)
        self._check_tensors(tensors, shapes)
        used = {name: tensors[name] for name in shapes}
        return HeadArrays(config=config, features=features, ids=ids, fuses_states=fuses_states, tensors=used)

    def arrays_for(self, target: FeatureModel) -> HeadArrays:
        """Its weights for a target, without embeddings that are the target's own.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
            ConfigError: it was made for another target.
        """
        if mismatch := self.mismatch(target):
            raise ConfigError(
                f"draft head {self.folder} was made for {mismatch}: use the target that it was made for, train a head "
                f"with 'draftree train head {target.capabilities.name}', or use drafter 'auto'"
            )
        arrays = self.arrays(target.layers)
        tensors = dict(arrays.tensors)
        if (embeddings := tensors.pop(_EMBEDDINGS, None)) is None or not _are_of(target, embeddings):
            return arrays
        return replace(arrays, tensors=tensors)

    def network(self, arrays: HeadArrays) -> tuple[EagleNetwork, Tensor]:
        """The network of torch for its weights, and the target's ids of its vocabulary.

        Raises:
            MissingPackageError: torch is missing.
            ModelFileError: it has no such network.
        """
        with needs_extra("torch", f"draft head {self.folder}"):
            import torch

            from .eagle_network import EagleNetwork
        with self._reading():
            return EagleNetwork(arrays).eval(), torch.from_numpy(arrays.ids)

    def torch_head(self, target: FeatureModel) -> HeadModel:
        """The head by torch, which reads hidden states that are given to it (``load_head``)."""
        network, ids = self.network(self.arrays_for(target))
        from .eagle_model import HeadModel

        return HeadModel(network, ids, target, f"head {self.folder.name}")

    def mismatch(self, target: FeatureModel) -> str | None:
        """What it was made for and what the target has in place of that; None: it was made for this target.

        Of the weights only ``target_sample`` is read.

        Raises:
            ModelFileError: it cannot be read.
        """
        can, sizes = target.capabilities, (self.config.target_size, self.config.vocab_size)
        if sizes != (given := (target.hidden_size, can.vocab_size)):
            return (
                f"{self.target or 'a model'} of hidden size {sizes[0]} and {sizes[1]} tokens, and {can.name} has "
                f"hidden size {given[0]} and {given[1]} tokens"
            )
        with self._reading():
            known = read_sample(self.folder)
        if known is not None and not is_same(known, sample(target)):
            return f"{self.target or 'its target'}, and {can.name}'s embeddings are others"
        return None

    def describe(self) -> dict[str, str]:
        """What it is, in words; it is read whole.

        Raises:
            ModelFileError: it cannot be read, or is not whole.
        """
        arrays, config = self.arrays(None), self.config
        count, which = len(arrays.features.layers), ", ".join(map(str, arrays.features.layers))
        if config.eagle_aux_hidden_state_layer_ids is None:
            which = "2, half and all but 3"
        read = "the final one" if arrays.features == FINAL_STATE else f"before layers {which}"
        parameters = sum(weight.size for weight in arrays.parameters.values())
        layers, size, of_text = config.num_hidden_layers, config.hidden_size, ", and those of the text"
        return {
            "draft head": KINDS[self.kind],
            "target": f"{self.target or 'not named'}: hidden size {config.target_size}, {config.vocab_size} tokens",
            "hidden states": f"{count} of the target, {read}",
            "network": f"{layers} layer{'s' * (layers > 1)} of {size}, {parameters / 1e6:.1f} million parameters",
            "drafts": f"{len(arrays.ids)} of the target's tokens" + of_text * (self.kind == EAGLE),
        }

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
        return ModelFileError(f"cannot read the draft head {self.folder}: {why}: copy it again, whole")

    def _check_tensors(self, tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that there are tensors of these shapes; others are warned of.

        Raises:
            ModelFileError: some are missing, or of other shapes.
        """
        if missing := [name for name in shapes if name not in tensors]:
            raise self._unreadable(f"it lacks {listed(missing, 'tensor')}")
        for name, shape in shapes.items():
            if (given := tensors[name].shape) != shape:
                raise self._unreadable(f"{name} is {list(given)}, not {list(shape)}")
        if unused := tensors.keys() - shapes.keys():
            message = f"draft head {self.folder} has {listed(unused, 'tensor')} more than its kind uses"
            warnings.warn(message, DraftreeWarning, stacklevel=4)


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
    declared, names = document.get("speculators_model_type"), document.get("architectures")
    named = str(declared or (names[0] if isinstance(names, list) and names else ""))
    for kind, pattern in _NAMES.items():
        if pattern.fullmatch(named):
            return HeadFolder(folder, document, kind)
    unread = named if declared or _OTHER_HEADS.search(named) else next(filter(document.__contains__, _OTHER_KEYS), None)
    if unread:
        raise ConfigError(
            f"draft head {folder} is of kind {unread!r}: draftree reads EAGLE-1 to 3, HASS and its own (draftree "
            "train head)"
        )
    if "draft_vocab_size" in document or "eagle_config" in document:
        return HeadFolder(folder, document, EAGLE3)
    layers = document.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return None
    try:  # EAGLE-1 has the config of its target: its tensors tell
        tensors = read_tensors(folder)
    except UNREADABLE:  # whoever reads it as a model says why
        return None
    if "fc.weight" not in tensors:
        return None
    return HeadFolder(folder, document, EAGLE3 if "layers.0.hidden_norm.weight" in tensors else EAGLE)


def load_head(folder: Path, target: LanguageModel) -> DraftHead:
    """The head in a folder, for a target: by the native engine where that runs the target, else by torch.

    Raises:
        UnknownNameError: there is none.
        ModelFileError: it cannot be read, or is not whole.
        ConfigError: it was made for another target.
        UnsupportedModelError: the target's hidden states cannot be read, or the native engine does not compute it.
        MissingPackageError: it needs torch, which is missing.
    """
    head = head_in(folder)
    if isinstance(target, NativeModel):
        return NativeHead(describe_head(f"head {folder.name}", head.arrays_for(target), target), target)
    return head.torch_head(feature_model(target))


def head_in(folder: Path) -> HeadFolder:
    """What a folder with a head holds.

    Raises:
        UnknownNameError: there is none.
    """
    if (head := find_head(folder)) is None:
        raise UnknownNameError(f"no draft head in {folder}: give a folder that 'draftree train head' wrote")
    return head


def _are_of(target: FeatureModel, embeddings: Array) -> bool:
    """Are these [V, H] the target's own embeddings?"""
    if embeddings.shape[1] != target.hidden_size:
        return False
    return all(
        np.array_equal(target.embedding_rows(ids), embeddings[ids])
        for ids in np.array_split(np.arange(len(embeddings)), -(-len(embeddings) // 4096))
    )


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table inside a document; empty where there is none."""
    part = document.get(key)
    return part if isinstance(part, dict) else {}


def head_for(target: LanguageModel) -> Path | None:
    """Where the head is that drafts for a target, by whatever name it was loaded: a folder, or the target's own file.

    The user's own for these very weights comes first; then the draft layer in the target's file; then a head that comes
    with the package; then the user's own for weights that have the same embeddings, such as another quantization. None:
    there is none. Reads no weights but the samples of those heads that have the target's sizes.

    Raises:
        ModelFileError: the package is not whole.
    """
    try:
        given, mine = feature_model(target), own_heads_for(target)
        own = [folder for folder in own_heads() if _drafts_for(folder, given, known=folder in mine)]
        if found := [folder for folder in mine if folder in own]:
            return found[0]
        if isinstance(target, NativeModel) and _has_draft_layer(target):
            return target.description.files[0]
        return shipped_head_for(given) or (own[0] if own else None)
    except (AttributeError, NotImplementedError, UnsupportedModelError):  # it has embeddings of its own kind, or none
        return None


def shipped_head_for(target: FeatureModel) -> Path | None:
    """Folder of the head that comes with the package for a target; None: none comes.

    Raises:
        ModelFileError: the package is not whole.
    """
    heads = [head for folder in shipped(SHIPPED) if (head := find_head(folder))]
    return next((head.folder for head in heads if not head.mismatch(target)), None)


def _drafts_for(folder: Path, target: FeatureModel, *, known: bool) -> bool:
    """Whether a head of the user's is for a target; one without a sample of embeddings only if that is known.

    One that cannot be read is for none.
    """
    try:
        head = find_head(folder)
        return head is not None and not head.mismatch(target) and (known or read_sample(folder) is not None)
    except (ConfigError, ModelFileError) as error:
        _warn(f"{error}; or remove it by 'draftree heads remove {folder.name}'")
        return False


def _has_draft_layer(target: NativeModel) -> bool:
    """Whether a target's file has a draft layer that can be read."""
    try:
        return bool(target.draft_layer and StoredDraftLayer(target))
    except (ModelFileError, UnsupportedModelError) as error:
        _warn(f"the draft layer of the target is left out: {error}")
        return False


@cache
def _warn(message: str) -> None:
    """Warn once: heads are looked for at several choices."""
    warnings.warn(message, DraftreeWarning, stacklevel=3)


def load_head_for(target: LanguageModel) -> DraftHead:
    """The head that drafts for a target (``head_for``).

    Raises:
        UnknownNameError: there is none.
        ModelFileError: it cannot be read, or the package is not whole.
    """
    if place := head_for(target):
        if isinstance(target, NativeModel) and place in target.description.files:
            return NativeHead(StoredDraftLayer(target).describe(), target)
        return load_head(place, target)
    name = target.capabilities.name
    raise UnknownNameError(
        f"there is no draft head for {name}: train one with 'draftree train head {name}', give the folder of one, or "
        "use drafter 'auto'"
    )
