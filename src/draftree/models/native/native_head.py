"""NativeHead: a draft head that the native engine runs beside its target, on the target's threads.

It is a model of a few layers with rows of its own. The target's hidden states stay in the cells of the target's rows:
a node comes with the cell of the token before it, or reads what the head predicted at its parent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass, field, replace

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Format
from numpy.typing import NDArray

from ...errors import CacheError, UnsupportedModelError
from ...scores import Draft, Edit, Edits, Scores, Slots, Top, allowed_tokens
from ..base import FeatureSpec, Nodes, Row, exclusive
from ..heads.head_format import Array, HeadArrays, rope_of
from .architecture import LAYER_TENSORS, PLACE, Hyperparameters
from .head_binding import LAST_STATE, MOST_FEATURES, NO_STATE, CHead, HeadDescription, LoadedHead
from .header_reader import ABSENT, Place
from .native_model import NativeModel, NativeRow, NativeRows, NativeScores

FORMAT = Format.Q8_0
"""What the matrices of a head are packed in; rows of the target's output layer stay as they are."""
_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
"""Name of an activation in transformers -> its number in the C interface."""


class HeadWeights:
    """Tensors one behind the other, as C reads them.

    Attributes:
        numbers, bytes: of all so far.

    Args:
        packed: the format of matrices that come as numbers.
    """

    def __init__(self, packed: Format = FORMAT) -> None:
        self._packed, self.pieces = packed, list[NDArray[np.uint8]]()
        self.numbers = self.bytes = 0

    def add(self, blocks: NDArray[np.uint8], kind: int, columns: int) -> Place:
        """The place of [rows, bytes] of a format, by ggml's number."""
        place = Place(self.bytes, int(kind), len(blocks), columns)
        self.pieces.append(blocks.reshape(-1))
        self.numbers, self.bytes = self.numbers + len(blocks) * columns, self.bytes + blocks.size
        return place

    def place(self, values: Array | None) -> Place:
        """The place of a vector or of a matrix; None: the head has none."""
        if values is None:
            return ABSENT
        wide = np.ascontiguousarray(values, np.float32)
        if wide.ndim == 1:
            return self.add(wide[None].view(np.uint8), Format.F32, len(wide))
        kind = self._packed if wide.shape[1] % 32 == 0 else Format.F32
        blocks = wide.view(np.uint8) if kind == Format.F32 else quants.quantize(wide, kind)
        return self.add(blocks, kind, wide.shape[1])

    def multiplied(self, rows: int, target: NativeModel) -> tuple[int, int]:
        """All numbers so far and their bytes, and those of so many rows of the target's output layer."""
        block, size = GGML_QUANT_SIZES[Format(target.loaded.output_format)]
        learned = rows * target.hidden_size
        return self.numbers + learned, self.bytes + learned // block * size

    def embeddings(self, values: Array | None) -> Place:
        """The place of a table of which a pass looks up rows; None: it has none."""
        if values is None:
            return ABSENT
        kind, dtype = (Format.F32, np.float32) if self._packed == Format.F32 else (Format.F16, np.float16)
        return self.add(np.ascontiguousarray(values, dtype).view(np.uint8), kind, values.shape[1])


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    **{f"attn_{part}.{kind}": f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"attn_output.{kind}": f"self_attn.o_proj.{kind}" for kind in ("weight", "bias")},
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
"""Tensors of a layer by their names in GGUF files; a head has no others of ``LAYER_TENSORS``."""
_NORMS_OF_HALVES = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
"""Of EAGLE-3: of the embedding, and of the state beside it."""


def describe_head(name: str, arrays: HeadArrays, target: NativeModel, packed: Format = FORMAT) -> HeadDescription:
    """A head as C reads it; the target tracks what it reads.

    Raises:
        UnsupportedModelError: the engine does not know its activation, or reads fewer hidden states, or the target's
            cannot be read.
    """
    target.track_features(arrays.features)
    config, weights, tensors = arrays.config, HeadWeights(packed), dict(arrays.tensors)
    frequencies, magnitude = rope_of(config)
    numbers = _hyperparameters(name, arrays, target, magnitude)
    head = _c_head(name, arrays, target)
    output = weights.place(tensors.get("lm_head.weight"))  # else the target's rows
    norms = [tensors[key] for key in tensors if key.startswith(("input_norm.", "fc_norm."))]
    halves = [tensors.pop(name) for name in _NORMS_OF_HALVES] if arrays.fuses_states else [None, None]
    layers = [
        [weights.place(tensors.get(f"layers.{i}.{_LAYER.get(part)}")) for part in LAYER_TENSORS]
        for i in range(config.num_hidden_layers)
    ]
    of_head = tensors.get("fc.weight"), tensors.get("fc.bias"), np.concatenate(norms) if norms else None
    head_places = [*map(weights.place, (*of_head, *halves))]
    norm = weights.place(tensors.get("norm.weight"))
    multiplied = weights.multiplied(len(arrays.ids) * head.learns, target)
    embeddings = weights.embeddings(tensors.get("embed_tokens.weight"))  # which a pass looks up only
    return HeadDescription(
        name=name,
        features=arrays.features,
        hyperparameters=numbers,
        head=head,
        rope_frequencies=frequencies,
        layer_tensors=np.array(layers, PLACE),
        model_tensors=np.array([embeddings, norm, output], PLACE),
        head_tensors=np.array(head_places, PLACE),
        weights=np.concatenate(weights.pieces),
        weight_format=packed.name,
        tokens=arrays.ids.astype(np.int32),
        parameters=sum(weight.size for weight in arrays.parameters.values()),
        multiplied=multiplied,
        fingerprint=arrays.fingerprint,
    )


