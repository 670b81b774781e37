"""HFModel with ropes that transformers settles anew in each forward: all of a cache is rotated by one set of factors.

The oracle is the stock model's own forward over one whole text that is longer than the length that was trained on: it
takes the long set for all positions, so that it has the logits of every prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftree.models.base import Nodes, prefill
from draftree.models.huggingface.hf_model import HFModel

from ..families import WINDOW, long_rope
from ..references import extended, prefilled
from ..tiny import MAX_LENGTH, VOCAB, causal_logits
from .trees import assert_close, random_ids

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LONG: dict[str, Any] = {**(long_rope(trained=WINDOW).rope_parameters or {})}
_PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LONG: Mapping[str, Callable[[], PretrainedConfig]] = {
    "phi3": lambda: long_rope(trained=WINDOW),
    "phimoe": lambda: PhimoeConfig(
        **_SIZES, num_local_experts=2, rope_parameters=_LONG | {"short_mscale": 1.0, "long_mscale": 1.4}
    ),
    "a rope for each kind of layer": lambda: Gemma3TextConfig(
        **_SIZES,
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": _LONG, "sliding_attention": _PLAIN},
    ),
}
"""Models whose rope is another beyond ``WINDOW`` tokens."""
CHANGING: Mapping[str, Callable[[], PretrainedConfig]] = {
    **LONG,
    "dynamic": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
}
"""And one whose rope changes beyond its context."""
every = pytest.mark.parametrize("kind", CHANGING)
TEXT = random_ids(Random(0), 3 * WINDOW)


def _stock(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds: Any = AutoModelForCausalLM
        model: PreTrainedModel = kinds.from_config(CHANGING[kind](), attn_implementation="eager")
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.3)
    model.eval()
    return model


def _last(model: HFModel, chunks: Sequence[int]) -> Tensor:
    """[V] logits behind the text that is read in these chunks."""
    row, at = model.open(), 0
    for size in chunks:
        logits = extended(model, [row], [Nodes.chain(TEXT[at : at + size])])[0]
        model.commit(row, range(size))
        at += size
    model.close(row)
    return logits[-1]


@pytest.mark.parametrize("kind", LONG)
def test_the_stock_forward_of_a_short_text_takes_other_factors(kind: str) -> None:
    """What every other test here stands on."""
    model = _stock(kind)
    short, whole = causal_logits(model, TEXT[:WINDOW]), causal_logits(model, TEXT)
    assert (short[-1] - whole[WINDOW - 1]).abs().max() > 0.05


@every
@pytest.mark.parametrize(
    "chunks", [[len(TEXT)], [WINDOW - 2, 2 * WINDOW + 2], [WINDOW, 2 * WINDOW], [1] * len(TEXT)], ids=str
)
def test_a_text_has_the_same_logits_however_it_is_read(kind: str, chunks: Sequence[int]) -> None:
    """Keys of a first chunk kept the short factors, and queries of the next ones had the long ones."""
    assert_close(_last(HFModel(_stock(kind)), chunks), causal_logits(_stock(kind), TEXT)[-1])


@every
def test_a_prefix_has_the_logits_that_it_has_in_a_longer_text(kind: str) -> None:
    model, whole = HFModel(_stock(kind)), causal_logits(_stock(kind), TEXT)
    for length in (1, WINDOW - 1, WINDOW, WINDOW + 1):
        assert_close(prefilled(model, TEXT[:length])[1], whole[length - 1])


@every
def test_a_row_has_the_same_logits_beside_a_longer_one(kind: str) -> None:
    """One row beyond the border gave the long factors to all rows of its pass."""
    model, whole = HFModel(_stock(kind)), causal_logits(_stock(kind), TEXT)
    lengths = [3, len(TEXT) - 2]
    rows = [prefill(model, TEXT[:length]) for length in lengths]
    logits = extended(model, rows, [Nodes.chain(TEXT[length : length + 2]) for length in lengths])
    for row, length in enumerate(lengths):
        assert_close(logits[row], whole[length : length + 2])


@every
def test_nodes_of_a_tree_across_the_border_have_the_logits_of_chains(kind: str) -> None:
    model, whole = HFModel(_stock(kind)), causal_logits(_stock(kind), TEXT)
    start, other = WINDOW - 3, (TEXT[WINDOW - 3] + 1) % VOCAB
    row = prefill(model, TEXT[:start])
    deep = TEXT[start : start + 6]
    logits = extended(model, [row], [Nodes([*deep, other], [*range(-1, 5), -1])])[0]
    assert_close(logits[:6], whole[start : start + 6])
    branch = causal_logits(_stock(kind), [*TEXT[:start], other, *TEXT[start:]])[start]
    assert_close(logits[6], branch)
    model.commit(row, range(4))
    then = extended(model, [row], [Nodes.chain(TEXT[start + 4 : start + 6])])[0]
    assert_close(then, whole[start + 4 : start + 6])


@every
def test_passes_of_few_shapes_are_the_same(kind: str) -> None:
    model = HFModel(_stock(kind), runner="graph")
    assert_close(_last(model, [1] * len(TEXT)), causal_logits(_stock(kind), TEXT)[-1])


@pytest.mark.parametrize("kind", LONG)
def test_the_stock_model_computes_as_before(kind: str) -> None:
    """Its owner may train it or generate with it, and its copies."""
    model = _stock(kind)
    short, whole = causal_logits(model, TEXT[:WINDOW]), causal_logits(model, TEXT)
    loaded = HFModel(model)
    _last(loaded, [WINDOW, 2 * WINDOW])
    for used in (model, deepcopy(model)):
        assert_close(causal_logits(used, TEXT[:WINDOW]), short)
        assert_close(causal_logits(used, TEXT), whole)


@pytest.mark.parametrize("kind", LONG)
def test_models_on_the_same_weights_and_on_copies_of_them_agree(kind: str) -> None:
    model, whole = _stock(kind), causal_logits(_stock(kind), TEXT)
    first, second = HFModel(model), HFModel(model)
    for loaded in (first, second, first.twin(), HFModel(deepcopy(model))):
        assert_close(_last(loaded, [WINDOW, 2 * WINDOW]), whole[-1])


def test_a_model_that_takes_no_longer_texts_keeps_the_short_factors() -> None:
    """A chunk of attention keeps texts within the length that was trained on."""
    stock = _stock("phi3")
    stock.config.attention_chunk_size = WINDOW
    model = HFModel(stock)
    assert model.capabilities.max_length == WINDOW
    short = causal_logits(_stock("phi3"), TEXT[:WINDOW])
    assert_close(prefilled(model, TEXT[:WINDOW])[1], short[-1])


def test_a_dynamic_rope_is_the_same_up_to_the_whole_context() -> None:
    text = random_ids(Random(1), MAX_LENGTH)
    model, whole = HFModel(_stock("dynamic")), causal_logits(_stock("dynamic"), text)
    row = prefill(model, text[:-1])
    assert_close(extended(model, [row], [Nodes.chain(text[-1:])])[0][0], whole[-1])
