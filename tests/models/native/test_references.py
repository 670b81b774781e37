"""Every architecture against two references that know nothing of each other: transformers and llama.cpp.

Checkpoints have random weights; their files come from llama.cpp's own converter. Both references compute in float32,
and the engine keeps keys and values in float16: a distance counts in parts of the largest logit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from draftree.models.gguf.gguf_checks import check
from draftree.models.llama.context import Context, Token
from draftree.models.llama.library import Weights, open_library
from draftree.models.native.architecture import FAMILIES, NormOf, describe
from draftree.models.native.binding import LoadedModel
from tests.checkpoints import DENSE
from tests.models.native.conftest import Dense, quantized

Logits = NDArray[np.float32]
TOKENS: list[int] = np.random.default_rng(1).integers(0, 274, 60).tolist()
PROMPT = 50
"""Tokens that are read in one pass; the others follow one by one. Windows are of 16 tokens."""
NEAR = 1e-3
"""Most that a logit may differ by, over the largest."""


def by_transformers(dense: Dense) -> Logits:
    """[n, V] after each token of the text."""
    with torch.inference_mode():
        found: Logits = dense.model(torch.tensor([TOKENS])).logits[0].numpy()
    return found


class _InFloat32:
    """llama.cpp with keys, values and attention in float32; its flash attention rounds to float16."""

    def __init__(self) -> None:
        self._library = open_library()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def init_from_model(self, model: int, params: Any) -> Any:
        params.flash_attn_type = params.type_k = params.type_v = 0
        params.swa_full = True
        return self._library.init_from_model(model, params)


class _Loaded(NamedTuple):
    """What a context needs of a model."""

    library: _InFloat32
    pointer: int
    vocab_size: int
    types: tuple[int, int] = (0, 0)


@cache
def by_llama(path: Path) -> Logits:
    """[n, V] after each token of the text."""
    library = _InFloat32()
    pointer = library.model_load_from_file(os.fsencode(path), library.model_default_params())
    assert pointer, library.complaint()
    loaded = _Loaded(library, pointer, library.vocab_n_tokens(library.model_get_vocab(pointer)))
    context = Context(cast(Weights, loaded), 256, 1)
    passes = [range(PROMPT), *([i] for i in range(PROMPT, len(TOKENS)))]
    found = [context.decode([Token(TOKENS[i], i, [0], True) for i in each]) for each in passes]
    del context
    library.model_free(pointer)
    return np.concatenate([logits for logits in found if logits is not None])


def by_engine(path: Path, **numbers: Any) -> Logits:
    """[n, V] after each token of the text; ``numbers``: hyperparameters that differ from the file's."""
    description = describe(check(path))
    description = replace(description, hyperparameters=replace(description.hyperparameters, **numbers))
    model, found = LoadedModel(description, 1), list[Logits]()
    row = model.open()
    for first, last in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, len(TOKENS)))]:
        count = last - first
        model.extend([row], [count], TOKENS[first:last], range(-1, count - 1), np.ones(count, np.uint8))
        found += [model.logits(slot) for slot in range(count)]
        model.commit(row, range(count))
    return np.stack(found)


def distance(found: Logits, expected: Logits) -> float:
    """The largest difference, over the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


_BY_LLAMA = [name for name in DENSE if name not in ("exaone4-windows", "qwen35-attention")]
"""llama.cpp gives a window to EXAONE 4 where it has 64 layers alone, and runs no Qwen 3.5 without states."""


def test_every_architecture_has_a_checkpoint(dense: Mapping[str, Dense]) -> None:
    assert {check(each.path).architecture for each in dense.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_transformers_and_of_llama_cpp(name: str, dense: Mapping[str, Dense]) -> None:
    found, theirs = by_engine(dense[name].path), by_transformers(dense[name])
    assert 1 < np.abs(theirs).max() < 20
    assert distance(found, theirs) < NEAR
    if name in _BY_LLAMA:
        assert distance(found, by_llama(dense[name].path)) < NEAR


Edit = Callable[[gguf.GGUFReader], None]


def setting(key: str, value: float) -> Edit:
    """Write another number under a key, by its end."""

    def edit(file: gguf.GGUFReader) -> None:
        (field,) = (field for name, field in file.fields.items() if name.endswith(f".{key}"))
        field.parts[field.data[0]][0] = value

    return edit


def swapped(one: str, other: str) -> Edit:
    """Swap two tensors of layer 0."""

    def edit(file: gguf.GGUFReader) -> None:
        a, b = named(file, one), named(file, other)
        a[:], b[:] = b.copy(), a.copy()

    return edit


def named(file: gguf.GGUFReader, name: str) -> Any:
    """The numbers of a tensor of layer 0."""
    (found,) = (t.data for t in file.tensors if t.name.removesuffix(".weight") == f"blk.0.{name}")
    return found


def multiplied(name: str, factor: float) -> Edit:
    """Multiply a tensor of layer 0."""

    def edit(file: gguf.GGUFReader) -> None:
        named(file, name)[:] *= np.float32(factor)

    return edit


def experts_swapped(file: gguf.GGUFReader) -> None:
    """Let two experts of layer 0 have the last matrix of each other."""
    downs = named(file, "ffn_down_exps")
    downs[[0, 1]] = downs[[1, 0]]


def convolution_shifted(file: gguf.GGUFReader) -> None:
    """Let each token's inputs be those of the token before it."""
    taps = named(file, "ssm_conv1d")
    taps[:] = np.roll(taps, -1, axis=1)


def queries_swapped_with_keys(file: gguf.GGUFReader) -> None:
    mixed = named(file, "attn_qkv")
    mixed[:256] = np.roll(mixed[:256], 128, axis=0)


