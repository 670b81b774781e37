"""A draft model whose cache is full: what it drafts for is decoded without drafts, and it drafts again later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftree import Engine, SamplingParams, SchedulerParams, Speculation, SpeculationParams
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import EagleSource, ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine import speculation as speculations
from draftree.models.base import Nodes, Row
from draftree.models.heads.head_folder import load_head
from draftree.models.memory import cache_full
from draftree.models.native.native_model import NativeModel
from draftree.papers.cascade import CascadeSource, LoopBack
from draftree.scores import Scores
from draftree.verify.schemes import SCHEMES

from .. import tiny_gguf
from ..pairs import policy
from ..published import Recipe
from ..tiny import tiny_tokenizer
from ..toy import ToyModel

VOCAB, TOKENS = 64, 24
PROMPTS = [[first, *(i % 5 for i in range(12))] for first in range(3)]
GREEDY, SAMPLED = SamplingParams(max_tokens=TOKENS), SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5)


class Bounded(ToyModel):
    """A toy with a cache of so many tokens, nodes included.

    Attributes:
        reserved: the most tokens of a row that were reserved.
        longest: tokens of the longest row that it made a pass over.
    """

    def __init__(self, most: int | None = None, max_length: int = 64) -> None:
        super().__init__(VOCAB, spread=12.0, max_length=max_length)
        self.most_tokens, self.tokenizer, self.reserved, self.longest = most, tiny_tokenizer(), 0, 0

    @property
    def held(self) -> int:
        return sum(len(self._ids[row]) + len(self._nodes[row]) for row in self._rows)

    def reserve(self, rows: int, tokens: int) -> None:
        self.reserved = max(self.reserved, tokens)

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        needed = self.held + sum(len(new.tokens) for new in nodes)
        if self.most_tokens is not None and needed > self.most_tokens:
            raise cache_full(f"{needed} tokens take", needed, self.most_tokens)
        self.longest = max([self.longest, *(row.length for row in rows)])
        return super().extend(rows, nodes)


def alone(model: Bounded) -> DraftSource:
    return ModelSource(model, VOCAB)


def beside_lookup(model: Bounded) -> DraftSource:
    return EnsembleSource((NgramSource(), ModelSource(model, VOCAB)))


def above_lookup(model: Bounded) -> DraftSource:
    return CascadeSource(NgramSource(), ModelSource(model, VOCAB), policy("chain"), LoopBack(), ("lookup", "toy"))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["chain", "static", "opt-tree", "auto"])
@pytest.mark.parametrize("source", [alone, beside_lookup, above_lookup], ids=lambda make: make.__name__)
@pytest.mark.parametrize("most", [0, 20, 33, 60, 90])
def test_requests_go_on_without_drafts(
    most: int, source: Callable[[Bounded], DraftSource], method: str, params: SamplingParams
) -> None:
    """The draft model's cache had no room, and the request ended with an error though the target's had."""
    target, draft = Bounded(), Bounded(most)
    expected = [each.token_ids for each in Engine(target).generate(PROMPTS, params)]
    chosen = Speculation(TreeDrafter(policy(method), source(draft)), 6)
    engine = Engine(target, chosen, scheduling=SchedulerParams(prefixes=4))
    assert [each.token_ids for each in engine.generate(PROMPTS, params)] == expected
    assert draft.held <= most


@pytest.mark.parametrize("scheme", ["multi-round", "multi-round-replacement"])
@pytest.mark.parametrize("most", [0, 20, 33, 60, 90])
def test_requests_whose_trees_are_drawn_go_on(most: int, scheme: str) -> None:
    engine = Engine(Bounded(), Speculation(TreeDrafter(policy("static"), alone(Bounded(most))), 6, SCHEMES[scheme]))
    assert [len(each.token_ids) for each in engine.generate(PROMPTS, SAMPLED)] == [TOKENS] * 3


def test_it_drafts_again_when_there_is_room_and_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    draft = Bounded(40)
    speculation = SpeculationParams(drafter=draft, method="chain", nodes=4)
    engine = Engine(Bounded(), speculation, scheduling=SchedulerParams(prefixes=8))
    for _ in range(2):
        engine.generate(PROMPTS, GREEDY)
    (one,) = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    assert sum(one.stats.accepted)
    (line,) = [r for r in caplog.records if r.name == "draftree.drafters" and r.levelno == logging.WARNING]
    assert "cache is full" in line.getMessage()


def test_what_is_kept_gives_way_to_a_request() -> None:
    draft = Bounded(80)
    chosen = SpeculationParams(drafter=draft, method="chain", nodes=4)
    engine = Engine(Bounded(), chosen, scheduling=SchedulerParams(prefixes=8))
    engine.generate([PROMPTS[0]], GREEDY)
    (found,) = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=51))
    assert len(found.token_ids) == 51
    assert draft.longest > 55, "it drafts to the end"


def test_what_is_kept_makes_room_before_a_text_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """Kept rows may take all of the cache: a text would be read, its proposal given up, and all kept rows with it."""
    draft = Bounded(120)
    engine = Engine(
        Bounded(),
        SpeculationParams(drafter=draft, method="chain", nodes=4),
        scheduling=SchedulerParams(prefixes=8),
    )
    for prompt in PROMPTS:
        engine.generate([prompt], GREEDY)
    (found,) = engine.generate([[9, *PROMPTS[0]]], SamplingParams(max_tokens=50))
    assert sum(found.stats.drafted) and not [r for r in caplog.records if r.name == "draftree.drafters"]
    assert draft.held > 70, "one of the others is still kept"


def test_speculations_of_one_draft_model_keep_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept rows of its own, those that were evicted for ever: a server whose clients chose budgets ended
    requests for want of cache after some hundred chats."""
    monkeypatch.setattr(speculations, "_KEPT", 4)
    draft = Bounded()
    engine = Engine(Bounded(), scheduling=SchedulerParams(prefixes=3))
    for nodes in range(1, 13):
        params = SpeculationParams(drafter=draft, method="chain", nodes=nodes)
        (found,) = engine.generate([[nodes, *PROMPTS[0]]], SamplingParams(max_tokens=8), params)
        assert sum(found.stats.drafted)
        assert len(draft._rows) <= 3
    assert draft._rows


