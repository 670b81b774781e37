"""NativeModel: a GGUF file, run by our own passes on a CPU, behind the ``LanguageModel`` seam.

The bits of a node's scores depend on its path alone: not on the tree around it, on other rows, on how a prompt was cut,
on the number of threads or on the instruction set. So draft trees need no self-test here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...config import Count, typed
from ...errors import CacheError, ModelFileError, NotNativeError, UnsupportedModelError
from ...progress import loading_reporter
from ...sampling.warping import Warping
from ...scores import EXPIRED, Draft, Edits, Scores, Slots, Top, edited
from ..base import (
    FINAL,
    FINAL_STATE,
    Capabilities,
    FeatureSpec,
    LanguageModel,
    Nodes,
    OpenRows,
    Row,
    exclusive,
)
from ..cpu_threads import default_threads
from ..gguf.gguf_checks import capabilities, check_header, check_weights
from ..gguf.gguf_file import GGUFHeader
from ..memory import cache_full, free_memory
from ..protocols import LayerSizes
from .architecture import Description, describe
from .binding import (
    EMBEDDING,
    OUTPUT,
    PAGE,
    VERSION,
    WARPING,
    CEdits,
    IntsLike,
    Loaded,
    LoadedModel,
    open_library,
    tiers,
)
from .delta_nets import RECORDED_END
from .vocabulary import read_vocabulary

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class NativeRow(Row):
    """A sequence inside a model, whose cells keep hidden states.

    Attributes:
        tracked: which: those that the model tracked when it, or the row that it was forked from, was opened.
    """

    tracked: FeatureSpec

    def has_features(self, wanted: FeatureSpec) -> bool:
        return self.tracked.covers(wanted)


R = TypeVar("R", bound=NativeRow)
T = TypeVar("T")


class NativeRows(OpenRows[R], Generic[R]):
    """What models and heads of the native engine have in common.

    Attributes:
        loaded: what C has loaded of it.
        learned_bytes: most that a token of a row takes beside its page.
    """

    loaded: Loaded
    learned_bytes: int = 0

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``.

        A row has a page more than its tokens fill: it keeps the one behind them for the next tree.
        """
        loaded, pages = self.loaded, sum(map(_pages, lengths)) + len(lengths)
        beside = len(lengths) * loaded.row_bytes + sum(lengths) * self.learned_bytes
        return pages * loaded.page_bytes + beside <= self.cache_bytes

    def _add(self, row: R) -> R:
        self._open[row.number] = row
        return row

    def _pass(self, rows: Sequence[R], nodes: Sequence[Nodes], *sources: IntsLike) -> list[int]:
        """One pass over new nodes of rows; of how many of each the scores are wanted."""
        numbers, counts, scored, goes_on = list[int](), list[int](), list[int](), False
        tokens, parents, wanted, records, pages = list[int](), list[int](), list[int](), 0, 0
        for row, new in zip(rows, nodes, strict=True):
            count, cells = len(new.tokens), row.length + len(row.parents)
            pages += -(-(cells + count) // PAGE) + -cells // PAGE  # ``_pages``, without its calls
            records += _records(row, new) if self.loaded.record_bytes else 0
            last = count if new.wanted is None else new.wanted
            numbers.append(row.number)
            counts.append(count)
            scored.append(last)
            tokens += new.tokens
            parents += new.parents
            wanted += [0] * (count - last) + [1] * last
            goes_on |= row.length > 0
        self._check_room(pages, sum(map(bool, counts)), records)
        for row, new in zip(rows, nodes, strict=True):
            row.parents += new.parents
        began = time.perf_counter()
        try:
            self.loaded.extend(numbers, counts, tokens, parents, wanted, *sources)
        except Exception:  # not an interrupt, which is raised when C has returned, and has the nodes
            for row, new in zip(rows, nodes, strict=True):
                del row.parents[len(row.parents) - len(new.parents) :]
            raise
        if goes_on:
            self.pass_seconds += time.perf_counter() - began
        return scored

    def _check_room(self, pages: int, rows: int = 0, records: int = 0) -> None:
        """Raise CacheFullError unless there is room for so many more pages, a state more for each of so many rows, and
        records of nodes."""
        loaded = self.loaded
        needed = loaded.cache_bytes() + pages * loaded.page_bytes + rows * loaded.state_bytes
        needed += records * loaded.record_bytes * 5 // 4  # C makes room for a quarter more
        if needed > self.cache_bytes:
            raise cache_full(
                f"up to {pages * PAGE} tokens more of {self.capabilities.name} make", needed, self.cache_bytes
            )

    @exclusive
    def lend(self, call: Callable[[], T], tokens: int) -> T:
        """Call what lets C read about so many tokens into this model's rows; scores of earlier passes end."""
        self._check_room(-(-tokens // PAGE))
        self.loaded.passes += 1
        return call()

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        number, before = self.checked(row).number, (row.length, row.parents)
        row.length, row.parents = row.length + len(path), []  # an interrupt is raised when C has returned
        try:
            self.loaded.commit(number, path)
        except Exception:
            row.length, row.parents = before
            raise

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        number, before = self.checked(row).number, (row.length, row.parents)
        row.length, row.parents = row.length + trunk, row.pruned(keep, trunk)
        try:
            self.loaded.prune(number, keep, trunk)
        except Exception:
            row.length, row.parents = before
            raise

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        row, length = self.checked(row), row.prefix(length)
        return self._add(replace(row, number=self.loaded.fork(row.number, length), length=length, parents=[]))

    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            self.loaded.close(self.checked(row).number)
            del self._open[row.number]
            row.number = -1


def _pages(tokens: int) -> int:
    """Pages that so many tokens of a row fill."""
    return -(-tokens // PAGE)


def _records(row: Row, new: Nodes) -> int:
    """Nodes of a pass whose records ``row_bytes`` does not count: a chain keeps those of its end alone."""
    count = len(new.tokens)
    if count <= RECORDED_END:
        return 0
    chain = next((i for i, parent in enumerate(new.parents) if parent != i - 1), count) if not row.parents else 0
    return min(count, count - chain + RECORDED_END) - RECORDED_END


MOST_TOP = 1024
"""Most tokens that C sorts for one slot."""


class NativeScores(Scores):
    """Scores where C has computed them.

    Args:
        loaded: the model, whose last pass they are of.
    """

    def __init__(self, loaded: Loaded, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._loaded, self._pass = loaded, loaded.passes

    def check(self) -> None:
        if self._loaded.passes != self._pass:
            raise CacheError(EXPIRED)

    def argmax(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.int32]:
        self.check()
        return self._loaded.argmax(slots, None if edits is None else _c_edits(edits))

    def top(self, slots: Slots, count: int, edits: Edits | None = None, draft: Draft | None = None) -> Top:
        self.check()
        count, changed = min(count, self._loaded.vocabulary, MOST_TOP), None if edits is None else _c_edits(edits)
        if draft is None:
            return Top(*self._loaded.top(slots, count, changed))
        keys = None if draft.keys is None else np.asarray(draft.keys, np.uint64)
        return Top(*self._loaded.top(slots, count, changed, _c_warpings(tuple(draft.warpings)), keys))

    def log_probabilities(self, slots: Slots, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.check()
        return self._loaded.log_probabilities(slots, tokens)

    def draw(
        self, slots: Slots, keys: Sequence[int], warpings: Sequence[Warping], edits: Edits | None = None
    ) -> NDArray[np.int32]:
        self.check()
        changed = None if edits is None else _c_edits(edits)
        return self._loaded.draw(slots, np.asarray(keys, np.uint64), _c_warpings(tuple(warpings)), changed)

    def logits(self, slots: Slots, edits: Edits | None = None) -> NDArray[np.float32]:
        self.check()
        rows = [self._loaded.logits(slot) for slot in slots]
        return np.stack(rows if edits is None else list(map(edited, rows, edits)))


@lru_cache(maxsize=256)
def _c_warpings(warpings: tuple[Warping, ...]) -> NDArray[np.void]:
    return np.array(list(map(tuple, warpings)), WARPING)


def _c_edits(edits: Edits) -> CEdits:
    """Edits as C reads them; each mask is handed over once."""
    masks: dict[int, NDArray[np.uint32]] = {id(mask): mask for _, mask in edits if mask is not None}
    numbers = {key: number for number, key in enumerate(masks)}
    changes = [change for change, _ in edits]
    c_edits = CEdits()
    if masks:
        c_edits.set("mask_of", np.array([-1 if mask is None else numbers[id(mask)] for _, mask in edits], np.int32))
        c_edits.set("masks", np.stack(list(masks.values())))
    if any(change is not None for change in changes):
        sizes = [0 if change is None else len(change.tokens) for change in changes]
        c_edits.set("change_starts", np.cumsum([0, *sizes], dtype=np.int32))
        for column, kind in (("tokens", np.int32), *((c, np.float32) for c in ("positive", "negative", "addend"))):
            c_edits.set(column, np.concatenate([getattr(c, column) for c in changes if c is not None]).astype(kind))
    return c_edits


def not_native(header: GGUFHeader) -> str:
    """Why the engine does not run a file; "": nothing in its header keeps it from doing so."""
    try:
        open_library()
        describe(header)
        read_vocabulary(header)
    except NotNativeError as error:
        return error.reason
    return ""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model in a file whose weights are not read.

    Attributes:
        capabilities: those of the ``NativeModel`` that it would be, but for what ends a text.
    """

    capabilities: Capabilities


def unloaded(path: Path, name: str, threads: int) -> UnloadedModel:
    """A file's header as a model (``NativeModel`` for arguments and errors)."""
    header, tier = check_header(path), tiers()[-1]
    return UnloadedModel(_capabilities(header, describe(header), name, threads, eos_ids=frozenset(), tier=tier))


def _capabilities(header: GGUFHeader, model: Description, name: str, threads: int, **given: Any) -> Capabilities:
    sizes = model.hyperparameters
    return capabilities(
        header,
        name,
        threads,
        max_length=sizes.context,
        vocab_size=sizes.vocabulary,
        engine=f"native {VERSION}",
        slot_bytes=2 * model.attending * sizes.key_heads * sizes.head_size * np.dtype(np.float16).itemsize,
        row_bytes=model.row_bytes,
        trees="exact: scores of a node depend on its path alone",
        rounding=0.0,
        **given,
    )


class NativeModel(NativeRows[NativeRow]):
    """A language model in a GGUF file, with trees, forks and several live paths a row.

    Rows of recurrent layers have their states, which no node has: C goes back to an earlier place from the nearest
    state that it keeps, and reads the tokens from there again in the row's next pass (``native/states.h``).

    Attributes:
        capabilities: what the file says.
        tokenizer: of the file.
        description: what the engine computes for the file.
        draft_layer: tensors of a layer that predicts one token more (``GGUFHeader.draft_layer``).
        threads: that share a pass.
        hidden_size, layers: H of its hidden states, and L, its decoder layers.
        layer_sizes: of these (``FeatureModel.layer_sizes``).

    Args:
        path: of the file.
        name: what the user calls it.
        threads: by default one for each core that this process may use.
        tier: the instruction set; by default the best of this CPU.

    Raises:
        ConfigError: there is no such instruction set, or the number of threads is below 1.
        ModelFileError: the file cannot be loaded.
        NotNativeError: it has something that the engine does not compute, or the engine was not built.
        RunError: it does not fit into the free memory.
    """

    loaded: LoadedModel

    @typed
    def __init__(
        self, path: str | Path, *, name: str | None = None, threads: Count | None = None, tier: str | None = None
    ) -> None:
        path, self.threads = Path(path), threads or default_threads()
        header = check_header(path)
        self.description, self.draft_layer = describe(header), header.draft_layer
        sizes = self.description.hyperparameters
        self.hidden_size, self.layers = sizes.hidden, sizes.layers
        wide = sizes.feed_forward * max(1, sizes.experts_used)
        self.layer_sizes = LayerSizes(sizes.query_heads, sizes.key_heads, sizes.head_size, wide)
        self.tokenizer = read_vocabulary(header)
        self.loaded = _load(header, self.description, self.threads, tier or "")
        self.capabilities = _capabilities(
            header,
            self.description,
            name or str(path),
            self.threads,
            eos_ids=self.tokenizer.eos_ids if self.tokenizer else frozenset(),
            tier=self.loaded.tier,
        )
        super().__init__(RLock())

    def twin(self) -> NativeModel:
        """A second model with rows of its own on the same weights, cache and threads.

        A pass of one ends the scores of both.
        """
        model = copy(self)
        model.forget_rows()
        return model

    @exclusive
    def share_threads(self, other: LanguageModel) -> None:
        """Run passes on another native model's threads from now on, if it has as many."""
        if isinstance(other, NativeModel) and other.threads == self.threads:
            self.loaded.share_threads(other.loaded)

    @property
    def tracked(self) -> FeatureSpec:
        """Which hidden states are kept."""
        return FeatureSpec(self.loaded.tracked)

    @exclusive
    def open(self) -> Row:
        return self._add(NativeRow(self.loaded.open(), tracked=self.tracked))

    @exclusive
    def states(self, row: Row, first: int, count: int) -> NDArray[np.float32]:
        """[count, F] hidden states that a row keeps of its tokens, and behind them of its nodes, from ``first`` on."""
        row = self.checked(row)
        return self.loaded.states(row.number, first, count, len(row.tracked.layers)).reshape(count, -1)

    @exclusive
    def track_features(self, wanted: FeatureSpec = FINAL_STATE) -> None:
        """Keep these hidden states of all tokens from now on (``FeatureModel.track_features``).

        Raises:
            UnsupportedModelError: there are no such layers.
        """
        if missing := [layer for layer in wanted.layers if not FINAL <= layer <= self.layers]:
            raise UnsupportedModelError(
                f"{self.capabilities.name} has {self.layers} layers, and the head reads those of layers "
                f"{', '.join(map(str, missing))}: use a head that was made for it"
            )
        self.loaded.track((self.tracked | wanted).layers)

    def hidden_states(self, row: Row) -> Tensor:
        return _tensor(self.states(row, 0, row.length))

    def free_cache(self) -> None:
        """Nothing: new rows use the pages of closed ones (``FeatureModel.free_cache``)."""

    def embeddings(self, ids: Tensor) -> Tensor:
        """[n, H] embeddings of tokens (``FeatureModel.embeddings``), dequantized."""
        return _tensor(self.embedding_rows(ids.numpy()))

    def embedding_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.loaded.rows(EMBEDDING, ids)

    def output_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of the output layer (``FeatureModel.output_rows``), dequantized, and scaled as logits."""
        rows = self.loaded.rows(OUTPUT, ids.numpy())
        rows *= np.float32(self.loaded.logit_scale)
        return _tensor(rows), None

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        scored = self._pass([*map(self.checked, rows)], nodes)
        return NativeScores(self.loaded, scored)


def _tensor(rows: NDArray[np.float32]) -> Tensor:
    import torch

    return torch.from_numpy(rows)


def _load(header: GGUFHeader, description: Description, threads: int, tier: str) -> LoadedModel:
    """The weights; of a large file with a progress bar."""
    try:
        with loading_reporter(header.path, header.weight_bytes) as report:
            return LoadedModel(description, threads, tier, free_memory(), report)
    except ModelFileError:
        check_weights(header)  # by the names of the file's tensors
        raise
