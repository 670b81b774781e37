"""Every number of a request at the bounds of what may hold it: it is refused by its name, or the request decodes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import InputError
from draftree.models.base import LanguageModel
from draftree.models.native.native_model import NativeModel
from draftree.openai.batches import COMPLETIONS, Answering, BatchLine
from draftree.policies.methods import METHODS

from ..tiny_gguf import write
from .running import NAME, TEXT, Running, posted, running, target

pytestmark = pytest.mark.filterwarnings("ignore::draftree.errors.DraftreeWarning")  # c2t's classifier is of others

_POWERS = (7, 8, 15, 16, 31, 32, 53, 63, 64, 100)
WHOLE = sorted({0, 1, 2, 21, 273, 274, 4097, *(s * 2**p + d for p in _POWERS for s in (1, -1) for d in (-1, 0, 1))})
_SIZES: tuple[float, ...] = (5e-324, 1e-320, 1e-46, 1e-45, 1e-39, 1.2e-38, 1e-30, 1e-21, 1e-20, 1e-10, 1e-4, 0.5, 1.0)
_SIZES += (1 - 1e-9, 1 + 1e-9, 2.0, 10.0, 100.0, 1e10, 1e30, 3.4e38, 3.5e38, 1e300, 1.7e308, math.inf)
REAL = [0.0, math.nan, *_SIZES, *(-size for size in _SIZES)]
SAMPLING: Mapping[str, list[Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "seed", "top_k", "logprobs"), [*WHOLE, *REAL]),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), [*REAL, *WHOLE]),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), [*REAL, *WHOLE]),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), [[x] for x in [*WHOLE, *REAL]]),
    "logit_bias": [{5: x} for x in [*REAL, *WHOLE]] + [{x: 1.0} for x in WHOLE],
}
"""Fields of ``SamplingParams``, and what they are set to."""
_METHODS = [(name, key, value) for name, method in METHODS.items() for key, value in method.settings.items()]
_SETTINGS = [
    {"method": name, "settings": {key: x}}
    for name, key, value in _METHODS
    if not isinstance(value, str)
    for x in [*REAL, *map(float, WHOLE[::7])]
]
SENT: Mapping[str, list[Any]] = {
    **SAMPLING,
    **dict.fromkeys(("n", "priority", "timeout"), [*WHOLE, *REAL]),
    "prompt": [[x] for x in [*WHOLE, *REAL]],
    "draftree": [{"nodes": x} for x in [*WHOLE, *REAL]] + _SETTINGS,
}
"""Fields of a body."""
_BASE = {"max_tokens": 3, "temperature": 1.0}


@pytest.fixture(scope="module", params=["native", "transformers"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LanguageModel]:
    """Makes a model."""
    if request.param == "transformers":
        return target
    path = write(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=1, hidden=64, heads=2, context=128)
    return lambda: NativeModel(path, name=NAME, threads=1)


@pytest.fixture(scope="module")
def model(made: Callable[[], LanguageModel]) -> LanguageModel:
    return made()


@pytest.fixture(scope="module")
def served(made: Callable[[], LanguageModel]) -> Iterator[Running]:
    """A server with a model of its own: where it is idle it measures what passes cost."""
    with running(made()) as found:
        yield found


@pytest.mark.parametrize("field", SAMPLING)
def test_python_decodes_or_refuses_each_number_by_name(model: LanguageModel, field: str) -> None:
    """``top_k`` 2^31 did not fit the struct that C gets, and ``top_p`` 1e-46 was 0 in it."""
    engine, decoded = Engine(model, SpeculationParams(drafter="lookup", method="chain")), 0
    for value in SAMPLING[field]:
        values: dict[str, Any] = {"seed": 1, **_BASE, field: tuple(value) if isinstance(value, list) else value}
        try:
            params = SamplingParams(**values)
            (found,) = engine.generate([TEXT], params)
        except InputError as error:
            assert field in str(error), value
        else:
            decoded += 1
            assert found.token_ids or params.stop_token_ids
    assert decoded > 0


def _fine(sent: Mapping[str, Any], status: int, found: Mapping[str, Any]) -> bool:
    """It is answered, or refused with the name of a field that was sent."""
    return status == 200 or (status == 400 and any(name in found["error"]["message"] for name in sent))


def _body(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": TEXT, **_BASE, **sent}


@given(sent=st.lists(st.sampled_from(list(SENT)), min_size=1, max_size=3, unique=True), data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_server_answers_or_refuses_each_number_by_name(served: Running, sent: list[str], data: st.DataObject) -> None:
    fields = {name: data.draw(st.sampled_from(SENT[name])) for name in sent}
    status, found = posted(served, "/v1/completions", _body(fields))
    assert _fine(fields, status, found), (fields, status, found)


def test_a_batch_answers_or_refuses_each_number_by_name(model: LanguageModel) -> None:
    """Each number by the native engine, each fourth by transformers, whose passes take longer."""
    default = SpeculationParams(drafter="lookup", method="chain")
    stride = 1 if isinstance(model, NativeModel) else 4
    bodies = [{name: value} for name, values in SENT.items() for value in values[::stride]]
    asked = [{"custom_id": "", "url": COMPLETIONS, "body": {"model": NAME, **_body(sent)}} for sent in bodies]
    lines = [BatchLine(i, json.dumps(line).encode()) for i, line in enumerate(asked)]
    answers = Answering(Engine(model, default), default, NAME, 4).records(lines)
    records = {record["id"]: record["response"] for record in answers}
    found = [records[line.id] for line in lines]
    outcomes = [(sent, each["status_code"], each["body"]) for sent, each in zip(bodies, found, strict=True)]
    assert [each for each in outcomes if not _fine(*each)] == []
    answered = {name for sent, status, _ in outcomes if status == 200 for name in sent}
    assert answered == set(SENT)
