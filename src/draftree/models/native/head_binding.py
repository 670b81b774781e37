"""Draft heads of the C interface (``native/draftree.h``) by ctypes."""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int32
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedModelError
from ..base import FeatureSpec
from .architecture import Hyperparameters
from .binding import CArchitecture, IntsLike, Loaded, LoadedModel, check, packed

LAST_STATE, NO_STATE = -1, -2
"""Sources of a state: what the head predicted at the parent, and zeros; others are cells of the target's row."""
MOST_FEATURES = 8


class CHead(Structure):
    """``DraftHeadArchitecture``."""

    _fields_ = [
        ("fuses_states", c_int32),
        ("features", c_int32),
        ("places", c_int32 * MOST_FEATURES),
        ("norms_features_apart", c_int32),
        ("norms_residual", c_int32),
        ("norms_state", c_int32),
        ("learns", c_int32),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDescription:
    """A head, as the native engine loads it.

    Attributes:
        name: what the user calls it.
        features: which hidden states of the target it reads.
        rope_frequencies: [tables, rope_size / 2] float64, radians a position.
        layer_tensors, model_tensors, head_tensors: of ``PLACE``, in ``weights``; format -1: it has none.
        weights: bytes.
        weight_format: of its matrices.
        tokens: [outputs] int32, ids of the target.
        parameters: how many it has.
        multiplied: numbers that each token is multiplied with, and the bytes that they take.
        fingerprint: of its weights.
    """

    name: str
    features: FeatureSpec
    hyperparameters: Hyperparameters
    head: CHead
    rope_frequencies: NDArray[np.float64]
    layer_tensors: NDArray[np.void]
    model_tensors: NDArray[np.void]
    head_tensors: NDArray[np.void]
    weights: NDArray[np.uint8]
    weight_format: str
    tokens: NDArray[np.int32]
    parameters: int
    multiplied: tuple[int, int]
    fingerprint: str


class LoadedHead(Loaded):
    """A draft head that C has loaded.

    Raises:
        UnsupportedModelError: the engine does not compute it.
        RunError: there is not enough memory.
    """

    def __init__(self, description: HeadDescription, target: LoadedModel) -> None:
        super().__init__(description.hyperparameters)
        self._target = target  # whose embeddings, output rows and hidden states it reads
        message = ctypes.create_string_buffer(256)
        d = description
        arrays = (d.rope_frequencies, d.layer_tensors, d.model_tensors, d.head_tensors, d.tokens)
        code = self._library.draftree_load_draft_head(
            target._pointer,
            d.weights.ctypes.data,
            len(d.weights),
            byref(CArchitecture(*astuple(d.hyperparameters))),
            ctypes.addressof(d.head),
            *(each.ctypes.data for each in arrays),
            message,
            byref(self._pointer),
        )
        if code and message.value:
            why = message.value.decode(errors="replace")
            raise UnsupportedModelError(f"{d.name}: {why}: use backend 'transformers', or drafter 'lookup'")
        check(code)
        self._weigh_tokens()

    def learn(self, row: int, tokens: IntsLike) -> None:
        """Let a row score these tokens too, which are committed to it next."""
        check(self._library.draftree_learn(self._pointer, row, packed(tokens), len(tokens)))

    def outputs(self, row: int) -> NDArray[np.int32]:
        """The tokens that a row scores."""
        count = self._library.draftree_output_count(self._pointer, row)
        check(min(count, 0))
        tokens = np.empty(count, np.int32)
        check(self._library.draftree_output_tokens(self._pointer, row, tokens.ctypes.data))
        return tokens

    def cut(self, row: int, length: int) -> None:
        """Keep the first ``length`` committed tokens of a row; drop those behind them, and its nodes."""
        check(self._library.draftree_cut(self._pointer, row, length))
