"""Whole decodings on tiny models: the output is the target's own, whatever drafts, and ends where it must."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from draftree.config import DEFAULT_NODES, MAX_NODES, Processor, SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import EngineRequest, Observer, Speculation
from draftree.errors import ConfigError, InputError, PromptError
from draftree.integrations.hf_generate import as_processor
from draftree.models.base import prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.entropy_trees import EntropyTree
from draftree.policies.fixed import StaticTree
from draftree.policies.methods import METHODS
from draftree.request import Generation, Request

from .pairs import DRAFTERS, begun, drafter, generated, policy, relative, target
from .references import nbytes
from .tiny import MAX_LENGTH, VOCAB, tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
TOKENS = 20
PAIRS = [(method, DRAFTERS[(i + j) % len(DRAFTERS)]) for j in range(2) for i, method in enumerate(METHODS)]
"""Each method with two drafters: one on the first architecture and at the first temperature, and one on the others."""
OF = [("llama" if i < len(METHODS) else "gpt2", *pair) for i, pair in enumerate(PAIRS)]
AT = [(1.0 if i < len(METHODS) else 0.4, *pair) for i, pair in enumerate(PAIRS)]


def opened(engine: Engine, prompt: list[int], params: SamplingParams | None = None) -> EngineRequest:
    return begun(engine.stepper, engine.request(prompt, params))


def _decode(
    method: str, name: str, prompts: list[list[int]], params: SamplingParams, kind: str = "llama"
) -> list[Generation]:
    model = target(kind)
    engine = Engine(model, Speculation(drafter(name, model, policy(method), kind), 12))
    return engine.generate(prompts, params)


@functools.cache
def _stock(kind: str = "llama") -> list[list[int]]:
    """What transformers' ``generate`` adds to each prompt, greedily."""
    return [generated(tiny(kind), p, TOKENS) for p in PROMPTS]


@functools.cache
def _ar(params: SamplingParams) -> list[list[int]]:
    """What AR decoding adds to each prompt, alone."""
    return [_decode("chain", "none", [p], params)[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize(("kind", "method", "name"), OF)
def test_greedy_ids_equal_transformers_generate_alone_and_batched(kind: str, method: str, name: str) -> None:
    params = SamplingParams(max_tokens=TOKENS)
    assert _decode(method, name, PROMPTS[:1], params, kind)[0].token_ids == _stock(kind)[0]
    assert [g.token_ids for g in _decode(method, name, PROMPTS, params, kind)] == _stock(kind)


@pytest.mark.parametrize(("temperature", "method", "name"), AT)
def test_sampled_ids_equal_ar_decoding_under_the_same_seed(temperature: float, method: str, name: str) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=11)
    assert [g.token_ids for g in _decode(method, name, PROMPTS, params)] == _ar(params)


@pytest.mark.parametrize("shape", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}])
def test_warped_sampling_equals_ar_decoding_under_the_same_seed(shape: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.5, seed=3, **shape)  # type: ignore[arg-type]
    assert [g.token_ids for g in _decode("dynamic-width", "relative", PROMPTS, params)] == _ar(params)


def test_each_sequence_of_a_batch_has_its_own_sampling() -> None:
    each = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=20, temperature=1.0, seed=1),
        SamplingParams(max_tokens=16, temperature=0.7, top_k=4, seed=2),
    ]
    model = target()
    engine = Engine(model, Speculation(drafter("relative", model, StaticTree()), 12))
    alone = [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, each, strict=True)]
    assert [g.token_ids for g in engine.generate(PROMPTS, each)] == alone


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_processor_sees_each_node_on_its_own_path(name: str) -> None:
    penalty = as_processor(RepetitionPenaltyLogitsProcessor(1.5))
    params = SamplingParams(max_tokens=TOKENS, processors=(penalty,))
    want = [generated(tiny(), p, TOKENS, repetition_penalty=1.5) for p in PROMPTS]
    assert want != _stock(), "the penalty must matter"
    assert [g.token_ids for g in _decode("static", name, PROMPTS, params)] == want


@pytest.mark.parametrize(
    "distribution", [{}, {"temperature": 1.0}, {"temperature": 1.7, "top_k": 9}, {"temperature": 0.6, "top_p": 0.8}]
)
def test_the_target_as_its_own_drafter_is_always_right(distribution: dict[str, float]) -> None:
    """Sampled, too: it foresees the target's noise."""
    params = SamplingParams(max_tokens=41, seed=3, **distribution)  # type: ignore[arg-type]
    stats = _decode("chain", "self", PROMPTS[:1], params)[0].stats
    assert stats.accepted == stats.drafted
    assert stats.mal == 5.0  # chains of 4 and the bonus token, 40 tokens in 8 steps
    assert stats.rejected_entropies == []


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7])
def test_exactly_max_tokens_are_generated(tokens: int) -> None:
    for g in _decode("static", "self", PROMPTS, SamplingParams(max_tokens=tokens)):
        assert len(g.token_ids) == tokens
        assert g.finish_reason == "length"


