"""On a CUDA device: the same ids, and one transfer to the host for each model pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from draftree.beams.beam_engine import BeamEngine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.huggingface.attention import by_products
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.runner import GraphRunner, StockRunner
from draftree.papers.entropy_trees import EntropyTree
from draftree.papers.opt_tree import OptTree
from draftree.train.responses import respond, seed_of
from draftree.verify.schemes import find_scheme

from .heads import random_head
from .pairs import begun, relative
from .tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]


def _on_gpu(model: PreTrainedModel) -> HFModel:
    torch.nn.Module.cuda(model)
    return HFModel(model)


def _drafter(name: str) -> Drafter:
    if name == "lookup":
        return TreeDrafter(EntropyTree(), NgramSource(shortest=1))
    return TreeDrafter(EntropyTree(), ModelSource(_on_gpu(relative()), VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["lookup", "relative"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_window"])
def test_batched_trees_give_the_ids_of_ar_decoding(kind: str, name: str, temperature: float) -> None:
    target = _on_gpu(tiny(kind))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    want = [Engine(target).generate([p], params)[0].token_ids for p in PROMPTS]
    assert [g.token_ids for g in Engine(target, Speculation(_drafter(name))).generate(PROMPTS, params)] == want


@pytest.mark.parametrize("name", ["lookup", "relative"])
@pytest.mark.parametrize("scheme", ["multi-round", "multi-round-replacement", "top1-residual", "relaxed"])
def test_schemes_that_draw_uniformly_run_on_the_device(scheme: str, name: str) -> None:
    target = _on_gpu(tiny())
    params = [SamplingParams(max_tokens=30, temperature=t, seed=5) for t in (1.0, 0.0, 0.7)]
    texts = [
        [
            g.token_ids
            for g in Engine(target, Speculation(_drafter(name), scheme=find_scheme(scheme))).generate(PROMPTS, params)
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    greedy = Engine(target).generate(PROMPTS[1:2], params[1])[0].token_ids
    assert scheme == "relaxed" or texts[0][1] == greedy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_beams_run_on_the_device(temperature: float) -> None:
    target = _on_gpu(tiny())
    params, beams = SamplingParams(max_tokens=20, temperature=temperature, seed=5), BeamParams(width=3, returned=3)
    plain, drafted = BeamEngine(target), BeamEngine(target, ModelSource(_on_gpu(relative()), VOCAB))
    want, got = (
        [[h.token_ids for h in one.hypotheses] for one in engine.generate(PROMPTS, params, beams)]
        for engine in (plain, drafted)
    )
    assert [len(found) for found in got] == [3, 3, 3]
    assert temperature or got == want


def test_responses_in_step_are_those_of_the_engine() -> None:
    target = _on_gpu(tiny())
    target.track_features()
    drawn = {r.number: r for r in respond(target, PROMPTS, range(6), rows=4, max_tokens=30, seed=5)}
    for number, response in drawn.items():
        params = SamplingParams(max_tokens=30, temperature=response.temperature, seed=seed_of(number, 5))
        said = Engine(target).generate([PROMPTS[number % len(PROMPTS)]], params)[0].token_ids
        assert response.tokens[response.prompt_length :].tolist() == said
        assert response.features.shape == (len(response.tokens) - 1, target.hidden_size)
    assert len(drawn) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_passes_are_those_of_the_same_runner_without_capture(dtype: torch.dtype) -> None:
    """The kernels are the same, and so are the bits: rows grow, trees change, graphs are replayed."""
    texts = []
    for captures in (None, lambda: lambda make: make):
        model = HFModel(torch.nn.Module.to(tiny(), "cuda", dtype), runner="graph")
        model._runner = GraphRunner(StockRunner(model.model), captures)
        engine = Engine(model, Speculation(TreeDrafter(EntropyTree(), NgramSource(shortest=1))))
        texts.append([g.token_ids for g in engine.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))])
        assert model._runner.uncaptured == ""
    assert texts[0] == texts[1]


def test_a_model_that_was_tested_and_outgrows_its_storage_keeps_to_graphs() -> None:
    """Graphs of the self-test, and of a shorter context, are gone with what they wrote to; others are made."""
    model = _on_gpu(tiny())
    for tokens in (20, 90):
        Engine(model).generate(PROMPTS[1:2], SamplingParams(max_tokens=tokens, ignore_eos=True))
        assert isinstance(model._runner, GraphRunner) and model._runner.uncaptured == ""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_drafts_in_graphs(temperature: float) -> None:
    """Its passes are captured, the candidates of greedy drafts with them: ids are those of AR decoding, and drafts, but
    for a near-tie, those of passes that are not."""
    target = _on_gpu(tiny())
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    want = [Engine(target).generate([p], params)[0].token_ids for p in PROMPTS]
    head = random_head(target)

    found = Engine(target, Speculation(TreeDrafter(OptTree(), EagleSource(head, VOCAB)), 8)).generate(PROMPTS, params)
    assert [g.token_ids for g in found] == want
    assert sum(g.stats.draft_passes for g in found) > 20
    assert isinstance(head._runner, GraphRunner) and head._runner.uncaptured == ""
    head._runner, head._passes.best = head._passes, 0
    eager = Engine(target, Speculation(TreeDrafter(OptTree(), EagleSource(head, VOCAB)), 8)).generate(PROMPTS, params)
    accepted = [sum(sum(g.stats.accepted) for g in every) for every in (found, eager)]
    assert abs(accepted[0] - accepted[1]) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 6, 48])
def test_attention_by_products_is_that_of_sdpa(queries: int, dtype: torch.dtype) -> None:
    noise = torch.Generator("cuda").manual_seed(queries)
    query, key, value = (
        torch.randn((2, 3, n, 64), generator=noise, device="cuda").to(dtype) for n in (queries, 400, 400)
    )
    key, value = key[:, :, :320], value[:, :, :320]
    mask = torch.rand((2, 1, queries, 320), generator=noise, device="cuda") < 0.5
    mask[..., 0] = True
    wanted = scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(by_products(query, key, value, mask, None).double(), wanted, atol=close, rtol=0)


class _Transfers(TorchDispatchMode):
    """Counts copies from the device to the host, and to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        from_device = any(isinstance(a, Tensor) and a.is_cuda for a in args)
        to_host = not isinstance(out, (Tensor, tuple, list)) or (isinstance(out, Tensor) and not out.is_cuda)
        self.count += from_device and to_host
        from_host = any(isinstance(a, Tensor) and not a.is_cuda and a.dim() for a in args)
        self.uploads += from_host and isinstance(out, Tensor) and out.is_cuda
        return out


@pytest.mark.parametrize("name", ["lookup", "relative"])
def test_a_step_makes_one_transfer_for_each_model_pass(name: str) -> None:
    drafter = _drafter(name)
    engine = Engine(_on_gpu(tiny()), Speculation(drafter))
    request = begun(engine.stepper, engine.request(PROMPTS[0], SamplingParams(max_tokens=40)))
    engine.stepper.step([request])
    with _Transfers() as seen:
        engine.stepper.step([request])
    assert seen.count == 1 + drafter.passes
    assert seen.uploads - seen.count in range(3), "target and draft model may move accepted nodes"
    engine.stepper.close(request)
