"""HFModel: a stock Hugging Face causal model behind the ``LanguageModel`` seam.

No modeling code is forked: a tree pass is the model's own forward with a 4-D mask (each node sees its ancestors), depth
positions and a ``TreeCache``. Knows nothing of drafts, sampling or text (the tokenizer is only carried along).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from ...config import typed
from ...errors import CacheError, DraftreeError, NoTreesError, first_line
from ...scores import LastScores, Scores
from ...text.encoding import Tokenizer
from ...text.harmony import last_tokens
from ..base import (
    DRAFTED,
    FINAL_STATE,
    PROMPT,
    Capabilities,
    FeatureSpec,
    LanguageModel,
    Nodes,
    Row,
    decoded,
    prefill_scored,
)
from ..protocols import LayerSizes
from . import attention, inspection, long_rope, norms
from .cache import FeatureRow, Rows, TreeCache, bytes_of, feature_row, long_row
from .masks import Windows, find_windows
from .pass_inputs import POSITION
from .runner import GraphRunner, Pass, Runner, StockRunner, chosen_runner, exclusive, runner_of
from .torch_scores import scores_of


@dataclass(slots=True)
class SharedState:
    """What all ``HFModel`` on the same weights share.

    Attributes:
        lock: held by the thread that is inside a method of any of them.
        settled: ``windows`` have been looked for, and LongRoPE is settled.
        windows: of its sliding layers; None: none that passes have masks for.
        tested: attention with which the self-test was passed.
        hidden: reads hidden states.
    """

    lock: RLock = field(default_factory=RLock)
    settled: bool = False
    windows: Windows | None = None
    tested: str | None = None
    hidden: inspection.HiddenStates = field(default_factory=inspection.HiddenStates)


_SHARED: WeakKeyDictionary[PreTrainedModel, SharedState] = WeakKeyDictionary()


class HFModel(LanguageModel):
    """A Hugging Face causal model as a ``LanguageModel``.

    One thread at a time can be inside it, or inside another on the same weights.

    Attributes:
        capabilities: what was probed at load.
        tokenizer: the model's tokenizer, or None for a model of bare token ids.
        model: the Hugging Face model.
        layers: L, its decoder layers.
        tracked: which hidden states are kept.
        cache_bytes: by default half of what was free at load.
        pass_seconds: wall-clock seconds inside forward passes so far, prefills not counted (on an accelerator, of
            launching them).

    Args:
        runner: a name of ``draftree.models.huggingface.runner.RUNNERS``; by default CUDA graphs where there are any.
        self_test: compare tree logits with sequential ones.

    Raises:
        NoTreesError: its rows cannot branch (``linear_hf_model`` decodes without drafts).
        UnsupportedModelError: it cannot be given draft trees, for another reason.
        ConfigError: there is no such runner.
    """

    tracked = FeatureSpec()

    @typed
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        name: str | None = None,
        runner: str | None = None,
        self_test: bool = True,
    ) -> None:
        name = name or model.config.name_or_path or "model"
        inspection.refuse(model, name)
        attention.take_over(model)
        self.model = model.eval()
        self.tokenizer = tokenizer
        shared = _SHARED.setdefault(model, SharedState())
        if not shared.settled:
            with shared.lock:
                shared.windows = find_windows(model)
        can = inspection.capabilities(model, name, has_windows=shared.windows is not None)
        if not shared.settled:
            long_rope.settle(model, can.max_length)
            shared.settled = True
        ends = can.eos_ids | (frozenset() if tokenizer is None else last_tokens(tokenizer.get_vocab()))
        self.capabilities: Capabilities = replace(can, runner=chosen_runner(runner, can.device), eos_ids=ends)
        self._lock, self._hidden = shared.lock, shared.hidden
        if can.device.startswith("cuda"):
            norms.fuse(model)
        self.layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        self._runner: Runner = runner_of(self.capabilities.runner, StockRunner(model, shared.hidden, shared.windows))
        self.cache_bytes = inspection.free_bytes(self.capabilities.device) // 2
        self._start()
        if self_test and shared.tested != self.capabilities.attention:
            try:
                with shared.lock, shared.windows.narrowed() if shared.windows else nullcontext():
                    inspection.self_test(self)
                    self._check_causal()
            except (DraftreeError, torch.OutOfMemoryError):
                raise
            except inspection.FAILURES as error:
                raised = f"{type(error).__name__}: {first_line(error)}"
                why = f"{type(model).__name__} fails the tree self-test with {raised}"
                raise NoTreesError(name, inspection.TREES, why, inspection.OWN) from error
            shared.tested = self.capabilities.attention
            self._start(self.cache)

    @torch.inference_mode()
    def _check_causal(self) -> None:
        """Compare one-token decoding with the model's own causal forward.

        That is given nothing but tokens, so that it catches a model whose positions do not start at 0 or that sees
        tokens to come.
        """
        can = self.capabilities
        prompt, then = [t % can.vocab_size for t in PROMPT], [t % can.vocab_size for t in DRAFTED[:2]]
        row, scores = prefill_scored(self, prompt)
        logits = np.concatenate([scores.logits([0]), decoded(self, row, then)])
        self.close(row)
        ids = torch.tensor([[*prompt, *then]], device=can.device)
        with long_rope.one_set():
            causal = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        inspection.check_equal(self, [(logits, causal.float().cpu().numpy())], "sequential and causal")

    def _start(self, former: TreeCache | None = None) -> None:
        self._rows: Rows[FeatureRow] = Rows(former, self._most_slots)
        self._scores = LastScores()
        self.pass_seconds = 0.0

    def twin(self) -> HFModel:
        """A second model on the same weights with rows and a cache of its own."""
        model = copy(self)
        model._start(self.cache)
        return model

    @property
    def cache(self) -> TreeCache:
        """Keys and values of all open rows."""
        return self._rows.cache

    @exclusive
    def track_features(self, wanted: FeatureSpec = FINAL_STATE) -> None:
        """Keep these hidden states of all tokens from now on (``FeatureModel.track_features``).

        Raises:
            UnsupportedModelError: they cannot be read, or its logits are not its output layer's of the final ones.
        """
        self._hidden.add(wanted, self.model, self.capabilities.name)
        self.tracked |= wanted

    @property
    def passes(self) -> str:
        """How its passes are made, in words: why some, or all, are no CUDA graphs."""
        if isinstance(self._runner, GraphRunner):
            return self._runner.uncaptured or "CUDA graphs"
        return "the model's own forward"

    @property
    def rows(self) -> int:
        """How many rows are open."""
        return len(self._rows)

    @property
    def hidden_size(self) -> int:
        """H of its hidden states."""
        return self._embeddings.shape[1]

    @property
    def layer_sizes(self) -> LayerSizes:
        return inspection.layer_sizes(self.model.config.get_text_config(decoder=True))[0]

    def hidden_states(self, row: Row) -> Tensor:
        return feature_row(row).last_features()

    @property
    def _embeddings(self) -> Tensor:
        """[V, H] of all tokens."""
        return self.model.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    def embeddings(self, ids: Tensor) -> Tensor:
        return embedding(ids, self._embeddings)

    def embedding_rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = self.embeddings(torch.from_numpy(ids).to(self.capabilities.device))
        return rows.float().cpu().numpy()

    def output_rows(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        layer: Any = self.model.get_output_embeddings()
        return layer.weight.detach()[ids], None if layer.bias is None else layer.bias.detach()[ids]

    @exclusive
    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens at once: while none is open, exactly for these.

        Where that takes more than ``cache_bytes``, what closed rows have left behind is given up.
        """
        rows, tokens = max(rows, len(self._rows)), max(tokens, self._rows.longest)
        at, slots = self.cache.placement, self._runner.slots(tokens)
        if not self._rows and (rows > at.rows or slots > at.slots):
            self.free_cache()
        self.cache.reserve(rows, slots, gives_up=True)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Rows of so many tokens can be open together, within ``cache_bytes``."""
        slots = self._runner.slots(max(lengths, default=0))
        return bytes_of([slots] * len(lengths), self.capabilities.slot_bytes) <= self.cache_bytes

    def _most_slots(self) -> int:
        """Of all rows together, within ``cache_bytes``."""
        return self.cache_bytes // self.capabilities.slot_bytes

    @exclusive
    def free_cache(self) -> None:
        """Free the keys and values of rows that were closed; none may be open."""
        self._rows.cache = TreeCache(self.cache, self._most_slots)

    def checked(self, row: Row) -> FeatureRow:
        """``row``, if it is open and this model's; else a ``CacheError``."""
        return self._rows.checked(row)

    def row_at(self, number: int) -> Row:
        """The open row with this ``Row.number``."""
        return self._rows.at(number)

    @exclusive
    def open(self) -> Row:
        row = FeatureRow()
        self._rows.add(row)
        return row

    @exclusive
    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        opened = [self._rows.checked(row) for row in rows]
        self._scores.expire()
        every = range(len(opened))
        if len(opened) > 1 and not attention.takes_packed_rows(self.model):
            passes = [[b] for b in every]
        elif (alone := long_row([len(new.tokens) for new in nodes])) is not None:
            passes = [[b for b in every if b != alone], [alone]]
        else:
            passes = [[*every]]
        results = [
            self._pass([opened[b] for b in group], [nodes[b] for b in group], len(passes) > 1) for group in passes
        ]
        logits: dict[int, Tensor] = {}
        for group, (grown, states, scored) in zip(passes, results, strict=True):
            logits.update(zip(group, scored.split([nodes[b].scored for b in group]), strict=True))
            for b, parents in zip(group, grown, strict=True):
                opened[b].parents = parents
            if states is not None:
                for b, part in zip(group, states.split([len(nodes[b].tokens) for b in group]), strict=True):
                    opened[b].add_features(part, self.tracked)
        whole = results[0][2] if len(results) == 1 else torch.cat([logits[b] for b in every])
        return self._scores.keep(scores_of(whole, [new.scored for new in nodes]))

    def _pass(
        self, rows: Sequence[FeatureRow], nodes: Sequence[Nodes], another: bool
    ) -> tuple[Sequence[list[int]], Tensor | None, Tensor]:
        """Parents of the uncommitted nodes of each row then, hidden states of the new ones, logits of the wanted ones.

        Args:
            another: pass comes before the logits are read.

        Raises:
            CacheError: as ``extend``.
        """
        can = self.capabilities
        grown, inputs = self._rows.place(rows, nodes)
        if inputs.count and (last := int(inputs.table[POSITION].max())) >= can.max_length:
            raise CacheError(
                f"a node at position {last} is beyond the {can.max_length} tokens of {can.name}: draft less deep"
            )
        began = time.perf_counter()
        result = self._runner.forward(Pass(inputs, self.tracked), self.cache)
        if not inputs.is_causal:
            self.pass_seconds += time.perf_counter() - began
        states = None if result.states is None else result.states.clone()
        return grown, states, result.logits.clone() if another else result.logits

    @exclusive
    def commit(self, row: Row, path: Sequence[int]) -> None:
        row = self._rows.checked(row)
        row.keep_features(path, len(path), self._rows.commit(row, path))

    @exclusive
    def prune(self, row: Row, keep: Sequence[int], trunk: int) -> None:
        row = self._rows.checked(row)
        row.keep_features(keep, trunk, self._rows.prune(row, keep, trunk))

    @exclusive
    def fork(self, row: Row, length: int | None = None) -> Row:
        source, length = self._rows.checked(row), row.prefix(length)
        forked = replace(source, length=length, parents=[], features=source.first_features(length), pending=None)
        self._rows.fork(source, forked)
        return forked

    @torch.inference_mode()
    def close(self, row: Row) -> None:
        """Forget a row (``LanguageModel.close``); another thread's pass is waited for, so that no row stays open."""
        with self._lock:
            self._rows.close(self._rows.checked(row))
