"""What parameters rule out, through trees: the tokens of AR decoding with the same rules written as a processor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftree.beams.forest import BeamParams
from draftree.config import Processor, SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.errors import ConfigError, FieldError, InputError
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.cascade import CascadeSource
from draftree.papers.opt_tree import OptTree
from draftree.policies.base import GrowthPolicy
from draftree.policies.fixed import StaticTree
from draftree.request import Generation
from draftree.sampling.constraint import Constraint, TokenRules
from draftree.verify.schemes import find_scheme

from .test_constraint import EOS, PROMPT, VOCAB, Drafted, ToyConstraint, model, sources
from .tiny import VOCAB as TINY_VOCAB
from .tiny import tiny, tiny_tokenizer
from .toy import ToyModel

Refused = Callable[[Sequence[int]], set[int]]
"""Generated tokens -> those that must not come next."""


def early(least: int) -> Refused:
    return lambda text: {EOS} if len(text) < least else set()


def words(*sequences: tuple[int, ...]) -> Refused:
    return lambda text: {w[-1] for w in sequences if tuple(text[len(text) - len(w) + 1 :]) == w[:-1]}


RULES: dict[str, tuple[SamplingParams, Refused]] = {
    "min_tokens": (SamplingParams(min_tokens=6), early(6)),
    "stop_token_ids": (
        SamplingParams(min_tokens=3, stop_token_ids=(1,)),
        lambda text: {1, EOS} if len(text) < 3 else set(),
    ),
    "ignore_eos": (SamplingParams(min_tokens=9, ignore_eos=True), lambda text: set()),
    "allowed_token_ids": (SamplingParams(allowed_token_ids=(0, 2, 3)), lambda text: {1, EOS}),
    "words": (
        SamplingParams(
            constraint=TokenRules(VOCAB, frozenset({EOS}), words=[(2,), (0, 1), (3, 0, 3), (3, 1), (1, 1, 1)])
        ),
        words((2,), (0, 1), (3, 0, 3), (3, 1), (1, 1, 1)),
    ),
    "all": (
        SamplingParams(
            min_tokens=5,
            allowed_token_ids=(0, 1, 3, EOS),
            constraint=ToyConstraint(),
        ),
        lambda text: set(),
    ),
}
PROMPTS = [[*PROMPT, 1, seed % 4, 2] for seed in range(12)]


def as_processor(refused: Refused, prompt: int) -> Processor:
    def processor(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[list(refused(ids[prompt:].tolist()))] = -np.inf
        return logits

    return processor


def penalised(prompt: int, repetition: float, frequency: float, presence: float) -> Processor:
    """The penalties by their definition."""

    def processor(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        for token in set(ids.tolist()):
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token, count in Counter(ids[prompt:].tolist()).items():
            logits[token] -= frequency * count + presence
        return logits

    return processor


def biased(biases: dict[int, float]) -> Processor:
    def processor(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        for token, value in biases.items():
            logits[token] += value
        return logits

    return processor


def ids(found: Sequence[Generation]) -> list[list[int]]:
    return [g.token_ids for g in found]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("policy", [OptTree(), StaticTree(width=3, depth=3)], ids=["opt-tree", "static"])
@pytest.mark.parametrize("name", list(sources()))
@pytest.mark.parametrize("rule", ["min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "words"])
def test_rules_through_trees_are_those_of_a_processor(
    rule: str, name: str, policy: GrowthPolicy, temperature: float
) -> None:
    params, refused = RULES[rule]
    drawn: dict[str, Any] = {"max_tokens": 12, "temperature": temperature}
    seen = Drafted()
    engine = Engine(model(), Speculation(TreeDrafter(policy, sources()[name]), 9), observers=[seen])
    found = engine.generate(PROMPTS, [replace(params, **drawn, seed=seed) for seed in range(12)])
    plain = SamplingParams(
        **drawn,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        processors=(as_processor(refused, len(PROMPTS[0])),),
    )
    assert ids(found) == ids(Engine(model()).generate(PROMPTS, [replace(plain, seed=seed) for seed in range(12)]))
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    for path in seen.paths:
        assert not any(t in refused(path[:i]) for i, t in enumerate(path) if not ends & set(path[:i]))
    assert any(chunk.drafted for g in found for chunk in g.chunks)
    free = SamplingParams(**drawn)
    if rule != "ignore_eos":  # the rule rules something out
        assert ids(found) != ids(Engine(model()).generate(PROMPTS, [replace(free, seed=seed) for seed in range(12)]))


@pytest.mark.parametrize("name", list(sources()))
def test_rules_beside_a_grammar_allow_what_both_do(name: str) -> None:
    params, _ = RULES["all"]
    each = [replace(params, max_tokens=12, temperature=1.0, seed=seed) for seed in range(12)]
    engine = Engine(model(), Speculation(TreeDrafter(OptTree(), sources()[name]), 9))
    found = engine.generate(PROMPTS, each)
    assert ids(found) == ids(Engine(model()).generate(PROMPTS, each))
    for g in found:
        state = ToyConstraint().start()
        for token in g.token_ids:
            after = state.after(token)
            assert after is not None and token != 2
            state = after
        assert EOS not in g.token_ids[:5]


def test_a_grammar_that_has_ended_ends_the_text_whatever_the_least_number_of_tokens() -> None:
    """Nothing else could come."""
    only = ToyConstraint(lambda path: {0} if len(path) < 3 else {EOS})
    found = Engine(model()).generate([PROMPT], SamplingParams(min_tokens=9, max_tokens=12, constraint=only))[0]
    assert found.token_ids == [0, 0, 0, EOS] and found.finish_reason == "eos"


def dead_end(constraint: Constraint | None = None) -> SamplingParams:
    """After a 3 nothing may come."""
    barred = [(3, token) for token in range(VOCAB)]
    rules = TokenRules(VOCAB, frozenset({EOS}), words=barred, inner=constraint)
    return SamplingParams(max_tokens=8, temperature=1.0, constraint=rules)


def test_where_nothing_may_come_that_request_ends_alone_and_no_draft_runs_into_it() -> None:
    """A draft that could not go on must not fail a text that never comes there."""

    def ends(engine: Engine) -> list[list[int] | str]:
        handles = [engine.submit(p, replace(dead_end(), seed=i)) for i, p in enumerate(PROMPTS * 2)]
        engine.wait(lambda: all(h.done for h in handles))
        return [str(h.request.error) if h.request.error else h.request.output_ids for h in handles]

    alone = ends(Engine(model()))
    assert {type(end) for end in alone} == {str, list}
    assert all("no token may come next" in end for end in alone if isinstance(end, str))
    cascade = CascadeSource(NgramSource(1), ModelSource(model(8), VOCAB), StaticTree(width=1, depth=4))
    for source in (*sources().values(), cascade):
        assert ends(Engine(model(), Speculation(TreeDrafter(StaticTree(width=3, depth=3), source), 30))) == alone


@pytest.mark.parametrize("verification", ["multi-round", "top1-residual"])
def test_drawn_children_are_allowed_ones(verification: str) -> None:
    seen = Drafted()
    source: DraftSource = sources()["model"]
    drafter = TreeDrafter(StaticTree(width=2, depth=2), source)
    engine = Engine(model(), Speculation(drafter, 6, find_scheme(verification)), observers=[seen])
    params = SamplingParams(max_tokens=12, temperature=1.0, allowed_token_ids=(0, 3), seed=3)
    found = engine.generate(PROMPTS, params)
    assert {token for g in found for token in g.token_ids} == {0, 3}
    assert seen.paths and {token for path in seen.paths for token in path} == {0, 3}


TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), TOKENIZER, name="tiny", self_test=False)


QUESTION = "the cat in the hat"


def test_bad_words_do_not_come(target: HFModel) -> None:
    """Each as the tokenizer spells it, with a space before it and without."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    whole = Engine(target).generate([QUESTION], params)[0].text
    barred = sorted({whole[at : at + n] for n in (1, 2) for at in range(0, 30, 3) if whole[at : at + n].strip()})
    spellings = [tuple(TOKENIZER.encode(text)) for word in barred for text in (word.strip(), f" {word.strip()}")]
    engine = Engine(target, Speculation(TreeDrafter(OptTree(), sources()["lookup"]), 9))
    given = replace(params, bad_words=tuple(barred))
    found, alone = engine.generate([QUESTION], given)[0], Engine(target).generate([QUESTION], given)[0]
    assert found.token_ids == alone.token_ids and found.text != whole
    for spelling in spellings:
        ends = range(len(spelling), len(found.token_ids) + 1)
        assert not any(tuple(found.token_ids[end - len(spelling) : end]) == spelling for end in ends)


