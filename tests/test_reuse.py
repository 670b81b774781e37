"""What is read again of a text: with drafts no more than without, however an answer ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from draftree import METHODS, Engine, Generation, SamplingParams, SchedulerParams, SpeculationParams
from draftree.models.base import LanguageModel, Nodes, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.llama.llama_model import LlamaModel
from draftree.models.native.native_model import NativeModel
from draftree.scores import Scores
from draftree.text.encoding import Tokenizer

from . import tiny_gguf
from .tiny import tiny, tiny_tokenizer
from .toy import ToyModel

PROMPT = [5 + i % 7 for i in range(24)]
NEXT = [9, 8, 7]
"""What a user says in the next turn."""
COMPLETE = [name for name in METHODS if name != "sequoia"]
LENGTH = 12
"""Tokens of an answer that nothing ends before."""


class Letters:
    """A tokenizer of one character a token."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 0x4E00 for letter in text]

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(chr(0x4E00 + token) for token in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> object:
        raise NotImplementedError

    def get_vocab(self) -> dict[str, int]:
        return {self.decode([token]): token for token in range(40)}


class Toy(ToyModel):
    """A toy with texts.

    Attributes:
        most: most tokens that it was fed at once.
    """

    def __init__(self) -> None:
        super().__init__(40, spread=12.0, max_length=128)
        self.tokenizer, self.most = cast(Tokenizer, Letters()), 0

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        self.most = max(self.most, *(len(new.tokens) for new in nodes))
        return super().extend(rows, nodes)


Models = tuple[Any, Any]
"""A target, and a draft model that predicts the same."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Models]:
    @functools.cache
    def made(backend: str) -> Models:
        file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        makers: Mapping[str, Callable[[], LanguageModel]] = {
            "toy": Toy,
            "transformers": lambda: HFModel(tiny(), tiny_tokenizer(), self_test=False),
            "llama.cpp": lambda: LlamaModel(tiny_gguf.write(file, weights="Q8_0")),
            "native": lambda: NativeModel(tiny_gguf.write(file, weights="Q8_0")),
        }
        return makers[backend](), makers[backend]()

    return made


def ends(found: Generation) -> dict[str, tuple[dict[str, Any], frozenset[int]]]:
    """Why an answer ends a few tokens after its first -> settings for it, and the tokens that end a text.

    Args:
        found: the answer that nothing ends.
    """
    ids, texts = found.token_ids, [chunk.text for chunk in found.chunks]
    at = next(i for i in range(3, LENGTH) if ids[i] not in ids[:i] and texts[i] not in ("", *texts[:i]))
    return {
        "eos": ({}, frozenset({ids[at]})),
        "stop": ({"stop": [texts[at]]}, frozenset()),
        "length": ({"max_tokens": at + 1}, frozenset()),
    }


def read(
    engine: Engine, settings: Mapping[str, Any], before: Callable[[], None] = lambda: None
) -> tuple[Generation, list[int]]:
    """An answer; how many tokens of the same prompt, and of the next turn's, are read then."""
    params = SamplingParams(**settings)
    (first,) = engine.generate([PROMPT], params)
    turn = [*PROMPT, *first.token_ids, *NEXT]
    before()
    (again,) = engine.generate([PROMPT], params)
    (after,) = engine.generate([turn], replace(params, max_tokens=1))
    engine.stepper.prefixes.clear()
    assert again.token_ids == first.token_ids
    return first, [len(PROMPT) - again.stats.reused, len(turn) - after.stats.reused]


@pytest.mark.filterwarnings("ignore::draftree.DraftreeWarning")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("backend", "method"),
    [
        *(("toy", name) for name in COMPLETE),
        *((backend, name) for backend in ("transformers", "llama.cpp") for name in ("chain", "auto")),
    ],
)
def test_drafts_make_nobody_read_more(
    models: Callable[[str], Models], backend: str, method: str, temperature: float
) -> None:
    """An answer that ended inside an accepted path left a row with the rest of the path, which was given up: the next
    turn of a chat read all of it again."""
    (target, draft), chain = models(backend), method == "chain"
    settings: dict[str, Any] = {"max_tokens": LENGTH, "temperature": temperature, "seed": 3}
    scheduling, can = SchedulerParams(prefixes=3), target.capabilities
    (whole,) = Engine(target).generate([PROMPT], SamplingParams(**settings))
    for reason, (more, eos_ids) in ends(whole).items():
        target.capabilities = replace(can, eos_ids=eos_ids)
        undrafted, expected = read(Engine(target, scheduling=scheduling), settings | more)
        speculation = SpeculationParams(drafter=draft, method=method, settings={"depth": 8} if chain else None)
        drafted, found = read(Engine(target, speculation, scheduling=scheduling), settings | more)
        target.capabilities = can
        assert undrafted.finish_reason == drafted.finish_reason == reason
        assert undrafted.token_ids == drafted.token_ids
        assert all(one <= other for one, other in zip(found, expected, strict=True)), reason
        if chain and reason != "length":
            assert drafted.chunks[-1].drafted, "it did not end inside an accepted path"


