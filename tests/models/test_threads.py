"""One model and two threads: wrong tokens are an error, engines of one thread share a model as they like."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from draftree.config import SamplingParams
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import EngineRequest, Speculation
from draftree.errors import CacheError
from draftree.models.base import Nodes, prefill
from draftree.models.huggingface.hf_model import HFModel

from ..pairs import begun, policy
from ..references import extended
from ..tiny import causal_logits, tiny

PROMPTS = [11, 7, 5, 3], [2, 13, 17, 19, 23]
PARAMS = SamplingParams(max_tokens=24)


class Gate:
    """Holds the passes of one thread until it is opened."""

    def __init__(self, model: HFModel) -> None:
        self._held = 0
        self._inside, self._opened = threading.Event(), threading.Event()
        model.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        if threading.get_ident() == self._held:
            self._inside.set()
            assert self._opened.wait(60)

    @contextmanager
    def held(self, work: Callable[[], None]) -> Iterator[None]:
        """``work`` runs in a thread of its own, which is inside a pass meanwhile, and ends after that."""

        def run() -> None:
            self._held = threading.get_ident()
            work()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert self._inside.wait(60)
            yield
        finally:
            self._opened.set()
            thread.join()


def engine(model: HFModel) -> Engine:
    return Engine(model, Speculation(load_drafter("lookup", model, policy("static")), 8))


def to_the_end(made: Engine, request: EngineRequest) -> list[int]:
    while request.finish_reason is None:
        made.stepper.step([request])
    made.stepper.close(request)
    return request.output_ids


@pytest.fixture
def model() -> HFModel:
    return HFModel(tiny())


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return [engine(HFModel(tiny())).generate([list(p)], PARAMS)[0].token_ids for p in PROMPTS]


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "one set of weights"])
def test_a_step_inside_another_threads_pass_is_refused(shared: bool, model: HFModel, wanted: list[list[int]]) -> None:
    """Two engines on one target in two threads gave each other's tokens: the cache has one placement, and a pass of the
    second thread moved it between the first one's placing and writing."""
    first, second = engine(model), engine(model if shared else HFModel(model.model))
    sequences = [begun(e.stepper, e.request(list(p), PARAMS)) for e, p in zip((first, second), PROMPTS, strict=True)]
    done: list[list[int]] = []

    def work() -> None:
        done.append(to_the_end(first, sequences[0]))

    with Gate(model).held(work):
        with pytest.raises(CacheError, match="another thread"):
            second.stepper.step([sequences[1]])
        with pytest.raises(CacheError, match="another thread"):
            begun(second.stepper, second.request([1, 2]))
    assert done == [wanted[0]]
    assert to_the_end(second, sequences[1]) == wanted[1], "the refused step has changed nothing"
    assert model.rows == 0


def test_closing_waits_for_another_threads_pass(model: HFModel) -> None:
    """An engine that was refused closes its rows all the same: they would stay in the cache for ever."""
    rows = [prefill(model, list(p)) for p in PROMPTS]
    logits: list[Tensor] = []
    closing = threading.Thread(target=model.close, args=(rows[1],))
    with Gate(model).held(lambda: logits.append(extended(model, [rows[0]], [Nodes.chain([6])]))):
        closing.start()
        assert model.rows == 2
    closing.join()
    assert model.rows == 1
    assert torch.allclose(logits[0][0, 0], causal_logits(model.model, [*PROMPTS[0], 6])[-1], atol=1e-4)


def test_engines_of_one_thread_share_a_model(model: HFModel, wanted: list[list[int]]) -> None:
    streams = [engine(model).stream(list(p), PARAMS) for p in PROMPTS]
    taken: list[list[int]] = [[], []]
    for pair in zip(*streams, strict=True):
        for tokens, chunk in zip(taken, pair, strict=True):
            tokens.append(chunk.token)
    assert taken == wanted


def test_threads_may_take_turns(model: HFModel, wanted: list[list[int]]) -> None:
    """As where a server runs each step of a stream in whatever thread is free."""
    stream, taken = engine(model).stream(list(PROMPTS[0]), PARAMS), []
    for _ in range(PARAMS.max_tokens or 0):
        thread = threading.Thread(target=lambda: taken.append(next(stream).token))
        thread.start()
        thread.join()
    assert taken == wanted[0]


def test_what_drafts_on_the_targets_weights_is_held_with_it() -> None:
    target = HFModel(tiny())
    made = Engine(target, Speculation(load_drafter("self", target, policy("static")), 4))
    errors: list[type[Exception]] = []

    def work() -> None:
        try:
            made.generate([list(PROMPTS[0])], PARAMS)
        except CacheError as error:
            errors.append(type(error))

    with target._lock:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors == [CacheError]