def test_no_more_is_reserved_than_a_draft_model_reads() -> None:
    """Room for a text of 128,000 tokens was made in a draft model that reads 2,048."""
    draft = Bounded(max_length=24)
    engine = Engine(Bounded(), SpeculationParams(drafter=draft, method="chain"))
    engine.generate(PROMPTS, SamplingParams(max_tokens=40))
    assert draft.reserved == 24
    draft.reserved = 0
    engine.generate(PROMPTS, SamplingParams(max_tokens=4))
    assert draft.reserved == 13 + 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.write(folder / "target.gguf", layers=3, hidden=64, heads=2, kv_heads=1, weights="Q8_0")
    tiny_gguf.write(folder / "draft.gguf", weights="Q4_0")
    Recipe(vocab=274, target_size=64, size=64, width=16, wide=64, drafted=tuple(range(0, 274, 2))).save(
        folder / "head", "speculators"
    )
    return folder


@pytest.mark.parametrize("lookup", [False, True], ids=["alone", "beside lookup"])
@pytest.mark.parametrize("method", ["chain", "opt-tree", "auto", "dynamic-width"])
@pytest.mark.parametrize("pages", [0, 3, 5, 9])
@pytest.mark.parametrize("kind", ["draft", "head"])
def test_requests_of_the_native_engine_go_on(kind: str, pages: int, method: str, lookup: bool, folder: Path) -> None:
    target, prompts = NativeModel(folder / "target.gguf"), [[first, *range(20, 60)] for first in (3, 5, 7)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [each.token_ids for each in Engine(target).generate(prompts, params)]
    model: Any = load_head(folder / "head", target) if kind == "head" else NativeModel(folder / "draft.gguf")
    model.cache_bytes = pages * model.loaded.page_bytes
    own = EagleSource(model, 274) if kind == "head" else ModelSource(model, 274)
    source = EnsembleSource((NgramSource(), own)) if lookup else own
    engine = Engine(target, Speculation(TreeDrafter(policy(method), source), 8), scheduling=SchedulerParams(prefixes=2))
    for _ in range(2):
        assert [each.token_ids for each in engine.generate(prompts, params)] == expected
    assert model.loaded.cache_bytes() <= model.cache_bytes
    if pages == 9 and not lookup and method == "chain":
        (one,) = engine.generate(prompts[:1], params)
        assert sum(one.stats.drafted)