def test_params_of_a_request_may_be_given_again(target: HFModel) -> None:
    """As ``generate --compare`` does: nothing counts twice."""
    params = SamplingParams(
        max_tokens=20,
        temperature=1.0,
        seed=2,
        min_tokens=4,
        bad_words=("a",),
        repetition_penalty=1.3,
        logit_bias={7: 2.0},
    )
    engine = Engine(target)
    first = engine.submit(QUESTION, params)
    again = engine.submit(QUESTION, first.request.params)
    assert first.result().token_ids == again.result().token_ids
    assert replace(again.request.params, constraint=None) == replace(first.request.params, constraint=None)


TAKEN_BACK: dict[str, tuple[Any, Any]] = {
    "min_tokens": (30, 0),
    "bad_words": (("a", "the"), ()),
    "allowed_token_ids": (tuple(range(9, 60)), None),
}
"""What rules tokens out, and its default."""


@pytest.mark.parametrize("name", TAKEN_BACK)
@pytest.mark.parametrize("inner", [None, TokenRules(TINY_VOCAB, frozenset(), allowed=range(5, TINY_VOCAB))])
def test_params_given_again_without_a_rule_are_those_that_never_had_it(
    name: str, inner: Constraint | None, target: HFModel
) -> None:
    """It stayed in the constraint that the request before had made of it."""
    engine, off = Engine(target), {name: TAKEN_BACK[name][1]}
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "stop_token_ids": (11, 12)}
    options["constraint"] = inner
    alone = SamplingParams(**options, **{name: TAKEN_BACK[name][0]})
    ruled = engine.request(QUESTION, alone).params
    assert ruled.constraint is not inner
    assert engine.request(QUESTION, replace(ruled, **off)).params == replace(alone, **off)
    every = SamplingParams(**options, **{each: on for each, (on, _) in TAKEN_BACK.items()})
    again = replace(engine.request(QUESTION, every).params, **off)
    found, never = engine.generate([QUESTION] * 2, [again, replace(every, **off)])
    assert found.token_ids == never.token_ids


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_and_biases_come_before_processors(target: HFModel, temperature: float, drafter: str) -> None:
    prompt = len(TOKENIZER.encode(QUESTION))
    last = as_processor(lambda text: {5}, 0)
    made = (penalised(prompt, 1.2, 0.5, 0.3), biased({7: 3.0, 9: -100.0}), last)
    drawn: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    given = SamplingParams(
        **drawn,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias={7: 3.0, 9: -100.0},
        processors=(last,),
    )
    source = sources()["lookup"] if drafter == "lookup" else ModelSource(target.twin(), TINY_VOCAB)
    found = Engine(target, Speculation(TreeDrafter(OptTree(), source))).generate([QUESTION], given)[0]
    assert found.token_ids == Engine(target).generate([QUESTION], SamplingParams(**drawn, processors=made))[0].token_ids


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_what_ends_a_text_belongs_to_it_where_that_is_wanted(target: HFModel, kind: str, include: bool) -> None:
    whole = Engine(target).generate([QUESTION], SamplingParams(max_tokens=40))[0]
    at = next(i for i, t in enumerate(whole.token_ids) if i > 4 and t not in whole.token_ids[:i])
    text = str(TOKENIZER.decode([whole.token_ids[at]]))
    end: dict[str, Any] = {"stop": (text,)} if kind == "stop" else {"stop_token_ids": (whole.token_ids[at],)}
    params = SamplingParams(max_tokens=40, include_stop_str_in_output=include, **end)
    found = Engine(target, Speculation(TreeDrafter(OptTree(), sources()["lookup"]))).generate([QUESTION], params)[0]
    before = str(TOKENIZER.decode(whole.token_ids[:at]))
    assert found.finish_reason == "stop" and found.text == before + text * include
    assert found.token_ids == whole.token_ids[: at + 1]