def _hyperparameters(name: str, arrays: HeadArrays, target: NativeModel, magnitude: float) -> Hyperparameters:
    config = arrays.config
    if (activation := _ACTIVATIONS.get(config.hidden_act)) is None:
        raise UnsupportedModelError(
            f"the native engine does not know hidden_act {config.hidden_act!r} of {name}: use backend 'transformers', "
            "or drafter 'lookup'"
        )
    return Hyperparameters(
        vocabulary=len(arrays.ids),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        key_heads=config.kv_heads,
        head_size=config.head_size,
        feed_forward=config.intermediate_size,
        context=target.loaded.context,
        rope_size=config.head_size,
        rope_halves=True,
        rope_tables=1,
        activation=activation,
        norm_epsilon=config.rms_norm_eps,
        embedding_scale=config.embedding_scale,
        attention_scale=1 / math.sqrt(config.head_size),
        rope_magnitude=magnitude,
        logit_scale=config.logit_scale * (1.0 if "lm_head.weight" in arrays.tensors else target.loaded.logit_scale),
    )


def _c_head(name: str, arrays: HeadArrays, target: NativeModel) -> CHead:
    """What differs from a decoder-only model."""
    config, layers = arrays.config, arrays.features.layers
    if len(layers) > MOST_FEATURES:
        raise UnsupportedModelError(
            f"the native engine reads {MOST_FEATURES} hidden states for a head, and {name} reads {len(layers)}: use "
            "backend 'transformers', or drafter 'lookup'"
        )
    return CHead(
        fuses_states=arrays.fuses_states,
        features=len(layers),
        places=(c_int32 * MOST_FEATURES)(*map(target.tracked.layers.index, layers)),
        norms_features_apart=config.fc_norm,
        norms_residual=config.norm_before_residual,
        norms_state=config.norm_output,
        learns="lm_head.weight" not in arrays.tensors,
    )


_UNKNOWN = -1
"""No token."""


@dataclass(slots=True, eq=False, kw_only=True)
class NativeHeadRow(NativeRow):
    """A sequence inside a head.

    Attributes:
        last: its last committed token; ``_UNKNOWN`` in a fork of fewer tokens than there were.
        drafted: tokens of its uncommitted nodes.
    """

    last: int = 0
    drafted: list[int] = field(default_factory=list)


class NativeHeadScores(NativeScores):
    """Scores over the tokens that each row scores; of an edit only the mask counts.

    Args:
        tokens: V of the target.
        rows: of the pass; those of its slots are looked up where logits are wanted.
    """

    def __init__(self, loaded: LoadedHead, tokens: int, counts: Sequence[int], rows: Sequence[Row]) -> None:
        super().__init__(loaded, counts)
        self._outputs, self._tokens = loaded.outputs, tokens
        self._rows, self._counts = rows, counts

    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        masks = edits and [Edit(mask=edit.mask) for edit in edits]
        return super().top(slots, count, masks, draft)

    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        """[w, K] logits of the tokens that their rows score, -inf past the last."""
        self.check()
        rows = [row for row, count in zip(self._rows, self._counts, strict=True) for _ in range(count)]
        tokens = [self._outputs(rows[slot].number) for slot in slots]
        width = max(map(len, tokens), default=0)
        values = np.stack([self._loaded.logits(slot, width) for slot in slots])
        for row, ids, edit in zip(values, tokens, edits or (), strict=edits is not None):
            if edit.mask is not None:
                allowed = allowed_tokens(edit.mask, self._tokens)[ids]
                if allowed.any():
                    row[: len(ids)][~allowed] = -np.inf
        return values


