"""What some models can do beside ``LanguageModel``: a protocol for each ability, and the error where it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedModelError
from ..scores import Scores
from .base import FINAL_STATE, FeatureSpec, LanguageModel, Row

if TYPE_CHECKING:
    from torch import Tensor


class LayerSizes(NamedTuple):
    """Sizes of a decoder layer.

    Attributes:
        feed_forward: width of its MLP.
    """

    query_heads: int
    key_heads: int
    head_size: int
    feed_forward: int


@runtime_checkable
class FeatureModel(LanguageModel, Protocol):
    """A language model whose hidden states, embeddings and output layer can be read: what draft heads need.

    Heads learn from them too, and get layers of the model's sizes. Its logits are its output layer's of ``FINAL``
    hidden states, where these can be read.
    """

    @property
    def hidden_size(self) -> int:
        """H of its hidden states."""

    @property
    def layers(self) -> int:
        """L, its decoder layers."""

    def track_features(self, wanted: FeatureSpec = FINAL_STATE) -> None:
        """Keep these hidden states of all tokens from now on, beside those that are kept already.

        Raises:
            UnsupportedModelError: they cannot be read, or there are no such layers.
        """

    def embeddings(self, ids: Tensor) -> Tensor:
        """[n, H] embeddings of n tokens, in the model's dtype on its device; a head reads them at every pass.

        Args:
            ids: [n] int64 on the model's device, at least one.

        Raises:
            UnsupportedModelError: they cannot be read.
        """

    def embedding_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The same as arrays: what a head knows its target by."""

    def output_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, H] weights and [n] biases of the output layer for n tokens; None: it has no biases (``embeddings``)."""

    @property
    def layer_sizes(self) -> LayerSizes:
        """Of its first layer."""

    def hidden_states(self, row: Row) -> Tensor:
        """[n, F] the tracked hidden states of a row's committed tokens, on the model's device."""

    @property
    def rows(self) -> int:
        """How many rows are open."""

    def free_cache(self) -> None:
        """Free the keys and values of rows that were closed; none may be open."""


def feature_model(model: LanguageModel) -> FeatureModel:
    """``model``, if draft heads can draft for it.

    Raises:
        UnsupportedModelError: they cannot.
    """
    if isinstance(model, FeatureModel):
        return model
    raise UnsupportedModelError(
        f"{model.capabilities.name} has no hidden states that a draft head could read: use backend 'native' or "
        "'transformers', or drafter 'lookup' or a model"
    )


@runtime_checkable
class DraftHead(LanguageModel, Protocol):
    """A model that drafts from a target's hidden states and its own predictions.

    A node's state is what the head reads of the token before it: made of the target's hidden states there, or the
    head's own prediction. Scores are over a row's draft vocabulary (``vocabulary_of``), and name the target's tokens.
    """

    @property
    def features(self) -> FeatureSpec:
        """Which hidden states of the target it reads."""

    def vocabulary_of(self, row: Row) -> NDArray[np.int64]:
        """[K] the tokens of a row's logits."""

    def read(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], targets: Sequence[Row]) -> Scores:
        """Commit tokens of the target with its hidden states, in one pass; uncommitted nodes are dropped.

        Args:
            rows: open rows.
            texts: for each row its next tokens; none where its last token is scored again.
            targets: for each row the target's, which holds all tokens before the last one of its text.

        Returns:
            scores after each row's last token.
        """
