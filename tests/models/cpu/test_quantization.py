"""Weight formats: which there are, that rows stay independent, whose ids they give, what is freed, kept, rejected."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

import draftree
from draftree.bench.compare import first_difference
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.errors import ConfigError, DraftreeWarning
from draftree.models.base import Nodes, prefill
from draftree.models.cost_profile import Identity
from draftree.models.cpu import quantization as module
from draftree.models.cpu.kernels import KERNELS, Stock, working
from draftree.models.cpu.quantization import WEIGHT_FORMATS, Choice, KernelLinear, Times, check, convert, summary
from draftree.models.huggingface.features import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.loading import load, load_stock
from draftree.policies.methods import METHODS

from ...pairs import drafter, generated
from ...references import extended
from ...tiny import FAMILIES, causal_logits, save_tiny, tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
HERE = [weight_format for weight_format in WEIGHT_FORMATS[1:] if working(weight_format)]
each = pytest.mark.parametrize("weight_format", HERE)


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers are faster in float16 than in int8, but it is int8 that is to be tested."""
    monkeypatch.setattr(module, "candidates", working)


def converted(weight_format: str, kind: str = "llama") -> HFModel:
    return HFModel(tiny(kind), weight_format=weight_format)


def tied(hidden: int = 8) -> Any:
    """An output layer that shares the embedding's weight, and one layer between."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(32, hidden), nn.Linear(hidden, hidden)
            self.head = nn.Linear(hidden, 32, bias=False)
            self.head.weight = self.embedding.weight

    return Model()


@each
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_linear_layer_gets_a_kernel_of_the_weight_format(weight_format: str, kind: str) -> None:
    model = converted(weight_format, kind)
    assert model.capabilities.weight_format == weight_format
    layers = [m for m in model.model.modules() if isinstance(m, KernelLinear)]
    assert layers
    assert {m.kernel.name for m in layers} <= {kernel.name for kernel in KERNELS[weight_format]}
    assert not [m for m in model.model.modules() if type(m) is nn.Linear]


@pytest.mark.parametrize("kind", FAMILIES)
def test_fp32_gives_the_ids_of_transformers(kind: str) -> None:
    want = [generated(tiny(kind), p, 40) for p in PROMPTS]
    model = converted("fp32", kind)
    params = SamplingParams(max_tokens=40)
    for made in (None, drafter("relative", model, METHODS["opt-tree"].policy(), kind)):
        for prompt, ids, got in zip(PROMPTS, want, Engine(model, made).generate(PROMPTS, params), strict=True):
            difference = first_difference(model, prompt, ids, got.token_ids, params)
            assert difference is None or difference.near_tie, difference


@each
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["lookup", "relative"])
def test_trees_give_the_ids_of_ar_decoding_in_the_same_weight_format(
    name: str, temperature: float, weight_format: str
) -> None:
    model = converted(weight_format)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    want = [Engine(model).generate([p], params)[0].token_ids for p in PROMPTS]
    trees = Engine(model, drafter(name, model, METHODS["opt-tree"].policy())).generate(PROMPTS, params)
    for prompt, ids, got in zip(PROMPTS, want, trees, strict=True):
        difference = first_difference(model, prompt, ids, got.token_ids, params)
        assert difference is None or difference.near_tie, difference


@each
def test_logits_are_close_to_those_of_float32(weight_format: str) -> None:
    want = causal_logits(tiny(), range(20))
    got = causal_logits(converted(weight_format).model, range(20))
    assert (got - want).abs().max() <= {"fp32": 1e-4, "fp16w": 0.05, "int8": 0.5}[weight_format] * want.std()


@each
def test_a_nodes_logits_do_not_depend_on_what_its_neighbours_are(weight_format: str) -> None:
    model = converted(weight_format)
    parents = [-1, -1, 0, 1]  # two branches
    rows = [prefill(model, PROMPTS[0]) for _ in range(2)]
    one, other = (
        extended(model, [row], [Nodes.of([5, neighbour, 9, neighbour], parents)])[0]
        for row, neighbour in zip(rows, (7, 33), strict=True)
    )
    assert torch.equal(one[[0, 2]], other[[0, 2]])
    assert not torch.equal(one[1], other[1])


@each
def test_a_rows_logits_do_not_depend_on_the_other_rows_of_a_batch(weight_format: str) -> None:
    model = converted(weight_format)
    rows = [prefill(model, p) for p in ([1, 2, 3], [4, 5, 6], [1, 2, 3], [9, 9, 9])]
    nodes = [Nodes.chain([7, 8])] * 2
    assert torch.equal(extended(model, rows[:2], nodes)[0], extended(model, rows[2:], nodes)[0])


def test_weights_are_freed_and_those_of_a_shared_embedding_stay() -> None:
    model = tied(hidden=64)
    model.inner = nn.Linear(64, 512)
    gone, stays = weakref.ref(model.inner.weight), weakref.ref(model.head.weight)
    assert convert(model, "fp16w") == "fp16w"
    gc.collect()
    assert gone() is None
    assert stays() is model.embedding.weight


def test_weights_that_were_concatenated_are_freed() -> None:
    model: Any = tiny("llama")
    gone = [
        weakref.ref(getattr(model.model.layers[0].self_attn, name).weight) for name in ("q_proj", "k_proj", "v_proj")
    ]
    HFModel(model, weight_format="fp16w")
    gc.collect()
    assert [weight() for weight in gone] == [None, None, None]


def test_a_shared_embedding_that_is_most_of_the_model_is_not_kept_twice_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of it would take more than the 1.3-fold memory that is allowed."""
    model = tied()
    monkeypatch.setattr(module, "choose", lambda times: Choice(list(times)[-1], (0,), 1.0))
    convert(model, "fp32")
    assert (model.head.kernel.name, model.inner.kernel.name) == ("stock", "prepacked")
    assert model.head.product.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("fastest", sorted(HERE))