class NativeHead(NativeRows[NativeHeadRow]):
    """A head that drafts for one target of the native engine (``DraftHead``).

    Attributes:
        capabilities: as the target's, whose tokens it takes.
        features: which hidden states of the target it reads.

    Args:
        description: of it (``describe_head``, ``draft_layer.StoredDraftLayer``).

    Raises:
        UnsupportedModelError: the engine does not compute the head.
    """

    loaded: LoadedHead

    def __init__(self, description: HeadDescription, target: NativeModel) -> None:
        self.loaded = LoadedHead(description, target.loaded)
        self._target, self.features, can = target, description.features, target.capabilities
        self.capabilities = replace(
            can,
            name=description.name,
            architecture=type(self).__name__,
            parameters=description.parameters,
            weights=description.multiplied[0],
            weight_bytes=description.multiplied[1],
            expert_bytes=0,
            expert_share=1.0,
            weight_format=description.weight_format,
            fingerprint=description.fingerprint,
            slot_bytes=self.loaded.token_bytes,
            row_bytes=0,
            trees="",
        )
        block, size = GGML_QUANT_SIZES[Format(target.loaded.output_format)]
        self.learned_bytes = description.head.learns * target.hidden_size // block * size  # were each a new one
        super().__init__(target._lock)

    def vocabulary_of(self, row: Row) -> NDArray[np.int64]:
        return self.loaded.outputs(self.checked(row).number).astype(np.int64)

    @exclusive
    def open(self) -> NativeHeadRow:
        return self._add(NativeHeadRow(self.loaded.open(), tracked=FeatureSpec()))

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        """A new row with the first committed tokens of another (``LanguageModel.fork``).

        Raises:
            CacheError: there are not so many.
        """
        forked = self.checked(super().fork(row, length))
        forked.drafted, forked.last = [], forked.last if forked.length == row.length else _UNKNOWN
        return forked

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self.checked(row)
        super().commit(row, path)
        if len(path):
            row.last = row.drafted[path[-1]]
        row.drafted = []

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row, drafted = self.checked(row), self.checked(row).drafted
        super().prune(row, keep, trunk)
        if trunk:
            row.last = drafted[keep[trunk - 1]]
        row.drafted = [drafted[node] for node in keep[trunk:]]

    @exclusive
    def read(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], targets: Sequence[Row]) -> Scores:
        head_rows, target_rows = [*map(self.checked, rows)], [*map(self._target.checked, targets)]
        nodes, counts, numbers, sources = list[Nodes](), list[int](), list[int](), list[int]()
        for row, text, target in zip(head_rows, texts, target_rows, strict=True):
            fed = self._begin(row, text)
            nodes.append(Nodes.chain(fed or [0], 1))
            counts.append(len(fed))
            numbers.append(target.number)
            sources += range(row.length, row.length + len(fed)) or [NO_STATE]  # before a text of no token are zeros
        scores = self._scored(head_rows, nodes, numbers, sources)
        for row, count in zip(head_rows, counts, strict=True):
            self.commit(row, range(count))
        return scores

    def _begin(self, row: NativeHeadRow, text: Sequence[int]) -> Sequence[int]:
        """Drop a row's nodes; return what it reads: new tokens, or else its last one again, which is dropped too.

        Nothing where the target's text has one token, before which there is no state: any node serves to draft from.
        """
        if not text and row.length:
            if row.last == _UNKNOWN:
                raise CacheError("a fork of a part of a head's row has no last token to score: let it read one")
            text = [row.last]
            row.length, row.parents, row.drafted = row.length - 1, [], []  # an interrupt is raised when C has returned
            self.loaded.cut(row.number, row.length)
        else:
            self.commit(row, [])
        if text:
            self.loaded.learn(row.number, text)
        return text

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """Append uncommitted nodes to each row in one pass (``LanguageModel.extend``); each comes after its parent.

        Nodes of an empty row read zeros: passes are measured so.
        """
        opened, sources = [*map(self.checked, rows)], list[int]()
        for row, new in zip(opened, nodes, strict=True):
            sources += [LAST_STATE if row.length else NO_STATE] * len(new.tokens)
        return self._scored(opened, nodes, [0] * len(opened), sources)

    def _scored(
        self, rows: Sequence[NativeHeadRow], nodes: Sequence[Nodes], targets: Sequence[int], sources: Sequence[int]
    ) -> Scores:
        scored = self._pass(rows, nodes, targets, sources)
        for row, new in zip(rows, nodes, strict=True):
            row.drafted += new.tokens
        return NativeHeadScores(self.loaded, self.capabilities.vocab_size, scored, rows)
