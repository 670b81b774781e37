"""Ctrl-C inside a pass of the target: the requests of the step go on in a later one, and their texts are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import Drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.llama.linear_model import LinearModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.loading import load_llama
from draftree.models.native.native_model import NativeModel
from draftree.policies.base import ChildSampler
from draftree.policies.fixed import StaticTree
from draftree.request import Request
from draftree.tree import DraftTree

from . import tiny_gguf
from .toy import chain_tree

PROMPTS = [[first, *(20 + i % 7 for i in range(30))] for first in (1, 2)]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


class Alternating(Drafter):
    """Drafts chains of two tokens: in turn others than those of the answer, and those.

    Args:
        answers: by the first token of the prompt.
    """

    policy = StaticTree(1, 3)

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers, self._wrong = answers, False

    def propose(
        self,
        requests: Sequence[Request],
        budgets: Sequence[Budget],
        coupled: bool = True,
        other_tokens: int = 0,
        reading: int | None = None,
        sampler: type[ChildSampler] | None = None,
    ) -> list[DraftTree]:
        self._wrong, trees = not self._wrong, list[DraftTree]()
        for request in requests:
            answer, gained = self._answers[request.ids[0]], len(request.output_ids)
            trees.append(chain_tree([(token + self._wrong) % 256 for token in answer[gained : gained + 3][:-1]]))
        return trees


Loader = Callable[[Path], tuple[Any, Any, str]]
"""A model, and what makes its passes: an object, and the name of its method."""


def native(folder: Path) -> tuple[Any, Any, str]:
    model = NativeModel(tiny_gguf.write(folder / "m.gguf", weights="Q8_0"), threads=2)
    return model, model.loaded, "extend"


def llama(folder: Path) -> tuple[Any, Any, str]:
    model = load_llama(str(tiny_gguf.write(folder / "m.gguf", weights="Q8_0")), threads=1)
    assert isinstance(model, LlamaModel)
    return model, model._context, "decode"


def recurrent(folder: Path) -> tuple[Any, Any, str]:
    model = load_llama(str(tiny_gguf.write(folder / "m.gguf", architecture="mamba")), threads=1)
    assert isinstance(model, LinearModel)
    return model, model._context, "decode"


@pytest.mark.parametrize("load", [native, llama, recurrent], ids=lambda load: load.__name__)
def test_requests_of_an_interrupted_step_go_on(load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C had read the nodes, and Python did not know: the next trees hung below them, or ended the requests."""
    model, owner, name = load(tmp_path)
    expected = [Engine(model).generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]
    answers = {prompt[0]: answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    call, passes, moment = getattr(owner, name), 0, 0

    def interrupted(*arguments: object) -> object:
        nonlocal passes
        passes += 1
        result = call(*arguments)
        if passes == moment:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    for at in range(1, 11):
        passes, moment, interrupts, pieces = 0, at, 0, cycle([7, 20])
        engine = Engine(model, Speculation() if load is recurrent else Speculation(Alternating(answers), 3))
        requests = [engine.request(prompt, PARAMS) for prompt in PROMPTS]
        for request in requests:
            engine.stepper.open_row(request)
        while running := [request for request in requests if request.finish_reason is None]:
            try:
                engine.stepper.step(running, next(pieces))
            except KeyboardInterrupt:
                interrupts += 1
        assert [request.output_ids for request in requests] == expected and interrupts == 1
        for request in requests:
            engine.stepper.close(request)
    assert not model.rows
