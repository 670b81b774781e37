"""The draft layer of a GGUF file (multi-token prediction, MTP) as a head of the native engine.

Files of Qwen 3.5 have one behind their decoder layers: a layer with attention over all tokens, and the tensors
``nextn.*``. With e the embedding of a token and h the target's hidden state before it, after the output norm:

    x = eh_proj [enorm(e); hnorm(h)],    o = shared_head_norm(layer(x)),    logits = the target's output layer of o

Below a drafted token h is the o of its parent.
"""

from __future__ import annotations

import hashlib
from ctypes import c_int32
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..base import FINAL, FINAL_STATE
from ..gguf.metadata import damaged
from .architecture import FAMILIES, LAYER_TENSORS, PLACE
from .head_binding import MOST_FEATURES, CHead, HeadDescription
from .header_reader import ABSENT, FORMATS, Place
from .native_head import HeadWeights
from .native_model import NativeModel
from .vocabulary import GGUFTokenizer

MOST_TOKENS = 32768
"""Of a draft vocabulary: of 248,000 tokens the output layer would take longer than the layer itself."""
_PROJECTION, _NORMS = "nextn.eh_proj.weight", ("nextn.enorm.weight", "nextn.hnorm.weight")
_OUTPUT_NORM, _OUTPUT = "nextn.shared_head_norm.weight", "nextn.shared_head_head.weight"
_EMBEDDINGS = "nextn.embed_tokens.weight"


def draft_tokens(target: NativeModel, most: int) -> NDArray[np.int64]:
    """[D] ascending, the tokens that a draft layer scores beside those of a request's own text.

    They are the special tokens and, up to ``most`` in all, the lowest ids: vocabularies of byte pair encoding are in
    the order of their merges, the most frequent first.
    """
    vocabulary, tokenizer = target.capabilities.vocab_size, target.tokenizer
    special = np.array(sorted(tokenizer.added_ids if isinstance(tokenizer, GGUFTokenizer) else ()), np.int64)
    lowest = np.setdiff1d(np.arange(vocabulary), special)[: max(0, most - len(special))]
    return np.union1d(special, lowest)


class StoredDraftLayer:
    """The draft layer of a target's file, checked; its weights are read by ``describe``.

    Raises:
        ModelFileError: a tensor is missing, or is of another shape than those of the target's layers.
        UnsupportedModelError: it has something that the engine does not compute.
    """

    def __init__(self, target: NativeModel) -> None:
        self._target, self._stored, self._weights = target, dict(target.draft_layer), HeadWeights()
        self._path, self._tokens = target.description.files[0], draft_tokens(target, MOST_TOKENS)
        numbers = target.description.hyperparameters
        vocabulary, hidden = numbers.vocabulary, numbers.hidden
        self._layer = self._decoder_layer()
        projection, norms = self._place(_PROJECTION, hidden, 2 * hidden), [self._place(n, 1, hidden) for n in _NORMS]
        self._of_head, self._learns = [projection, ABSENT, ABSENT, *norms], _OUTPUT not in self._stored
        norm = self._place(_OUTPUT_NORM, 1, hidden)
        output = ABSENT if self._learns else self._place(_OUTPUT, vocabulary, hidden, self._tokens)
        self._multiplied = self._weights.multiplied(len(self._tokens) * self._learns, target)
        embeddings = self._place(_EMBEDDINGS, vocabulary, hidden) if _EMBEDDINGS in self._stored else ABSENT
        self._of_model = [embeddings, norm, output]
        if self._stored:  # it might change what the layer computes
            raise self._unsupported(f"the tensor {min(self._stored)}")

    def _decoder_layer(self) -> list[Place]:
        """The places of tensors like those of the target's last layer that attends."""
        layers, names = self._target.description.layer_tensors, dict(zip(LAYER_TENSORS, LAYER_TENSORS, strict=True))
        names["ffn_norm.weight"] = FAMILIES[self._target.capabilities.architecture].feed_forward_norm
        attending = layers[layers["format"][:, LAYER_TENSORS.index("attn_k.weight")] >= 0]
        if not len(attending):
            raise damaged(self._path, "its draft layer attends to tokens, and no other layer does")
        return [
            ABSENT if like["format"] < 0 else self._place(name, int(like["rows"]), int(like["columns"]))
            for name, like in zip(names.values(), attending[-1], strict=True)
        ]

    def _place(self, name: str, rows: int, columns: int, which: NDArray[np.int64] | None = None) -> Place:
        """The place of a tensor of a shape, or of some of its rows."""
        wanted = (columns,) if rows == 1 else (columns, rows)
        if (tensor := self._stored.pop(name, None)) is None:
            raise damaged(self._path, f"its draft layer has no {name}")
        if tensor.shape != wanted:
            raise damaged(self._path, f"{name} of its draft layer is {list(tensor.shape)}, not {list(wanted)}")
        if tensor.kind not in FORMATS:
            raise self._unsupported(f"the type {tensor.kind} of {name}")
        blocks = tensor.data.reshape(rows, -1)
        return self._weights.add(blocks if which is None else blocks[which], tensor.kind, columns)

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the native engine does not know {what} in the draft layer of {self._path}: use drafter 'lookup'"
        )

    def describe(self) -> HeadDescription:
        """The layer as C reads it; the target tracks what it reads."""
        target, can = self._target, self._target.capabilities
        target.track_features(FINAL_STATE)
        place = (c_int32 * MOST_FEATURES)(target.tracked.layers.index(FINAL))
        numbers = replace(target.description.hyperparameters, layers=1, vocabulary=len(self._tokens))
        numbers = replace(numbers, delta_key_heads=0, delta_value_heads=0, delta_key_size=0, delta_value_size=0)
        return HeadDescription(
            name=f"draft layer of {can.name}",
            features=FINAL_STATE,
            hyperparameters=numbers,
            head=CHead(features=1, places=place, norms_state=True, learns=self._learns),
            rope_frequencies=target.description.rope_frequencies,
            layer_tensors=np.array([self._layer], PLACE),
            model_tensors=np.array(self._of_model, PLACE),
            head_tensors=np.array(self._of_head, PLACE),
            weights=np.concatenate(self._weights.pieces),
            weight_format=can.weight_format,
            tokens=self._tokens.astype(np.int32),
            parameters=self._weights.numbers,
            multiplied=self._multiplied,
            fingerprint=hashlib.sha256(f"draft layer of {can.fingerprint}".encode()).hexdigest()[:16],
        )
