"""Drafting along a known text gives the trees and the acceptance of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter, DraftSource
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.replay import Replay
from draftree.engine.speculation import Observer, Speculation
from draftree.models.base import Nodes, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.papers.opt_tree import OptTree
from draftree.request import Outcome
from draftree.scores import Scores

from .heads import trained
from .pairs import source, target
from .tiny import VOCAB

PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(4 + i)] for i in range(4)]


class Step(NamedTuple):
    """E(A) of a tree, and the tokens that a step with it gains."""

    expected: float
    gained: int


def replay(model: HFModel, drafter: Drafter, prompt: list[int], text: list[int], nodes: int) -> list[Step]:
    verifier = model if model.tracked else None
    steps = []
    with Replay(drafter, prompt, text, SamplingParams(), target=verifier) as known:
        while known.left:
            tree, path = known.step(nodes)
            steps.append(Step(tree.expected_acceptance_length, len(path) + 1))
    return steps


class Steps(Observer):
    """Keeps what decoding gained in each step."""

    def __init__(self) -> None:
        self.seen: list[Step] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.seen += [Step(o.tree.expected_acceptance_length, o.taken) for o in outcomes]


def made(name: str, model: HFModel) -> DraftSource:
    if name == "head":
        return EagleSource(trained(model), VOCAB)
    if "+" in name:
        return EnsembleSource(tuple(made(part, model) for part in name.split("+")))
    return source(name, model)


@pytest.mark.parametrize("name", ["lookup", "relative", "head", "lookup+head"])
def test_a_replay_drafts_and_gains_what_decoding_does(name: str) -> None:
    """One drafter goes through all prompts."""
    model = target()
    decoding, replaying = (TreeDrafter(OptTree(0.01), made(name, model)) for _ in range(2))
    replaying.prepare(model)
    accepted = 0
    for prompt in PROMPTS:
        steps = Steps()
        engine = Engine(model, Speculation(decoding, 9), observers=[steps])
        text = engine.generate([prompt], SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids
        again = replay(model, replaying, prompt, text, 9)
        assert [s.gained for s in again] == [s.gained for s in steps.seen]
        assert [s.expected for s in again] == pytest.approx([s.expected for s in steps.seen], rel=1e-3)
        accepted += sum(s.gained - 1 for s in again)
    assert accepted > 3


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("name", ["lookup", "head"])
def test_the_target_has_read_what_a_replay_has_gained(name: str, drafted: bool) -> None:
    """Whoever measures along a text takes more tokens at a time than were accepted."""
    model, text = target(), [(5 * i) % VOCAB for i in range(20)]
    with Replay(
        TreeDrafter(OptTree(0.01), made(name, model)), PROMPTS[0], text, SamplingParams(), target=model
    ) as known:
        while known.left:
            tree = known.propose(5, 5)
            known.advance(tree, known.accepted(tree) if drafted else [], min(7, len(known.left)))
            assert known.request.row is not None
            assert known.request.row.length == len(known.request.ids) - 1
        assert known.request.row is not None
        found = model.extend([known.request.row], [Nodes.chain(text[-1:])]).logits([0])
    with Replay(Drafter(), PROMPTS[0], text, SamplingParams(), target=model) as again:
        while again.left:
            again.step(0)
        assert again.request.row is not None
        whole = model.extend([again.request.row], [Nodes.chain(text[-1:])]).logits([0])
    assert found == pytest.approx(whole, abs=1e-4)


def test_the_target_reads_the_text_alone_and_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of a classifier's samples has a thousand nodes, of which the text follows two or three."""
    model, text, read = target(), [(5 * i) % VOCAB for i in range(20)], list[int]()
    extend = model.extend

    def counted(rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        read.extend(token for part in nodes for token in part.tokens)
        return extend(rows, nodes)

    monkeypatch.setattr(model, "extend", counted)
    with Replay(TreeDrafter(OptTree(0.01), made("head", model)), PROMPTS[0], text, SamplingParams(), target=model) as r:
        while r.left:
            r.step(30)
        assert sum(r.request.stats.drafted) > 100
    assert read == [*PROMPTS[0], *text[:-1]]