@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_follows_the_end_of_sequence_token(name: str) -> None:
    whole = _stock()[0]
    eos = whole[17]
    model = target(eos=eos)
    engine = Engine(model, Speculation(drafter(name, model, StaticTree(width=1, depth=7))))
    g = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS))[0]
    assert g.token_ids == whole[: whole.index(eos) + 1]
    assert g.finish_reason == "eos"
    over = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS, ignore_eos=True))[0]
    assert over.token_ids == whole


def test_a_criterion_ends_generation_at_its_token() -> None:
    whole = _stock()[0]

    def ten_tokens(ids: NDArray[np.int64]) -> bool:
        return len(ids) >= len(PROMPTS[0]) + 10

    g = _decode("static", "self", PROMPTS[:1], SamplingParams(max_tokens=TOKENS, criteria=(ten_tokens,)))[0]
    assert (g.token_ids, g.finish_reason) == (whole[:10], "criteria")


@pytest.mark.parametrize("name", ["none", *DRAFTERS])
def test_decoding_fills_the_context_to_the_last_token_and_no_further(name: str) -> None:
    prompt = (PROMPTS[2] * 9)[: MAX_LENGTH - 20]
    g = _decode("static", name, [prompt], SamplingParams())[0]
    assert g.token_ids == generated(tiny(), prompt, 20)
    assert g.finish_reason == "length"


def test_a_drafter_with_a_shorter_context_stops_drafting_and_decoding_goes_on() -> None:
    model = target()
    small = target()
    object.__setattr__(small.capabilities, "max_length", 32)
    engine = Engine(model, Speculation(TreeDrafter(StaticTree(), ModelSource(small, VOCAB))))
    params = SamplingParams(max_tokens=TOKENS)
    long = (PROMPTS[2] * 3)[:33]
    got = [g.token_ids for g in engine.generate([PROMPTS[0], long], params)]
    assert got == [generated(tiny(), p, TOKENS) for p in (PROMPTS[0], long)]


def test_padding_of_the_drafters_output_layer_is_never_drafted() -> None:
    config = tiny().config
    wide = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "vocab_size": VOCAB + 30}))
    model = target()
    made = TreeDrafter(StaticTree(width=4, depth=2), ModelSource(HFModel(wide, self_test=False), VOCAB))
    g = Engine(model, Speculation(made, 20)).generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS))[0]
    assert g.token_ids == _stock()[0]


def test_the_seed_that_was_used_reproduces_the_text() -> None:
    one = _decode("chain", "relative", PROMPTS[:1], SamplingParams(max_tokens=TOKENS, temperature=1.0))[0]
    two = _decode("chain", "relative", PROMPTS[:1], SamplingParams(max_tokens=TOKENS, temperature=1.0))[0]
    again = _decode("static", "none", PROMPTS[:1], SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=one.seed))[0]
    assert one.seed != two.seed
    assert one.token_ids != two.token_ids
    assert again.token_ids == one.token_ids


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    _decode("dynamic-width", "relative", PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=1.0))
    assert torch.equal(before, torch.get_rng_state())


def test_a_stream_gives_the_tokens_of_generate_and_says_which_were_drafted() -> None:
    model = target()
    engine = Engine(model, Speculation(drafter("self", model, StaticTree(width=1, depth=3))))
    chunks = list(engine.stream(PROMPTS[0], SamplingParams(max_tokens=9)))
    assert [c.token for c in chunks] == generated(tiny(), PROMPTS[0], 9)
    assert [c.depth for c in chunks] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [c.drafted for c in chunks] == [c.depth > 0 for c in chunks]


@pytest.mark.parametrize("method", METHODS)
def test_the_statistics_add_up(method: str) -> None:
    for g in _decode(method, "relative", PROMPTS, SamplingParams(max_tokens=TOKENS)):
        s = g.stats
        assert s.tokens == len(g.token_ids) == len(g.chunks) == 1 + s.steps + sum(s.accepted)
        assert all(a <= s.steps for a in s.accepted)
        assert all(a <= d for a, d in zip(s.accepted, s.drafted, strict=False))
        assert len(s.accepted_entropies) == sum(s.accepted) == sum(c.drafted for c in g.chunks)
        assert len(s.rejected_entropies) <= s.steps
        assert s.seconds.total > 0
        assert s.mal == pytest.approx((s.tokens - 1) / s.steps)


