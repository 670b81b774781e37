"""Published draft heads in folders, known by their ``config.json``; and the reader of the EAGLE family.

One reader takes the names of SafeAILab and SpecForge (``midlayer.*``) and of speculators (``layers.0.*``). The
vocabulary is ``d2t``, for each of the head's tokens the distance to the target's id, or ``t2d``, which of the target's
tokens they are; without both it is the target's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...artifacts import read_bytes
from ...config import MAX_NODES
from ...errors import ConfigError
from ..abilities import FeatureModel, feature_model
from ..base import FINAL_STATE, FeatureSpec, LanguageModel
from ..huggingface.pretrained import quiet
from .dflash import ARCHITECTURE as DFLASH
from .dflash import DFlashFolder
from .eagle_model import HeadModel
from .eagle_network import EagleConfig, EagleNetwork, HeadWeights, default_layers
from .head_folder import CONFIG, UNREADABLE, HeadFolder, checked_ids, part, read_tensors, renamed, tensor_names
from .medusa import MedusaFolder, is_medusa
from .peagle import ParallelHead

EAGLE3, EAGLE, PEAGLE = "eagle3", "eagle", "peagle"
KINDS = {EAGLE3: "EAGLE-3", EAGLE: "EAGLE-1, EAGLE-2 or HASS", PEAGLE: "P-EAGLE"}
"""Of the EAGLE family, by the name of speculators."""
_READ = ("EAGLE-1 to 3", "HASS", "P-EAGLE", "Medusa", "DFlash")
_DEPTH = 8
"""Positions that a P-EAGLE head predicts whose config names no number: speculators trains so many."""

_BASES = "(Llama|Mistral|Qwen2|Qwen3)"
_ARCHITECTURES = {
    EAGLE3: re.compile(rf"{_BASES}ForCausalLMEagle3|Eagle3{_BASES}ForCausalLM|Eagle3(Speculator|DraftModel)"),
    EAGLE: re.compile(rf"{_BASES}ForCausalLMEagle|Eagle{_BASES}ForCausalLM"),
}
_OTHER_HEADS = re.compile("eagle|medusa|hydra|dflash|dspark|speculator|mtp|draft", re.IGNORECASE)
_OTHER_KEYS = ("dflash_config", "dspark_config", "hydra_num_heads")
_MOST_LAYERS = 2
"""A model with more is no head whose config says nothing of it."""
_UNUSED = re.compile(r"verifier_(norm|lm_head)\..*|.*rotary_emb\.inv_freq|t2d|d2t|layers\.\d+\.self_attn\.rotary.*")


@dataclass(frozen=True)
class PublishedHead(HeadFolder):
    """A head of the EAGLE family in a folder.

    Attributes:
        kind: a name of ``KINDS``.
    """

    kind: str

    @property
    def of_speculators(self) -> bool:
        """It has speculators' config: ids of layers are what these read."""
        return "speculators_model_type" in self.document

    @property
    def target(self) -> str | None:
        """The model that it was made for, if its config names one."""
        verifier = part(part(self.document, "speculators_config"), "verifier").get("name_or_path")
        return verifier if isinstance(verifier, str) and verifier else None

    @cached_property
    def config(self) -> EagleConfig:
        """Its sizes and flags.

        Raises:
            ModelFileError: some are missing or wrong.
        """
        flat = {
            **part(self.document, "transformer_layer_config"),
            **self.document,
            **part(self.document, "eagle_config"),
        }
        if "fc_norm" not in flat and "use_aux_norm" in flat:
            flat["fc_norm"] = flat["use_aux_norm"]
        return self.parsed(EagleConfig, flat)

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the names of speculators.

        Raises:
            ModelFileError: they cannot be read.
        """
        with self.reading():
            return renamed(read_tensors(self.folder), _new_name)

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
            raise self.unreadable(f"fc.weight is {list(shape)}: it reads no hidden states of size {size}")
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
                raise self.unreadable(f"fc.weight reads {count} hidden states, and its {CONFIG} does not say which")
            ids = default if layers is not None else (0,) * count
        elif ids[:1] == (1,) and not self.of_speculators:  # what layers give, counted from 0: what the next ones read
            ids = tuple(layer + 1 for layer in ids)
        if len(ids) != count:
            raise self.unreadable(f"fc.weight reads {count} hidden states, and its {CONFIG} names {len(ids)}")
        if layers is not None:
            self.check_layers(ids, layers)
        return FeatureSpec(ids)

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
        with self.reading():
            fuses, masked = self.kind != EAGLE, self.kind == PEAGLE
            mask = self.config.mask_token_id
            if masked and (mask is None or mask >= self.config.vocab_size):
                raise ValueError(f"its {CONFIG} names no mask_token_id among {self.config.vocab_size} tokens")
            ids, config = _vocabulary(tensors, self.config, own=fuses)
            weights = HeadWeights({name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)})
            with quiet():
                network = EagleNetwork(config, weights, features, fuses_states=fuses, has_masks=masked)
            self.check_weights(weights)
        return network.eval(), ids

    def check_target(self, given: FeatureModel) -> None:
        """Compare its sizes with a target's.

        Raises:
            ConfigError: they differ.
        """
        self.check_sizes(given, self.config.target_size, self.config.vocab_size)

    @property
    def depth(self) -> int:
        """How many positions a P-EAGLE head predicts in one pass.

        Raises:
            ModelFileError: its config gives no number.
        """
        methods = part(self.document, "speculators_config").get("proposal_methods")
        found = methods[0].get("speculative_tokens") if isinstance(methods, list) and methods else _DEPTH
        if not isinstance(found, int) or not 1 <= found <= MAX_NODES:
            raise self.unreadable(f"its {CONFIG} proposes {found!r} tokens, not 1 to {MAX_NODES}")
        return found

    def load(self, target: LanguageModel) -> HeadModel | ParallelHead:
        """The head, for a target (``HeadFolder.load``)."""
        network, ids = self.network_for(feature_model(target))
        head = HeadModel(network, ids, target, f"head {self.folder.name}")
        if network.mask_hidden is None or self.config.mask_token_id is None:
            return head
        return ParallelHead(head, self.config.mask_token_id, network.mask_hidden[0], self.depth)

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
            "drafts": f"{len(ids)} of the target's tokens" + (f", {self.depth} a pass" if self.kind == PEAGLE else ""),
        }


def published_head(folder: Path) -> HeadFolder | None:
    """The published head in a folder; None: its config is that of something else.

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
    if declared in (EAGLE3, PEAGLE):
        return PublishedHead(folder, document, declared)
    if declared is not None:
        raise _unknown(folder, declared)
    names = document.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    for kind, pattern in _ARCHITECTURES.items():
        if pattern.fullmatch(architecture):
            return PublishedHead(folder, document, kind)
    if is_medusa(document):
        return MedusaFolder(folder, document)
    if architecture == DFLASH:
        return DFlashFolder(folder, document)
    other = next((key for key in _OTHER_KEYS if key in document), None)
    if other or _OTHER_HEADS.search(architecture):
        raise _unknown(folder, architecture if _OTHER_HEADS.search(architecture) else other)
    if "draft_vocab_size" in document or "eagle_config" in document:
        return PublishedHead(folder, document, EAGLE3)
    layers = document.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        return None
    head = PublishedHead(folder, document, EAGLE)  # EAGLE-1 has the config of its target: its tensors tell
    try:
        found = {_new_name(name) for name in tensor_names(folder)}
    except UNREADABLE:  # whoever reads it as a model says why
        return None
    if "fc.weight" not in found:
        return None
    return replace(head, kind=EAGLE3) if "layers.0.hidden_norm.weight" in found else head


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
        f"draft head {folder} is of kind {kind!r}: draftree reads {', '.join(_READ)} and its own (draftree train head)"
    )


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
    checked_ids(ids, "d2t", config.vocab_size)
    if chosen is not None and not torch.equal(ids.sort().values, chosen):
        raise ValueError("d2t and t2d are of different tokens")
    return ids, replace(config, draft_vocab_size=len(ids))