def test_auto_takes_the_fastest(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [kernel.name for kernel in KERNELS[fastest]]
    cost = {k.name: 1.0 if k.name in names else 2.0 for kinds in KERNELS.values() for k in kinds}
    cost["int4"] = 0.5  # and yet no target's
    monkeypatch.setattr(
        module, "choose", lambda times: min((Choice(k, (0,), cost[k.name]) for k in times), key=lambda c: c.seconds)
    )
    assert converted("auto").capabilities.weight_format == fastest


def test_fewer_rows_are_filled_up_as_chosen_and_dropped_again() -> None:
    seen: list[int] = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.numel() // 8)
            return linear(x, weight)

    weight = torch.randn((4, 8), generator=torch.Generator().manual_seed(0))
    layer = KernelLinear(Choice(Stock, (0, 4, 4, 3), 1.0), weight, None)
    layer.product = Seeing()
    for rows, n in ((1, 1), (2, 1), (1, 3), (1, 5)):
        x = torch.randn((rows, n, 8), generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(layer(x), linear(x, weight), atol=1e-6, rtol=0)
    assert seen == [4, 4, 3, 5]


def test_without_a_kernel_it_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "working", lambda weight_format: () if weight_format == "int8" else working(weight_format)
    )
    with pytest.warns(DraftreeWarning, match="no int8 kernel .*: using fp32"):
        assert converted("int8").capabilities.weight_format == "fp32"


@pytest.mark.parametrize(
    ("weight_format", "device", "dtype", "message"),
    [
        ("int4", "cpu", torch.float32, "weight format is 'int4': choose from auto, fp32, fp16w, int8"),
        ("int8", "cuda", torch.float32, "weight format int8 needs device cpu, not cuda"),
        ("fp16w", "cuda", None, "weight format fp16w needs device cpu, not cuda"),
        ("fp16w", "cpu", torch.bfloat16, "weight format fp16w needs dtype torch.float32, not torch.bfloat16"),
    ],
)
def test_what_cannot_be_had_is_refused(
    weight_format: str, device: str, dtype: torch.dtype | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(weight_format, torch.device(device), dtype)


def test_int4_is_for_drafters() -> None:
    check("int4", torch.device("cpu"), torch.float32, drafting=True)
    with pytest.raises(ConfigError, match="weight format int4 needs device cpu, not cuda"):
        check("int4", torch.device("cuda"), torch.float32, drafting=True)
    with pytest.raises(ConfigError, match="weight format is 'int3': choose from"):
        check("int3", torch.device("cpu"), torch.float32, drafting=True)


@pytest.mark.parametrize("weight_format", ["fp32", "auto"])
@pytest.mark.parametrize(("device", "dtype"), [("cuda", None), ("cpu", torch.bfloat16)])
def test_weight_formats_that_need_nothing_special_go_with_any_device(
    weight_format: str, device: str, dtype: torch.dtype | None
) -> None:
    check(weight_format, torch.device(device), dtype)


def test_layers_in_another_dtype_stay_stock() -> None:
    model: PreTrainedModel = tiny().to(torch.bfloat16)  # type: ignore[arg-type]
    assert HFModel(model, weight_format="fp32").capabilities.weight_format == "stock"


def test_a_converted_model_is_known_again_and_not_converted_twice() -> None:
    first = converted("fp16w")
    again = HFModel(first.model, name="again")
    assert (again.capabilities.weight_format, again.capabilities.name) == ("fp16w", "again")
    assert again.capabilities.parameters == first.capabilities.parameters == tiny().num_parameters()
    assert first.twin().capabilities == first.capabilities
    with pytest.raises(ConfigError, match="has weight format fp16w .*: load it again"):
        HFModel(first.model, weight_format="int8")


HOSTS = [None, *HERE]


@pytest.mark.parametrize("weight_format", ["fp16w", "int8", "int4"])
@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_a_model_can_be_had_in_other_weight_formats_beside_itself(host: str | None, weight_format: str) -> None:
    """Made of the weights in use, whatever holds them; what is no linear layer is there once."""
    first = HFModel(tiny(), weight_format=host, self_test=False)
    before = causal_logits(first.model, range(20))
    second = first.in_weight_format(weight_format)
    can = second.capabilities
    assert can.fingerprint == f"{first.capabilities.fingerprint}:{weight_format}"
    assert replace(can, weight_format="", linear_layers="", fingerprint="") == replace(
        first.capabilities, weight_format="", linear_layers="", fingerprint=""
    )
    assert (can.weight_format, weight_format in can.linear_layers) == (weight_format, True)
    assert torch.equal(causal_logits(first.model, range(20)), before), "the first has stayed as it was"
    names = {m.kernel.name for m in second.model.modules() if isinstance(m, KernelLinear)}
    assert names <= {kernel.name for kind in (weight_format, "int8") for kernel in KERNELS[kind]}
    assert not [m for m in second.model.modules() if type(m) is nn.Linear]
    error = (causal_logits(second.model, range(20)) - before).abs().max() / before.std()
    assert error <= {"fp16w": 0.05, "int8": 0.5, "int4": 3.0}[weight_format]
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=False):
        if one.shape == other.shape:
            assert one.data_ptr() == other.data_ptr()
    second.model.get_input_embeddings()
    assert second.model.get_input_embeddings().weight is first.model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", FAMILIES)
def test_int4_has_its_output_layer_in_int8(kind: str) -> None:
    made = HFModel(tiny(kind), weight_format="fp32", self_test=False).in_weight_format("int4").model
    output = made.get_output_embeddings()
    assert output.kernel.name in {kernel.name for kernel in working("int8")}
    inner = {m.kernel.name for m in made.modules() if isinstance(m, KernelLinear) and m is not output}
    assert inner <= {"int4"}, "GPT-2 has none that PyTorch calls linear"
    assert inner or kind == "gpt2"


def test_the_price_of_a_weight_format_is_that_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers together, each in the kernel that it runs with, against the fastest in this format."""
    seconds = {"stock": 3.0, "prepacked": 2.0, "int8": 0.5, "int8-onednn": 0.25, "fp16w": 1.0, "int4": 1.5}
    monkeypatch.setattr(Times, "of", lambda self, kernels, linears: {k: (seconds[k.name], 9.0) for k in kernels})
    monkeypatch.setattr(
        module, "choose", lambda times: min((Choice(k, (0,), t[0]) for k, t in times.items()), key=lambda c: c.seconds)
    )
    model = HFModel(tiny(), weight_format="fp32", self_test=False).model
    used = [m.kernel.name for m in model.modules() if isinstance(m, KernelLinear)]
    now = sum(seconds[name] for name in used)
    assert module.price(model, "fp32") == pytest.approx(1.0)
    assert module.price(model, "fp16w") == pytest.approx(len(used) / now)
    output = min(seconds[kernel.name] for kernel in working("int8"))
    assert module.price(model, "int4") == pytest.approx(((len(used) - 1) * 1.5 + output) / now)
    monkeypatch.setattr(module, "working", lambda weight_format: ())
    assert module.price(model, "int4") == float("inf")


def test_other_weight_formats_follow_what_is_tracked_in_neither() -> None:
    """A hook on the first is not one on the second."""
    first = HFModel(tiny(), weight_format="fp32", self_test=False)
    first.track_features()
    second = first.in_weight_format("int8")
    row = prefill(second, PROMPTS[0])
    assert not second.tracked
    assert feature_row(row).features == []
    second.close(row)


def test_profiles_of_other_weight_formats_are_other_profiles() -> None:
    identities = [Identity.of(m) for m in (HFModel(tiny()), converted("fp32"), converted("fp16w"))]
    assert [i.weight_format for i in identities] == ["stock", "fp32", "fp16w"]
    assert len({i.file_name for i in identities}) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_load_gives_fp32_unless_asked_otherwise(folder: Path) -> None:
    assert load(str(folder)).capabilities.weight_format == "fp32"
    assert load(str(folder), weight_format="fp16w").capabilities.weight_format == "fp16w"
    assert load(str(folder), dtype="bfloat16").capabilities.weight_format == "stock"
    with pytest.raises(ConfigError, match="weight format is 'fast'"):
        load(str(folder), weight_format="fast")


def test_load_stock_is_transformers_own_model(folder: Path) -> None:
    model, tokenizer = load_stock(str(folder))
    assert tokenizer is not None
    assert summary(model) == "15 layers, 15 stock"


def test_a_drafting_model_takes_the_targets_weight_format(folder: Path) -> None:
    engine = draftree.load_engine(str(folder), drafter=str(folder), weight_format="fp16w")
    assert isinstance(engine.target, HFModel)
    assert engine.target.capabilities.weight_format == "fp16w"
    assert engine.speculation.drafter.source.model.capabilities.weight_format == "fp16w"  # type: ignore[attr-defined]