def test_a_draft_model_reads_no_text_again(models: Callable[[str], Models]) -> None:
    target, draft = models("toy")
    (whole,) = Engine(target).generate([PROMPT], SamplingParams(max_tokens=LENGTH))

    def forget() -> None:
        draft.most = 0

    for reason, (more, _) in ends(whole).items():
        speculation = SpeculationParams(drafter=draft, method="chain", settings={"depth": 8})
        engine = Engine(target, speculation, scheduling=SchedulerParams(prefixes=3))
        read(engine, {"max_tokens": LENGTH, **more}, forget)
        assert 0 < draft.most < len(PROMPT) / 2, reason


class Reads:
    """Counts the tokens that a model is fed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LanguageModel) -> None:
        self.tokens, extend = 0, model.extend

        def counted(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
            self.tokens += sum(len(new.tokens) for new in nodes)
            return extend(rows, nodes)

        monkeypatch.setattr(model, "extend", counted)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("backend", ["toy", "transformers", "llama.cpp", "native"])
def test_a_beginning_that_requests_share_is_read_once(
    models: Callable[[str], Models], backend: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = models(backend)
    texts = [[*PROMPT, *PROMPT, 3 + i, 4 + i, *PROMPT[:i]] for i in range(6)]
    params = SamplingParams(max_tokens=3)
    alone = [Engine(target).generate([text], params)[0].token_ids for text in texts]
    engine = Engine(target, scheduling=SchedulerParams(rows=6, chunk=chunk))
    reads = Reads(monkeypatch, target)
    assert [answer.token_ids for answer in engine.generate(texts, params)] == alone
    own = sum(len(text) - 2 * len(PROMPT) for text in texts)
    assert reads.tokens <= 2 * len(PROMPT) + own + 6 * 3
    assert backend == "toy" or not target.rows


@pytest.mark.parametrize("how", ["cancelled", "fails", "ends", "late"])
def test_who_waits_for_a_beginning_goes_on_without_its_reader(models: Callable[[str], Models], how: str) -> None:
    target, _ = models("native")
    params = SamplingParams(max_tokens=3)
    text, other = [*PROMPT, *PROMPT, 3], [*PROMPT, *PROMPT, 4]
    (alone,) = Engine(target).generate([other], params)
    engine = Engine(target, scheduling=SchedulerParams(rows=3, chunk=16))
    busy = engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
    while not busy.request.decodes:
        engine.advance()
    reader = engine.submit(text, SamplingParams(max_tokens=1) if how == "ends" else params)
    engine.advance()
    waiting = engine.submit(other, params)
    if how != "late":
        engine.advance()
        assert waiting.request.row is not None
        assert not waiting.request.row.length, "it does not wait"
    if how == "cancelled":
        reader.cancel()
    elif how == "fails":
        reader.request.fail(RuntimeError("broken"))
    engine.wait(lambda: waiting.done)
    assert waiting.generation.token_ids == alone.token_ids
    assert waiting.request.stats.reused == (0 if how in ("cancelled", "fails") else 2 * len(PROMPT))
    busy.cancel()
    engine.wait(lambda: busy.done and reader.done)
    assert not target.rows
