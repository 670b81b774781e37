"""Descriptions of GGUF files: what the engine computes from them is what transformers computes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from draftree.errors import ModelFileError, UnsupportedModelError
from draftree.models.gguf.gguf_checks import check
from draftree.models.gguf.gguf_file import GGUFHeader
from draftree.models.gguf.metadata import Metadata, Value
from draftree.models.native.architecture import describe
from draftree.models.native.binding import LoadedModel
from draftree.models.native.header_reader import FORMATS
from tests import tiny_gguf
from tests.models.native.conftest import Dense
from tests.models.native.reference import Reference
from tests.models.native.stock import CONFIGS, stock_model, write_gguf


@pytest.mark.parametrize("name", CONFIGS)
def test_the_described_model_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Texts are longer than windows, and than the context before scaling."""
    model = stock_model(name)
    path = write_gguf(model, tmp_path / "model.gguf")
    tokens = np.random.default_rng(1).integers(0, 96, 100).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].double().numpy()
    found = Reference(path, describe(check(path))).logits(tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def _write(path: Path, **more: Any) -> GGUFHeader:
    return check(tiny_gguf.write(path / "model.gguf", **more))


def _changed(header: GGUFHeader, **numbers: Value) -> GGUFHeader:
    """A header with other numbers, by the ends of their keys ("rope.freq_base" as rope__freq_base)."""
    changes = {f"{header.architecture}.{key.replace('__', '.')}": value for key, value in numbers.items()}
    return replace(header, metadata=Metadata(header.path, {**header.metadata.stored, **changes}))


@pytest.mark.parametrize("kind", sorted(FORMATS, key=str))
def test_weights_of_every_format_are_described(kind: int, tmp_path: Path) -> None:
    name = GGMLQuantizationType(kind).name
    description = describe(_write(tmp_path, hidden=256, heads=8, weights=name))
    assert set(description.layer_tensors["format"][:, [1, 2, 3, 9, 12, 13, 14]].flat) == {kind}
    weights = Reference(tmp_path / "model.gguf", description).layers[0]["attn_q.weight"].values
    assert 0.1 < weights.std() < 0.9


@pytest.mark.parametrize("architecture", ["mamba", "t5", "cohere2", "qwen2moe"])
def test_other_architectures_are_llama_cpps(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=architecture):
        describe(_write(tmp_path, architecture=architecture))


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping"),
        ({"attention__head_count_kv": np.array([2, 1])}, "llama.attention.head_count_kv"),
        ({"attention__key_length": 24, "rope__dimension_count": 24}, "24"),
        ({"attention__key_length": 512}, "512"),
        ({"attention__value_length": 64}, "heads"),
        ({"rope__scaling__type": "dynamic", "rope__scaling__factor": 2.0}, "dynamic"),
    ],
)
def test_what_the_engine_does_not_compute_is_llama_cpps(numbers: dict[str, Value], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        describe(_changed(_write(tmp_path), **numbers))


@pytest.mark.parametrize(
    ("name", "numbers", "named"),
    [
        ("granite", {"rope__scaling__finetuned": False}, "rope"),
        ("granite-4", {"expert_count": 4}, "experts"),
        ("glm4", {"rope__dimension_sections": np.array([8, 12, 12, 0])}, "glm4.rope.dimension_sections"),
        ("glm4", {"nextn_predict_layers": 1}, "glm4.nextn_predict_layers"),
        ("olmo2", {"residual_scale": 0.5}, "olmo2.residual_scale"),
        ("qwen3", {"attention__temperature_scale": 0.1}, "qwen3.attention.temperature_scale"),
        ("mistral3", {"rope__scaling__yarn_attn_factor": 1.2}, "1.2"),
        ("mistral3", {"expert_count": 4}, "mistral3.expert_count"),
        ("qwen3moe", {"expert_weights_scale": 2.0}, "qwen3moe.expert_weights_scale"),
        ("qwen3moe", {"expert_shared_feed_forward_length": 64}, "qwen3moe.expert_shared_feed_forward_length"),
        ("qwen3moe", {"expert_feed_forward_length": 48}, "48"),
    ],
    ids=str,
)
def test_what_a_relative_computes_is_llama_cpps(
    name: str, numbers: dict[str, Value], named: str, dense: Mapping[str, Dense]
) -> None:
    header = check(dense[name].path)
    describe(header)
    with pytest.raises(UnsupportedModelError, match=named):
        describe(_changed(header, **numbers))


@pytest.mark.parametrize(("name", "bias"), [("glm4", "attn_output"), ("granite", "attn_output"), ("olmo2", "attn_q")])
def test_biases_of_what_is_normed_or_scaled_are_llama_cpps(name: str, bias: str, dense: Mapping[str, Dense]) -> None:
    """C adds them where no such model has them."""
    header = check(dense[name].path)
    norm = next(tensor for tensor in header.tensors if tensor.name == "output_norm.weight")
    more = replace(norm, name=f"blk.0.{bias}.bias")
    with pytest.raises(UnsupportedModelError, match=more.name):
        describe(replace(header, tensors=(*header.tensors, more)))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("granite", {"residual_scale": 0.0}),
        ("granite", {"embedding_scale": -1.0}),
        ("granite", {"logit_scale": 1e-20}),
        ("mistral3", {"attention__temperature_scale": -0.1}),
        ("mistral3", {"attention__temperature_scale": 1e20}),
        ("mistral3", {"rope__scaling__yarn_log_multiplier": -1.0}),
        ("mistral3", {"rope__scaling__original_context_length": 0}),
        ("olmo2", {"attention__head_count_kv": 4}),
        *(("qwen3moe", {"expert_count": count}) for count in (0, 1, 4, 9, 2**31)),
        *(("qwen3moe", {"expert_used_count": count}) for count in (0, 9, 2**31)),
        *(("qwen3moe", {"expert_feed_forward_length": size}) for size in (0, 128, 2**20)),
    ],
    ids=str,
)
def test_numbers_of_one_architecture_that_do_not_fit_are_a_damaged_file(
    name: str, numbers: dict[str, Value], dense: Mapping[str, Dense]
) -> None:
    with pytest.raises(ModelFileError):
        LoadedModel(describe(_changed(check(dense[name].path), **numbers)), 1)