def test_a_tree_is_never_larger_than_its_budget() -> None:
    model = target()
    engine = Engine(model, Speculation(drafter("relative", model, StaticTree(width=5, depth=6)), 9))
    request = opened(engine, PROMPTS[0], SamplingParams(max_tokens=TOKENS))
    while request.finish_reason is None:
        left = request.tokens_left
        tree = engine.stepper.step([request])[0].tree
        assert len(tree) <= 9
        assert tree.depth <= left - 1
    engine.stepper.close(request)


def test_users_shape_trees_with_functions_of_entropy() -> None:
    model = target()
    engine = Engine(
        model,
        Speculation(
            drafter("relative", model, EntropyTree(lambda h: 1 if h < 2 else 3, lambda h: 5 - h if h < 5 else 0)), 20
        ),
    )
    g = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=TOKENS))[0]
    assert g.token_ids == _stock()[0]
    assert sum(g.stats.accepted) > 0


def test_the_cache_takes_at_most_twice_what_the_tokens_need() -> None:
    model = target()
    engine = Engine(model, Speculation(TreeDrafter(StaticTree(), NgramSource()), 8))
    request = opened(engine, PROMPTS[0] * 9, SamplingParams())  # max_tokens unknown: the cache grows by doubling
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, head size, bytes
    while request.finish_reason is None:
        engine.stepper.step([request])
        assert nbytes(model.cache) <= 2 * token * (len(request.ids) + 8)
    engine.stepper.close(request)


