"""Beams at the edges: short and full contexts, what is refused, what is freed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree import draws as draws_module
from draftree.beams.beam_engine import BeamEngine, grow, load_beam_source
from draftree.beams.forest import BeamParams
from draftree.beams.layers import BeamDraws
from draftree.config import SamplingParams
from draftree.drafters.base import Scorer, UnscoredNode
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.registry import load_source
from draftree.drafters.spec import DrafterSpec
from draftree.draws import Penalties
from draftree.errors import ConfigError, PromptError, RunError
from draftree.models.base import prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.translated import TranslatedModel
from draftree.request import Request
from draftree.sampling.constraint import TokenRules
from draftree.text.detokenizer import NoText
from draftree.tree import ROOT

from ..heads import random_head
from ..pairs import target
from ..test_token_rules import penalised
from ..tiny import VOCAB, tiny, tiny_tokenizer
from ..toy import ToyModel
from .parts import PROMPTS, source

TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


def ids(engine: BeamEngine, prompt: list[int], params: SamplingParams, **settings: int) -> list[list[int]]:
    return [h.token_ids for h in engine.generate([prompt], params, BeamParams(**settings))[0].hypotheses]  # type: ignore[arg-type]


@TEMPERATURES
@pytest.mark.parametrize("drafter", ["none", "self"])
def test_one_token_comes_from_the_prefill_alone(drafter: str, temperature: float) -> None:
    model = target()
    engine = BeamEngine(model, source(drafter, model))
    made = engine.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=1, temperature=temperature), BeamParams(width=3, returned=3)
    )[0]
    assert [len(h.token_ids) for h in made.hypotheses] == [1, 1, 1]
    assert made.stats.steps == 0
    assert model.pass_seconds == 0.0


@TEMPERATURES
@pytest.mark.parametrize("drafter", ["self", "relative"])
def test_a_prompt_of_one_token_will_do(drafter: str, temperature: float) -> None:
    model = target()
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=1)
    found = ids(BeamEngine(model, source(drafter, model)), [9], params, width=3, returned=3)
    assert [len(tokens) for tokens in found] == [8, 8, 8]
    if temperature == 0:
        assert found == ids(BeamEngine(model), [9], params, width=3, returned=3)


@TEMPERATURES
@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_beams_end_where_the_context_is_full(room: int, temperature: float) -> None:
    toy = ToyModel(4, max_length=5 + room)
    engine = BeamEngine(toy, ModelSource(ToyModel(4, 1, max_length=5 + room), 4))
    found = ids(engine, [1, 2, 3, 0, 1], SamplingParams(temperature=temperature), width=3, returned=3)
    assert [len(tokens) for tokens in found] == [room] * 3


@TEMPERATURES
@pytest.mark.parametrize("most", [3, 5, 9, 12])
def test_a_drafter_of_a_shorter_context_drafts_as_far_as_it_goes(most: int, temperature: float) -> None:
    engine = BeamEngine(ToyModel(4), ModelSource(ToyModel(4, 1, max_length=most), 4))
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=2)
    found = ids(engine, [1, 2, 3, 0], params, width=2, returned=2)
    assert [len(tokens) for tokens in found] == [10, 10]
    if temperature == 0:
        assert found == ids(BeamEngine(ToyModel(4)), [1, 2, 3, 0], params, width=2, returned=2)


@TEMPERATURES
def test_an_end_token_at_once_finishes_all_beams(temperature: float) -> None:
    toy = ToyModel(3, eos_ids=frozenset({0, 1, 2}))
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=2)
    found = ids(BeamEngine(toy, ModelSource(toy, 3)), [1], params, width=3, returned=3)
    assert [len(tokens) for tokens in found] == [1, 1, 1]


def test_end_tokens_can_be_ignored() -> None:
    toy = ToyModel(3, eos_ids=frozenset({0, 1, 2}))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert len(ids(BeamEngine(toy), [1], params, width=2)[0]) == 9


def test_processors_see_each_sampled_beams_history() -> None:
    """With a ban on repetition no beam has a token twice, drafted or not."""

    def banned(history: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[history] = -np.inf
        return logits

    model = target()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, processors=(banned,))
    for drafter in ("none", "self"):
        for tokens in ids(BeamEngine(model, source(drafter, model)), PROMPTS[1], params, width=3, returned=3):
            assert len({*PROMPTS[1], *tokens}) == len(PROMPTS[1]) + len(tokens)


@pytest.mark.parametrize("drafter", ["none", "relative"])
def test_a_seed_repeats_its_beams(drafter: str) -> None:
    model = target()
    engine = BeamEngine(model, source(drafter, model))
    one, again, other = (
        ids(engine, PROMPTS[0], SamplingParams(max_tokens=9, temperature=1.0, seed=s), width=3, returned=3)
        for s in (4, 4, 5)
    )
    assert one == again != other


def test_a_drawn_seed_is_told() -> None:
    engine = BeamEngine(ToyModel(5))
    made = engine.generate([[1, 2]], SamplingParams(max_tokens=6, temperature=1.0), BeamParams(width=3))[0]
    again = SamplingParams(max_tokens=6, temperature=1.0, seed=made.seed)
    assert ids(engine, [1, 2], again, width=3) == [h.token_ids for h in made.hypotheses]


def test_what_does_not_fit_is_refused_before_any_work() -> None:
    engine = BeamEngine(ToyModel(5, max_length=8))
    with pytest.raises(PromptError, match="8 tokens .* 8 tokens .toy"):
        engine.generate([[1, 2], [1] * 8])
    with pytest.raises(ConfigError, match="max_tokens is 7 .* 6"):
        engine.generate([[1, 2]], SamplingParams(max_tokens=7))
    with pytest.raises(PromptError, match="empty"):
        engine.generate([[]])
    with pytest.raises(ConfigError, match="prompts"):
        engine.generate("text")
    with pytest.raises(ConfigError, match="2 .* 1 prompts"):
        engine.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(ConfigError, match="give SamplingParams"):
        engine.generate([[1]], {"temperature": 1.0})  # type: ignore[arg-type]


def zeroed(history: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return logits * 0


CHANGED: list[tuple[str, Any]] = [
    ("max_tokens", 3),
    ("temperature", 0.0),
    ("top_k", 2),
    ("top_p", 0.1),
    ("min_p", 0.9),
    ("seed", 2),
    ("ignore_eos", True),
    ("repetition_penalty", 2.0),
    ("frequency_penalty", 1.0),
    ("presence_penalty", 1.0),
    ("logit_bias", {7: 9.0}),
    ("skip_special_tokens", False),
    ("processors", (zeroed,)),
]
REFUSED: list[tuple[str, Any]] = [
    ("stop", ("a",)),
    ("min_tokens", 1),
    ("bad_words", ("a",)),
    ("stop_token_ids", (7,)),
    ("allowed_token_ids", (7,)),
    ("include_stop_str_in_output", True),
    ("logprobs", 0),
    ("logprobs", 3),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", 3),
    ("constraint", TokenRules(VOCAB, frozenset())),
    ("criteria", (lambda history: False,)),
]


@pytest.mark.parametrize(("name", "value"), [*CHANGED, *REFUSED])
def test_no_parameter_is_ignored(name: str, value: Any) -> None:
    """Log-probabilities that were asked for did not come."""
    tokenizer = tiny_tokenizer()
    engine = BeamEngine(HFModel(tiny(), tokenizer, self_test=False))
    begin, end = int(tokenizer.bos_token_id), int(tokenizer.eos_token_id)
    engine.target.capabilities = replace(engine.target.capabilities, eos_ids=frozenset({end}))
    usual = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logit_bias={begin: 3.0, end: 3.0})

    def found(params: SamplingParams) -> list[tuple[str, list[int], float]]:
        (made,) = engine.generate([PROMPTS[0]], params, BeamParams(width=3, returned=3))
        return [(beam.text, beam.token_ids, beam.logprob) for beam in made.hypotheses]

    changed = replace(usual, **{name: value})
    if (name, value) in REFUSED:
        with pytest.raises(ConfigError, match=name):
            found(changed)
    else:
        assert found(changed) != found(usual)


def test_all_parameters_are_tried_above() -> None:
    assert {name for name, _ in [*CHANGED, *REFUSED]} == {each.name for each in fields(SamplingParams)}


@pytest.mark.parametrize("name", ["lookup", "lookup+self", "lookup>self"])
def test_what_drafts_one_sequence_is_refused(name: str) -> None:
    model = target()
    with pytest.raises(ConfigError, match="not beams"):
        load_beam_source(name, model)
    with pytest.raises(ConfigError, match="not beams"):
        BeamEngine(model, load_source(DrafterSpec.parse(name), model))


def test_a_head_drafts_no_beams() -> None:
    model = target()
    with pytest.raises(ConfigError, match="not beams"):
        BeamEngine(model, EagleSource(random_head(model), VOCAB))


def test_a_model_that_cannot_keep_beams_is_none() -> None:
    class Flat:
        def __getattr__(self, name: str) -> Any:
            if name == "prune":
                raise AttributeError(name)
            return getattr(ToyModel(3), name)

    with pytest.raises(ConfigError, match="target is"):
        BeamEngine(Flat())


class Failing(ModelSource):
    """Fails in the third proposal."""

    calls = 0

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        Failing.calls += 1
        if Failing.calls == 3:
            raise RuntimeError("the drafter failed")
        return super().scorer(requests, coupled)


def test_a_failure_frees_all_rows() -> None:
    toy, drafting = ToyModel(5), ToyModel(5, 1)
    engine = BeamEngine(toy, Failing(drafting, 5))
    with pytest.raises(RuntimeError, match="drafter failed"):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=20))
    assert (toy._rows, drafting._rows) == ([], [])
    found = engine.generate([[1, 2]], SamplingParams(max_tokens=5))
    assert len(found[0].hypotheses[0].token_ids) == 5


def test_text_and_prompts_as_text() -> None:
    model = HFModel(tiny(), tiny_tokenizer(), self_test=False)
    made = BeamEngine(model).generate(["the cat"], SamplingParams(max_tokens=6), BeamParams(width=2))[0]
    assert made.hypotheses[0].text == tiny_tokenizer().decode(made.hypotheses[0].token_ids, skip_special_tokens=True)


def test_names_of_drafters() -> None:
    model = target()
    assert load_beam_source("none", model) is None
    assert load_beam_source("auto", model) is None, "beams are drafted where a drafter is named"
    made = load_beam_source(HFModel(tiny(seed=5), name="other", self_test=False), model)
    assert isinstance(made, ModelSource) and made.name == "other"


def test_a_drafter_whose_pass_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    engine = BeamEngine(model, drafting := source("relative", model))
    assert isinstance(drafting, ModelSource)
    params, beams = SamplingParams(max_tokens=9), BeamParams(width=2, depth=3)
    want = engine.generate([PROMPTS[0]], params, beams)[0].hypotheses
    request = engine._request(PROMPTS[0], params, beams)
    engine.open(request)
    extend, calls = drafting.model.extend, list[int]()

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RunError("out of memory")
        return extend(*args)

    monkeypatch.setattr(drafting.model, "extend", failing)
    with pytest.raises(RunError):
        engine.step([request])
    while not request.done:
        engine.step([request])
    assert engine._generation(request).hypotheses == want
    engine.close(request)


def test_a_model_of_another_vocabulary_drafts_beams() -> None:
    one = HFModel(tiny(), tiny_tokenizer(), self_test=False)
    other = HFModel(tiny(seed=5), tiny_tokenizer(shift=True), self_test=False)
    drafting, params = load_beam_source(other, one), SamplingParams(max_tokens=8)
    assert drafting is not None and isinstance(drafting.model, TranslatedModel)
    found = ids(BeamEngine(one, drafting), PROMPTS[0], params, width=3, returned=3)
    assert found == ids(BeamEngine(one), PROMPTS[0], params, width=3, returned=3)


def test_a_drafters_output_layer_may_be_padded() -> None:
    engine = BeamEngine(ToyModel(VOCAB), ModelSource(ToyModel(VOCAB + 3, 1), VOCAB))
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=6, temperature=temperature, seed=1)
        assert len(ids(engine, [1, 2, 3], params, width=2, returned=2)) == 2


def test_distributions_of_the_engine_are_finite() -> None:
    """Where warping leaves one token, all draws are that token: its warped probability is 1, its own is not."""
    engine = BeamEngine(ToyModel(5), ModelSource(ToyModel(5, 1), 5))
    params = SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=1)
    found = engine.generate([[1, 2]], params, BeamParams(width=3, returned=3))[0].hypotheses
    assert len({tuple(h.token_ids) for h in found}) == 1
    assert all(-math.inf < h.score < -1e-6 for h in found)


def test_a_source_scores_below_beams_as_below_a_request_of_their_tokens() -> None:
    """Whatever it kept of the beams."""
    model = target()

    def made() -> ModelSource:
        found = source("relative", model)
        assert found is not None
        return found

    engine = BeamEngine(model, drafting := made())
    request = engine._request(PROMPTS[0], SamplingParams(max_tokens=12), BeamParams(width=3, depth=2))
    engine.open(request)
    apart = 0
    while not request.done:
        forest = grow(drafting, [request], [BeamDraws(0, 0)])[0]
        for node in forest.layers[0].drafts if forest.layers else ():  # the last step drafts nothing
            assert node.parent is not None
            history, fresh = [*request.ids, *node.parent.tokens], made()
            alone = Request(history, SamplingParams(), 9, frozenset(), NoText())
            alone.row = prefill(model, alone.ids[:-1])
            found = fresh.scorer([alone], False).score([UnscoredNode(0, ROOT, ROOT, 0)], VOCAB)[0]
            want = found.logprobs[found.tokens.index(node.token)]
            assert node.score - node.parent.score == pytest.approx(want, abs=1e-4)
            fresh.close(alone)
            model.close(alone.row)
            apart = max(apart, node.parent.length - request.tree.base.length)
        engine.step([request])
    assert apart > 2, "some beams were apart for several tokens"


@TEMPERATURES
def test_penalties_of_a_prompt_are_found_once_for_all_beams(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each beam of each layer went through the whole prompt."""
    read, with_tokens = list[int](), Penalties._with

    def counted(penalties: Penalties, tokens: Sequence[int]) -> dict[int, int]:
        read.append(len(tokens))
        return with_tokens(penalties, tokens)

    made = Mock(side_effect=Penalties)
    monkeypatch.setattr(draws_module, "Penalties", made)
    monkeypatch.setattr(Penalties, "_with", counted)
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1, repetition_penalty=1.5, presence_penalty=0.5)
    by_definition = penalised(len(PROMPTS[2]), params.repetition_penalty, 0.0, params.presence_penalty)
    plain = SamplingParams(max_tokens=6, temperature=temperature, seed=1, processors=(by_definition,))
    engine, beams = BeamEngine(target()), BeamParams(width=3, returned=3)
    every = [engine.generate([PROMPTS[2]], each, beams)[0].hypotheses for each in (params, plain)]
    found, wanted = ([h.token_ids for h in hypotheses] for hypotheses in every)
    assert found == wanted
    assert made.call_count == 1 and len(read) > 6
    assert max(read) < 6, "the tokens of a beam, not those of the prompt"