def test_no_stop_string_counts_before_the_least_number_of_tokens(target: HFModel) -> None:
    whole = Engine(target).generate([QUESTION], SamplingParams(max_tokens=40))[0]
    letter = whole.text.strip()[0]
    texts = [chunk.text for chunk in whole.chunks]
    for least in (0, 5, 20):
        params = SamplingParams(max_tokens=40, min_tokens=least, stop=(letter,))
        found = Engine(target).generate([QUESTION], params)[0]
        at = next((i for i, text in enumerate(texts) if i >= least and letter in text), None)
        assert len(found.token_ids) == (40 if at is None else at + 1)
        if at is not None:
            assert found.text == "".join(texts[:at]) + texts[at][: texts[at].index(letter)]


def test_special_tokens_give_text_where_that_is_wanted(target: HFModel) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, allowed_token_ids=(0, 1, 7))
    texts = [
        Engine(target).generate([QUESTION], replace(params, skip_special_tokens=skip))[0] for skip in (True, False)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    assert "<" not in texts[0].text and ("<s>" in texts[1].text or "<unk>" in texts[1].text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens is 9: .*max_tokens, 4"),
        ({"bad_words": ("a", " ")}, "bad_words are"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias is"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids is"),
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [-1, TINY_VOCAB])
def test_tokens_that_the_model_has_not_are_refused_by_the_fields_name(target: HFModel, field: str, token: int) -> None:
    params = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else (token,)})  # type: ignore[arg-type]
    with pytest.raises(FieldError, match=f"{field} has {token}: .* 0 to {TINY_VOCAB - 1}") as caught:
        Engine(target).submit(QUESTION, params)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["x" * 5000, "a\udc00"], ids=["long", "half a character"])