def test_a_file_without_temperature_and_yarn_is_mistral_3s_too(dense: Mapping[str, Dense]) -> None:
    """As the converter writes Mistral Small 3."""
    header = check(dense["mistral3"].path)
    keys = ("rope.scaling", "attention.temperature_scale")
    stored = {key: value for key, value in header.metadata.stored.items() if not any(each in key for each in keys)}
    found = describe(replace(header, metadata=Metadata(header.path, stored)))
    assert (found.hyperparameters.temperature_length, found.hyperparameters.rope_magnitude) == (0, 1)


def test_layers_of_exaone_4_without_a_window_have_no_rope(dense: Mapping[str, Dense]) -> None:
    found = describe(check(dense["exaone4-windows"].path))
    assert found.layer_window.tolist() == [16, 16, 16, 0]
    assert [found.rope_frequencies[row].any() for row in found.layer_rope] == [True, True, True, False]


def test_a_tensor_that_nothing_reads_is_llama_cpps(tmp_path: Path) -> None:
    header = _write(tmp_path)
    gate = replace(header.tensors[0], name="blk.0.attn_gate.weight")
    with pytest.raises(UnsupportedModelError, match=gate.name):
        describe(replace(header, tensors=(*header.tensors, gate)))


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("ffn_gate_exps", (256, 256), UnsupportedModelError),
        ("ffn_gate_exps", (256, 256, 8, 1), UnsupportedModelError),
        ("ffn_up_exps", (256, 512, 4), ModelFileError),
        ("ffn_down_exps", (512, 128, 8), ModelFileError),
        ("ffn_down_exps", (256, 2**40, 8), UnsupportedModelError),
        ("ffn_gate_inp", (256, 4), ModelFileError),
        ("ffn_gate_inp", None, ModelFileError),
        ("ffn_up_exps", None, ModelFileError),
    ],
    ids=str,
)
def test_tensors_of_experts_have_one_shape(
    name: str, shape: tuple[int, ...] | None, error: type[Exception], dense: Mapping[str, Dense]
) -> None:
    header = check(dense["qwen3moe"].path)
    tensors = [replace(t, shape=shape) if shape and f".{name}." in t.name else t for t in header.tensors]
    left = tuple(tensor for tensor in tensors if shape or f".{name}." not in tensor.name)
    with pytest.raises(error, match=rf"{name}|gate|up|down|router"):
        LoadedModel(describe(replace(header, tensors=left)), 1)


def test_a_format_that_is_not_read_is_llama_cpps(tmp_path: Path) -> None:
    header = _write(tmp_path)
    tensors = [replace(t, kind=GGMLQuantizationType.IQ2_S) if "ffn_up" in t.name else t for t in header.tensors]
    with pytest.raises(UnsupportedModelError, match=r"IQ2_S.*ffn_up"):
        describe(replace(header, tensors=tuple(tensors)))


@pytest.mark.parametrize(
    "numbers",
    [
        {"embedding_length": 0},
        {"embedding_length": 96},
        {"embedding_length": 2**40},
        {"block_count": 0},
        {"block_count": 3},
        {"block_count": 2**31 - 1},
        {"feed_forward_length": 128},
        {"context_length": 0},
        {"context_length": 2**31},
        {"attention__head_count": 0},
        {"attention__head_count": 8},
        {"attention__head_count_kv": 0},
        {"attention__head_count_kv": 3},
        {"attention__layer_norm_rms_epsilon": float("nan")},
        {"attention__layer_norm_rms_epsilon": -1.0},
        {"attention__layer_norm_rms_epsilon": "none"},
        {"attention__sliding_window": 8, "attention__sliding_window_pattern": np.array([True, False, True])},
        {"rope__dimension_count": 0},
        {"rope__dimension_count": 3},
        {"rope__dimension_count": 64},
        {"rope__freq_base": 0.0},
        {"rope__freq_base": 1.0},
        {"rope__scaling__factor": float("inf")},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 0},
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_a_damaged_file(numbers: dict[str, Value], tmp_path: Path) -> None:
    header = _changed(_write(tmp_path), **numbers)
    with pytest.raises(ModelFileError):
        LoadedModel(describe(header), 1)


def test_every_tensor_is_needed_in_its_shape(tmp_path: Path) -> None:
    """But for the output layer: without one it is the embeddings."""
    header = _write(tmp_path)
    for tensor in header.tensors:
        others = tuple(each for each in header.tensors if each != tensor)
        if tensor.name != "output.weight":
            with pytest.raises(ModelFileError, match=tensor.name):
                describe(replace(header, tensors=others))
        longer = replace(tensor, shape=(tensor.shape[0] + 32, *tensor.shape[1:]))
        with pytest.raises(ModelFileError, match=r" x "):
            LoadedModel(describe(replace(header, tensors=(*others, longer))), 1)


def test_rope_factors_that_are_not_positive_are_a_damaged_file(tmp_path: Path) -> None:
    model = stock_model("llama3")
    path = write_gguf(model, tmp_path / "model.gguf")
    (factors,) = (tensor for tensor in check(path).tensors if tensor.name == "rope_freqs.weight")
    data = bytearray(path.read_bytes())
    data[factors.begin : factors.begin + 4] = np.float32(-1).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="rope_freqs"):
        describe(check(path))
