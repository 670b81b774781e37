"""Hidden states of a row's tokens, as draft heads read them: kept by the models that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import CacheError
from ..base import FINAL_STATE, FeatureSpec, Row

if TYPE_CHECKING:
    from torch import Tensor

_PIECES = 64
"""Most pieces that a row's hidden states are kept in: a step adds one, and a copy of all is paid once in so many."""


@dataclass(slots=True, eq=False, kw_only=True)
class FeatureRow(Row):
    """A sequence inside a model that can keep hidden states.

    Attributes:
        features: hidden states of committed tokens in order, in pieces [n, F], since the model tracks them.
        pending: hidden states of the uncommitted nodes, in pieces.
        kept: which hidden states these are.
    """

    features: list[Tensor] = field(default_factory=list)
    pending: list[Tensor] = field(default_factory=list)
    kept: FeatureSpec = FINAL_STATE

    def add_features(self, states: Tensor, tracked: FeatureSpec) -> None:
        """Keep hidden states of new uncommitted nodes: the same ones that it keeps of its other tokens.

        Args:
            states: [n, F], those that the model tracks.
            tracked: which these are.
        """
        if not self.features and not self.pending:
            self.kept = tracked
        self.pending.append(feature_part(tracked, states, self.kept))

    def last_features(self, count: int | None = None, wanted: FeatureSpec | None = None) -> Tensor:
        """[count, F] hidden states of the last committed tokens, on the model's device.

        Args:
            count: of so many; None: of all that are kept.
            wanted: which; None: all that are kept.

        Raises:
            CacheError: the model does not track them, or fewer are kept.
        """
        pieces: list[Tensor] = []
        count = sum(map(len, self.features)) if count is None else count
        for piece in reversed(self.features):
            if count <= 0:
                break
            pieces.append(piece[-count:])
            count -= len(piece)
        if count > 0 or not pieces:
            raise CacheError("hidden states are missing: call the model's track_features before the row is opened")
        found = _joined(pieces[::-1])
        return found if wanted is None else feature_part(self.kept, found, wanted)

    def pending_feature(self, node: int, wanted: FeatureSpec | None = None) -> Tensor:
        """[F] hidden states of an uncommitted node (``last_features``), on the model's device.

        Raises:
            CacheError: the model does not track them, or there is no such node.
        """
        for piece in self.pending:
            if node < len(piece):
                return piece[node] if wanted is None else feature_part(self.kept, piece[node], wanted)
            node -= len(piece)
        raise CacheError("the node has no hidden state: call the model's track_features before it is fed")

    def first_features(self, length: int) -> list[Tensor]:
        """Hidden states of the first ``length`` committed tokens, in pieces, as far as they are tracked."""
        left = length - self.length + sum(map(len, self.features))
        pieces: list[Tensor] = []
        for piece in self.features:
            if left > 0:
                pieces.append(piece[:left])
            left -= len(piece)
        return pieces

    def has_features(self, wanted: FeatureSpec) -> bool:
        return not wanted or (self.kept.covers(wanted) and sum(map(len, self.features)) == self.length)

    def keep_features(self, keep: Sequence[int], trunk: int) -> None:
        """Follow a commit or a prune: of the uncommitted nodes' hidden states those of ``keep`` stay.

        The first ``trunk`` of them are those of committed tokens from now on.
        """
        pieces, self.pending = self.pending, []
        if pieces and keep:
            pending = _joined(pieces)
            kept = pending if len(keep) == len(pending) else pending[list(keep)]
            if trunk:
                self.features.append(_owned(kept[:trunk]))
                if len(self.features) > _PIECES:
                    self.features = [_joined(self.features)]
            if trunk < len(keep):
                self.pending.append(kept[trunk:])


def _joined(pieces: list[Tensor]) -> Tensor:
    """[m, F] of pieces [n, F], without a copy where there is but one."""
    import torch

    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _owned(states: Tensor) -> Tensor:
    """``states`` in memory of their own: a part of a pass's would keep all of these."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states


def feature_row(row: Row) -> FeatureRow:
    """``row``, if it can keep hidden states; else a ``CacheError``."""
    if isinstance(row, FeatureRow):
        return row
    raise CacheError("the row keeps no hidden states: use a model that can track them")


def feature_part(kept: FeatureSpec, states: Tensor, wanted: FeatureSpec) -> Tensor:
    """[..., F'] the wanted ones of [..., F] hidden states.

    Raises:
        CacheError: some of them are missing.
    """
    if wanted == kept:
        return states
    if not kept.covers(wanted):
        raise CacheError(
            f"hidden states {list(wanted.layers)} are missing, {list(kept.layers)} are kept: call the model's "
            "track_features before the row is opened"
        )
    import torch

    each = dict(zip(kept.layers, states.chunk(len(kept.layers), dim=-1), strict=True))
    return torch.cat([each[layer] for layer in wanted.layers], dim=-1)