def gate_left_out(file: gguf.GGUFReader) -> None:
    """Let the gate of each head of layer 0 be one half."""
    queries = named(file, "attn_q")
    queries.reshape(-1, 2, 128, queries.shape[-1])[:, 1] = 0


_BASE, _NORMS = setting("rope.freq_base", 1400.0), swapped("attn_norm", "ffn_norm")
_POST, _HEADS = swapped("post_attention_norm", "post_ffw_norm"), swapped("attn_q_norm", "attn_k_norm")
CONTROLS: Mapping[str, list[Edit | dict[str, Any]]] = {
    "llama": [_BASE, _NORMS],
    "qwen2": [_BASE, _NORMS, swapped("attn_k", "attn_v")],
    "qwen3": [_BASE, _NORMS, _HEADS],
    "qwen3moe": [
        *(_BASE, _NORMS, _HEADS, setting("expert_used_count", 2), setting("expert_used_count", 4)),
        *(swapped("ffn_gate_exps", "ffn_up_exps"), experts_swapped),
    ],
    "gemma": [_NORMS, swapped("attn_k", "attn_v")],
    "gemma3": [_BASE, _NORMS, _POST, _HEADS, setting("attention.sliding_window", 17)],
    "phi3": [_BASE, _NORMS],
    "smollm3": [_BASE, _NORMS],
    "qwen3vl": [_BASE, _NORMS, _HEADS],
    "mistral3": [
        *(_BASE, _NORMS, setting("attention.temperature_scale", 0.4), setting("yarn_log_multiplier", 0.5)),
        *(setting("scaling.original_context_length", 20), setting("scaling.factor", 5.0)),
    ],
    "ernie4_5": [_BASE, _NORMS],
    "seed_oss": [_BASE, swapped("attn_norm", "post_attention_norm")],
    "granite": [
        *(_BASE, _NORMS, setting("attention.scale", 0.125), setting("embedding_scale", 1.0)),
        *(setting("residual_scale", 1.0), setting("logit_scale", 1.0)),
    ],
    "granite-4": [_BASE, _NORMS, setting("residual_scale", 1.0)],
    "olmo2": [_BASE, _POST, swapped("attn_q", "attn_output")],
    "olmo2-windows": [_BASE, _POST, setting("attention.sliding_window", 17), setting("scaling.factor", 5.0)],
    "qwen35": [
        *(
            swapped("attn_norm", "post_attention_norm"),
            swapped("ssm_alpha", "ssm_beta"),
            swapped("ssm_a", "ssm_dt.bias"),
        ),
        *(multiplied("ssm_a", 1.1), multiplied("attn_gate", 0), multiplied("ssm_beta", 0)),
        *(queries_swapped_with_keys, convolution_shifted),
    ],
    "qwen35-attention": [
        *(_BASE, _HEADS, swapped("attn_norm", "post_attention_norm"), setting("rope.dimension_count", 128)),
        gate_left_out,
    ],
    "glm4": [_BASE, _NORMS, _POST, setting("rope.dimension_count", 64)],
    "hunyuan-dense": [_BASE, _NORMS, {"query_key_norm": NormOf.HEADS}],
    "exaone4": [_BASE, _POST, _HEADS],
    "exaone4-windows": [_BASE, setting("attention.sliding_window", 17)],
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_file_that_differs_by_one_thing_is_far(name: str, dense: Mapping[str, Dense], tmp_path: Path) -> None:
    """Else the references would show nothing."""
    expected, path = by_transformers(dense[name]), tmp_path / "other.gguf"
    for change in CONTROLS[name]:
        path.write_bytes(dense[name].path.read_bytes())
        if callable(change):
            change(gguf.GGUFReader(path, "r+"))
        found = by_engine(path, **({} if callable(change) else change))
        assert distance(found, expected) > 3 * NEAR


def test_weights_of_experts_are_the_softmax_over_those_that_are_chosen(dense: Mapping[str, Dense]) -> None:
    """Not over all experts, as other architectures have it."""
    routers = [each for each in dense["qwen3moe"].model.modules() if hasattr(each, "norm_topk_prob")]
    assert routers
    for router in routers:
        router.norm_topk_prob = False  # type: ignore[assignment]
    others = by_transformers(dense["qwen3moe"])
    for router in routers:
        router.norm_topk_prob = True  # type: ignore[assignment]
    assert distance(by_engine(dense["qwen3moe"].path), others) > 3 * NEAR


def test_of_equal_experts_the_first_are_chosen(dense: Mapping[str, Dense], tmp_path: Path) -> None:
    """Three of eight whose logits are all 0: the fourth adds nothing, the third something."""
    path = tmp_path / "equal.gguf"
    path.write_bytes(dense["qwen3moe"].path.read_bytes())
    multiplied("ffn_gate_inp", 0)(gguf.GGUFReader(path, "r+"))
    expected = by_engine(path)
    for expert, same in ((3, True), (2, False)):
        named(gguf.GGUFReader(path, "r+"), "ffn_down_exps")[expert] = 0
        assert np.array_equal(by_engine(path), expected) == same


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", _BY_LLAMA)
def test_quantized_files_are_as_near_llama_cpp_as_its_own_are_to_float32(
    name: str, kind: Kind, dense: Mapping[str, Dense], tmp_path: Path
) -> None:
    """By the root mean square of differences: activations are rounded otherwise here than there."""
    path = quantized(dense[name].path, kind, tmp_path / "quantized.gguf")
    theirs, exact, ours = by_llama(path), by_llama(dense[name].path), by_engine(path)
    rounding, difference = (np.sqrt(np.square(theirs - other).mean()) for other in (exact, ours))
    assert difference < rounding