class _Largest(TorchDispatchMode):
    """Storages of at least ``numel`` elements that operations make."""

    def __init__(self, numel: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = numel
        self.storages: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self.numel * 4:
                self.storages.add(x.untyped_storage().data_ptr())
                self._kept.append(x)  # its memory may not be reused while we count
        return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_allocates_one_tensor_of_tree_times_vocabulary(temperature: float) -> None:
    vocab = 5000
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HFModel(LlamaForCausalLM(LlamaConfig(**{**tiny().config.to_dict(), "vocab_size": vocab})))
    engine = Engine(model, Speculation(TreeDrafter(StaticTree(width=2, depth=4), NgramSource(shortest=1)), 16))
    prompt = [1, 2, 1, 3, 1, 2, 2, 3, 2, 1, 3, 3, 2, 1] * 3
    request = opened(
        engine, prompt, SamplingParams(max_tokens=20, temperature=temperature, top_k=40, top_p=0.9, seed=1)
    )
    request.ids[-1] = 1
    with _Largest(9 * vocab) as seen:
        outcome = engine.stepper.step([request])[0]
    assert len(outcome.tree) > 10
    engine.stepper.close(request)
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    assert len(seen.storages - weights) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], SamplingParams(), "empty"),
        ([1] * MAX_LENGTH, SamplingParams(), str(MAX_LENGTH)),
        ([1] * 100, SamplingParams(max_tokens=29), "29"),
        ([VOCAB], SamplingParams(), str(VOCAB)),
        ("text without a tokenizer", SamplingParams(), "tokenizer"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_and_the_message_names_it(
    prompt: list[int] | str, params: SamplingParams, named: str
) -> None:
    with pytest.raises((PromptError, ConfigError), match=named):
        Engine(target()).generate([prompt], params)


@pytest.mark.parametrize("nodes", [0, -3, MAX_NODES + 1])
def test_a_node_budget_out_of_range_is_refused(nodes: int) -> None:
    with pytest.raises(ConfigError, match=str(nodes)):
        Engine(target(), Speculation(nodes=nodes))


class _FailingError(Exception): ...


def _failing_at(length: int) -> Processor:
    def fail(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(ids) == length:
            raise _FailingError
        return logits

    return fail


def test_a_sequence_that_fails_to_open_leaves_no_row_behind() -> None:
    model = target()
    drafting = model.twin()
    made = TreeDrafter(StaticTree(), ModelSource(drafting, VOCAB))
    bad = SamplingParams(max_tokens=9, processors=(_failing_at(len(PROMPTS[1])),))
    with pytest.raises(_FailingError):
        Engine(model, Speculation(made)).generate(PROMPTS[:2], [SamplingParams(max_tokens=9), bad])
    assert prefill(model, PROMPTS[1]).number == prefill(drafting, PROMPTS[1]).number == 0


def test_a_batch_goes_on_rightly_after_a_step_that_failed() -> None:
    model = target()
    engine = Engine(
        model, Speculation(TreeDrafter(StaticTree(), ModelSource(HFModel(relative(), self_test=False), VOCAB)), 8)
    )
    bad = SamplingParams(max_tokens=TOKENS, processors=(_failing_at(len(PROMPTS[0]) + 5),))
    culprit, bystander = (
        opened(engine, PROMPTS[0], bad),
        opened(engine, PROMPTS[1], SamplingParams(max_tokens=TOKENS)),
    )
    with pytest.raises(_FailingError):
        while True:
            engine.stepper.step([culprit, bystander])
    engine.stepper.close(culprit)
    while bystander.finish_reason is None:
        engine.stepper.step([bystander])
    assert bystander.output_ids == _stock()[1]
    engine.stepper.close(bystander)


def test_a_stream_that_is_never_read_opens_no_row() -> None:
    model = target()
    Engine(model).stream(PROMPTS[0])
    assert prefill(model, PROMPTS[1]).number == 0
    with pytest.raises(PromptError):
        Engine(model).stream([])


def test_stop_strings_without_a_tokenizer_are_refused_before_any_row_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream raised only when its first token was read, and a batch when it had prefilled the prompts before."""
    model, params = target(), SamplingParams(stop=("x",))
    monkeypatch.setattr(model, "open", pytest.fail)
    with pytest.raises(InputError):
        Engine(model).stream(PROMPTS[0], params)
    with pytest.raises(InputError):
        Engine(model).generate(PROMPTS[:2], [SamplingParams(), params])


def test_a_finished_sequence_is_not_stepped_again() -> None:
    engine = Engine(target())
    request = opened(engine, PROMPTS[0], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match="finished"):
        engine.stepper.step([request])


@pytest.mark.parametrize("prompts", ["Hello", [1, 2, 3], [{"role": "user", "content": "x"}]])
def test_a_single_prompt_in_place_of_a_list_is_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        Engine(target()).generate(prompts)


class _Leaving(Observer):
    """Fails when it is told that a request has ended."""

    def __init__(self) -> None:
        self.told: list[Request] = []

    def closed(self, request: Request) -> None:
        self.told.append(request)
        raise _FailingError


def test_an_observer_that_fails_leaves_no_row_open() -> None:
    """Where an observer failed in ``closed``, the other requests of the batch were never closed: their rows rode along
    in every later pass, and observers behind it never heard of the end."""
    model, observers = target(), [_Leaving(), _Leaving()]
    drafting = model.twin()
    engine = Engine(model, Speculation(TreeDrafter(StaticTree(), ModelSource(drafting, VOCAB))), observers=observers)
    with pytest.raises(_FailingError):
        engine.generate(PROMPTS, [SamplingParams(max_tokens=n) for n in (3, 20, 20)])
    assert prefill(model, PROMPTS[0]).number == prefill(drafting, PROMPTS[0]).number == 0
    assert [len(o.told) for o in observers] == [3, 3]


def test_a_step_of_nothing_does_nothing_and_of_a_sequence_twice_is_refused() -> None:
    """``step([])`` was a ValueError of ``min()``, and a request there twice had its drafts committed twice."""
    engine = Engine(target(), Speculation(TreeDrafter(StaticTree(), NgramSource())))
    assert engine.stepper.step([]) == []
    request = opened(engine, PROMPTS[0], SamplingParams(max_tokens=TOKENS))
    with pytest.raises(ConfigError):
        engine.stepper.step([request, request])
    while request.finish_reason is None:
        engine.stepper.step([request])
    assert request.output_ids == _stock()[0]
    engine.stepper.close(request)


def test_the_cache_of_a_batch_is_reserved_exactly() -> None:
    model = target()
    engine = Engine(model, Speculation(nodes=4))
    engine.generate([[1] * 40] * 3, SamplingParams(max_tokens=10))
    engine.generate([[1] * 50] * 4, SamplingParams(max_tokens=20))
    assert (model.cache.placement.rows, model.cache.placement.slots) == (4, 128)  # 75 slots, to the grain of 64


def test_an_unbounded_tree_reserves_little_and_ends_with_the_context() -> None:
    """Without a node budget the cache grows for large trees, and none goes beyond the model's context."""
    model, kept = target(), len(PROMPTS[0])
    prompt = (PROMPTS[0] * 20)[: MAX_LENGTH - 8]
    plain = Engine(target()).generate([prompt], SamplingParams(ignore_eos=True))[0].token_ids
    engine = Engine(model, Speculation(drafter("relative", model, policy("dynamic-width")), MAX_NODES))
    request = opened(engine, PROMPTS[0], SamplingParams(max_tokens=10))
    assert model.cache.placement.slots < 400 + kept
    engine.stepper.close(request)
    found = engine.generate([prompt], SamplingParams(ignore_eos=True))[0]
    assert (found.token_ids, found.finish_reason) == (plain, "length")
    assert model.cache.placement.slots > 1000, "no tree was as large as B(H) asks for"


def test_a_node_budget_that_is_given_goes_before_the_methods_own() -> None:
    model = target()
    for nodes, want in ((None, DEFAULT_NODES), (9, 9)):
        assert Engine(model, Speculation(drafter("relative", model, EntropyTree()), nodes)).speculation.nodes == want
