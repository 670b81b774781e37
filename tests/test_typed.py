"""Arguments of wrong types, and sampling settings out of range: refused by name, before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Protocol, get_type_hints, runtime_checkable

import pytest
import torch

import draftree as d
from draftree.config import check_fields, check_type, typed
from draftree.errors import ConfigError, InputError, PromptError
from draftree.models.base import prefill
from draftree.text.encoding import encode

from .pairs import begun
from .toy import ToyModel

WRONG: list[Any] = [None, True, 5, -1, 1.5, float("nan"), 10**30, "x", b"x", [], [None], (1, "a"), {}, object(), len]
WRONG += [torch.zeros(2), {"role": 5, "content": None}]
POLICIES: list[Any] = [d.AutoTree, d.Eagle2Tree, d.OptTree, d.ClassifierTree, d.BranchingSteps, d.EntropyStop]
POLICIES += [d.EntropyTree, d.StaticTree, d.RankTree, d.DynamicWindow, d.Relaxed]


@runtime_checkable
class _Named(Protocol):
    name: str

    def call(self) -> None: ...


class _Thing:
    name = "thing"

    def call(self) -> None: ...


_NEEDED = {"score": len, "paths": ((0,),)}
WRONG_NAMES: list[Any] = [1.5, object(), b"x", [None], torch.float16, torch.zeros(2)]


@dataclass
class _Box:
    size: int
    lid: _Thing | None = None


class _Hints:
    whole: int
    number: float
    text: str | None
    many: Sequence[int]
    row: tuple[int, ...]
    pair: tuple[int, str]
    table: Mapping[str, float]
    function: Callable[[int], int]
    word: Literal["a", "b"]
    named: _Named
    box: _Box


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("whole", [0, -3, 10**30], [True, 1.0, "1", None]),
        ("number", [1, 1.5, float("nan"), float("inf")], [False, "1", None, 10**400, 1j]),
        ("text", ["", None], [b"", 5]),
        ("many", [[], (1, 2)], [{1}, "12", [1, None], 5]),
        ("row", [(), (1,), [1, 2]], [(1, "a"), 5, "12"]),
        ("pair", [(1, "a")], [(1,), ("a", 1), [1]]),
        ("table", [{}, {"a": 1}], [{"a": "b"}, {1: 1}, []]),
        ("function", [len, lambda x: x], [5, None]),
        ("word", ["a", "b"], ["c", True, 2]),
        ("named", [_Thing()], [object(), None]),
        ("box", [_Box(1), _Box(1, _Thing())], [_Box("x"), _Box(1, 5), 5]),  # type: ignore[arg-type]
    ],
)
def test_what_fits_an_annotation(name: str, good: list[object], bad: list[object]) -> None:
    kind = get_type_hints(_Hints)[name]
    for value in good:
        check_type(name, value, kind)
    for value in bad:
        with pytest.raises(ConfigError, match=f"{name} is "):
            check_type(name, value, kind)


def test_a_wrong_argument_is_named() -> None:
    @typed
    def area(width: int, height: int = 1) -> int:
        return width * height

    assert area(2, height=3) == 6
    with pytest.raises(ConfigError, match="height is 'x'"):
        area(2, height="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="size is 2.5"):
        check_fields(_Box(2.5))  # type: ignore[arg-type]


def _ends_well(call: Callable[[], object]) -> None:
    with suppress(InputError):
        call()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.__name__)
def test_settings_of_wrong_types_are_refused(policy: Any) -> None:
    """A width of "x" was a TypeError about "<", and a wrong function or classifier failed in the first step."""
    needed: dict[str, Any] = {f.name: _NEEDED[f.name] for f in fields(policy) if f.name in _NEEDED}
    for name in [f.name for f in fields(policy) if f.init and not f.name.startswith("_")]:
        for value in WRONG:
            _ends_well(partial(policy, **{**needed, name: value}))
        with pytest.raises(InputError):
            policy(**{**needed, name: object()})


def test_a_path_of_a_rank_tree_must_be_a_tuple() -> None:
    """Paths that were lists passed the check, and were a TypeError about unhashable lists."""
    assert d.RankTree([(0,), (0, 0)]).paths == [(0,), (0, 0)]  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ConfigError):
        d.RankTree([[0], [0, 0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_the_engine_refuses_arguments_of_wrong_types(value: Any) -> None:
    """Token ids that were floats, negative or beyond the vocabulary, params that were a dict, and prompts that were
    numbers ended in errors of torch and Python from deep inside, some with rows left open."""
    model = ToyModel(max_length=16)
    engine, params = d.Engine(model), d.SamplingParams(max_tokens=2)
    for call in (
        lambda: engine.generate(value, params),
        lambda: engine.generate([value], params),
        lambda: engine.generate([[value]], params),
        lambda: engine.generate([[1, value]], params),
        lambda: engine.generate([[1]], [value]),
        lambda: list(engine.stream(value, params)),
        lambda: engine.stepper.close(begun(engine.stepper, engine.request(value, params))),
        lambda: d.Engine(model, d.Speculation(nodes=value)),
        lambda: d.Engine(model, value),
        lambda: d.Engine(value),
        lambda: d.Speculation(scheme=value),
        lambda: d.SpeculationParams(candidates=value),
        lambda: d.Engine(model, observers=value),
        lambda: d.BeamEngine(value),
    ):
        _ends_well(call)
    for field in fields(d.SamplingParams):
        _ends_well(partial(_one_token, engine, {field.name: value}))
    for field in fields(d.BeamParams):
        _ends_well(partial(d.BeamParams, **{field.name: value}))
    assert prefill(model, [1]).number == 0


def _one_token(engine: d.Engine, settings: dict[str, Any]) -> None:
    params = d.SamplingParams(**{"max_tokens": 1, **settings})
    if not params.processors and not params.criteria:  # a function that is none of a processor is the caller's to mend
        engine.generate([[1]], params)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"seed": -1},
        {"stop": ("",)},
        {"stop": "END"},
        {"top_k": 2.5},
        {"seed": 1.5},
    ],
)
def test_sampling_settings_out_of_range_are_refused_and_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        d.SamplingParams(**bad)


def test_token_ids_and_params_are_checked() -> None:
    engine = d.Engine(ToyModel(max_length=16))
    for ids in ([1.5], [-1], [5], [1, None], [True]):
        with pytest.raises(PromptError):
            engine.generate([ids])  # type: ignore[list-item]
    for wrong in ({}, 0, "", {"max_tokens": 3}):
        with pytest.raises(ConfigError):
            engine.generate([[1]], wrong)  # type: ignore[arg-type]


def test_the_loaders_refuse_arguments_of_wrong_types(model: str) -> None:
    """``load(5)`` was a TypeError about os.PathLike, and ``device=1.5`` one of torch."""
    loaded = d.load(model)
    for value in WRONG_NAMES:
        for call, arguments in (
            (d.load, (value,)),
            (d.load_drafter, (value, loaded, d.StaticTree())),
            (d.load_drafter, ("lookup", value, d.StaticTree())),
            (d.load_drafter, ("lookup", loaded, value)),
            (d.load_beam_engine, (value,)),
            (d.load_beam_source, (value, loaded)),
            (d.read_classifier, (value,)),
            (d.Trace, (value,)),
            (d.HFModel, (value,)),
            (d.BeamEngine, (loaded, value)),
            (d.BeamEngine(loaded).generate, ([[1]], None, value)),
        ):
            with pytest.raises(InputError):
                call(*arguments)
        for name in ("speculation", "dtype", "device", "observers"):
            with pytest.raises(InputError):
                d.load_engine(model, **{name: value})


def test_text_that_is_not_text_is_refused(model: str) -> None:
    """A lone surrogate was a TypeError of the tokenizer, for which the chat template was blamed."""
    tokenizer = d.load(model).tokenizer
    for prompt in ("a\udcff", d.user("a\udcff"), b"abc", ["a", "b"], 5, [{"role": "user", "content": 5}]):
        with pytest.raises(PromptError):
            encode(tokenizer, prompt)  # type: ignore[arg-type]
