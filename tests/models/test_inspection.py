"""What is found out about a model at load: limits, refusals by name with a way out, end tokens, the self-test."""

from __future__ import annotations

import pytest
import torch

from draftree.errors import UnsupportedModelError
from draftree.models.base import prefill
from draftree.models.huggingface import inspection
from draftree.models.huggingface.hf_model import HFModel

from ..references import nbytes
from ..tiny import FAMILIES, MAX_LENGTH, VOCAB, WINDOW, WINDOWED, tiny

OWN_GENERATE = "use transformers' own generate"


@pytest.mark.parametrize(
    ("kind", "reason", "way_out"),
    [
        ("bloom", "ALiBi", OWN_GENERATE),
        ("t5", "encoder-decoder", "load a decoder-only one"),
        ("mamba", "recurrent state", OWN_GENERATE),
    ],
)
def test_a_model_that_cannot_branch_is_refused_by_name_with_a_way_out(kind: str, reason: str, way_out: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"my-{kind} .*{reason}.*: .*{way_out}"):
        HFModel(tiny(kind), name=f"my-{kind}")


def test_a_model_with_offloaded_weights_is_refused_with_a_way_out() -> None:
    model = tiny()
    model.model.layers[1].to("meta")  # as accelerate leaves what it brings in for each forward
    with pytest.raises(UnsupportedModelError, match="my-llama .*device_map"):
        HFModel(model, name="my-llama")


def test_a_model_without_a_kv_cache_is_refused() -> None:
    """openai-gpt takes positions but keeps no cache; it once ended in a TypeError inside the self-test."""
    with pytest.raises(UnsupportedModelError, match="my-gpt"):
        HFModel(tiny("openai_gpt"), name="my-gpt")


def test_a_model_whose_own_mask_counts_cache_slots_is_refused() -> None:
    """GPT-Neo cuts a causal and a local mask by slot out of a square buffer, whatever 4-D mask it is given.

    It once passed the short self-test; beyond its local window tree logits were wrong, and near the end of the context
    the buffer ran out of slots.
    """
    with pytest.raises(UnsupportedModelError, match="my-neo"):
        HFModel(tiny("gpt_neo"), name="my-neo")


def test_a_model_whose_positions_do_not_start_at_zero_is_refused() -> None:
    """RoBERTa counts from 2. Trees and chains, both counted from 0, agreed in the self-test and were both wrong."""
    with pytest.raises(UnsupportedModelError, match="my-roberta"):
        HFModel(tiny("roberta"), name="my-roberta")


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_without_4d_masks_is_refused_with_a_way_out(attention: str) -> None:
    model = tiny("llama")
    model.config._attn_implementation = attention
    with pytest.raises(UnsupportedModelError, match=rf"my-llama .*'{attention}'.*attn_implementation='sdpa'"):
        HFModel(model, name="my-llama")


def test_layers_of_unknown_types_are_refused_by_their_types() -> None:
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match=rf"my-llama .*linear_attention cannot branch: {OWN_GENERATE}"):
        HFModel(model, name="my-llama")


def test_alibi_asked_for_in_the_config_is_refused() -> None:
    model = tiny("llama")
    model.config.alibi = True
    with pytest.raises(UnsupportedModelError, match="my-llama .*ALiBi"):
        HFModel(model, name="my-llama")


def test_a_chunk_of_attention_limits_the_length_and_says_so() -> None:
    model = tiny()
    model.config.attention_chunk_size = WINDOW
    can = HFModel(model).capabilities
    assert can.max_length == WINDOW
    assert "attention_chunk_size" in can.max_length_reason


@pytest.mark.parametrize("kind", [*FAMILIES, *WINDOWED])
def test_the_context_limits_the_length(kind: str) -> None:
    assert HFModel(tiny(kind)).capabilities.max_length == MAX_LENGTH


@pytest.mark.parametrize(
    ("given", "found"),
    [(5, {5}), ([5, 9], {5, 9}), (0, {0}), (None, set())],
    ids=["one", "several", "id 0", "none"],
)
def test_eos_ids_come_from_the_generation_config(given: int | list[int] | None, found: set[int]) -> None:
    model = tiny("llama")
    assert model.generation_config is not None
    model.generation_config.eos_token_id = given
    assert HFModel(model).capabilities.eos_ids == found


def test_eos_ids_come_from_the_config_when_the_generation_config_has_none() -> None:
    model = tiny("llama")
    model.config.eos_token_id = [3, 4]
    assert HFModel(model).capabilities.eos_ids == {3, 4}


def test_capabilities_describe_the_model() -> None:
    model = tiny("llama")
    can = HFModel(model, name="my-llama").capabilities
    assert (can.name, can.architecture, can.vocab_size) == ("my-llama", "LlamaForCausalLM", VOCAB)
    assert (can.dtype, can.device) == ("float32", "cpu")
    assert can.parameters == model.num_parameters()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_self_test_passes(kind: str, attention: str) -> None:
    inspection.self_test(HFModel(tiny(kind, attention=attention), self_test=False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*FAMILIES, "mistral_window", "gemma3_window"])
def test_the_self_test_passes_in_other_precisions(kind: str, dtype: torch.dtype) -> None:
    inspection.self_test(HFModel(tiny(kind).to(dtype), self_test=False))  # type: ignore[arg-type]


def test_the_self_test_leaves_no_trace() -> None:
    model = HFModel(tiny("llama"))
    assert (model.pass_seconds, nbytes(model.cache)) == (0.0, 0)
    assert prefill(model, [1]).number == 0


def test_a_model_that_fails_the_self_test_can_be_loaded_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: HFModel) -> None:
        raise UnsupportedModelError("asked to fail")

    monkeypatch.setattr(inspection, "self_test", fail)
    with pytest.raises(UnsupportedModelError):
        HFModel(tiny("llama"))
    HFModel(tiny("llama"), self_test=False)