@pytest.mark.parametrize("field", ["prompt", "prediction", "bad_words"])
def test_a_text_that_cannot_be_encoded_is_named_as_what_it_is(target: HFModel, field: str, text: str) -> None:
    """A bad word longer than the context was refused as a prompt."""
    params = SamplingParams(bad_words=(text,) if field == "bad_words" else ())
    prediction = text if field == "prediction" else ""
    with pytest.raises(FieldError) as caught:
        Engine(target).submit(text if field == "prompt" else QUESTION, params, prediction=prediction)
    named = {"prompt": "the prompt ", "prediction": "the prediction ", "bad_words": "bad_words has "}
    assert caught.value.field == field
    assert [name for name, words in named.items() if words in str(caught.value)] == [field]


def test_bad_words_need_text_and_beams_take_none() -> None:
    with pytest.raises(InputError, match="bad_words has 'a'"):
        Engine(ToyModel()).submit([1], SamplingParams(bad_words=("a",)))
    for values in ({"bad_words": ("a",)}, {"min_tokens": 2}, {"allowed_token_ids": (1,)}, {"stop_token_ids": (1,)}):
        with pytest.raises(ConfigError, match=f"beams .*{next(iter(values))}"):
            BeamParams(width=2).check(SamplingParams(**values))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 61])
def test_the_mask_has_a_bit_for_each_token(vocab: int) -> None:
    allowed = tuple(range(0, vocab, 3))
    state = TokenRules(vocab, frozenset(), allowed=allowed, words=[(0,)]).start()
    assert np.flatnonzero(state.allows(np.arange(vocab))).tolist() == list(allowed[1:])
