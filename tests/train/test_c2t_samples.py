"""Samples of full trees: labels on scripted toys, those of a real trace, and what is on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter, DraftSource, Scorer
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Observer, Speculation
from draftree.errors import ConfigError, ModelFileError, RunError
from draftree.papers.c2t import FEATURES
from draftree.request import Outcome, Request
from draftree.train import c2t_samples as module
from draftree.train.c2t_samples import (
    NODES,
    SampleOptions,
    SampleRecipe,
    Samples,
    SampleStore,
    collect,
    full_trees,
    samples_along,
    samples_of,
    thinned,
)
from draftree.train.responses import Response, respond

from ..heads import trained
from ..pairs import drafter, target
from ..tiny import VOCAB
from ..toy import ScriptedScorer, chain_tree

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8], [4, 5, 6]]
P = list(FEATURES).index("probability")


class TwoTokens(DraftSource):
    """Drafts token 1 with probability 0.7 and token 2 with 0.3, after any text."""

    name = "two tokens"

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        return ScriptedScorer(lambda row, path: ([1, 2], [math.log(0.7), math.log(0.3)], 0.61))

    def close(self, request: Request) -> None: ...


def response(tokens: list[int], number: int = 0) -> Response:
    return Response(number, 0.0, 2, torch.tensor([5, 6, *tokens]), torch.zeros(len(tokens) + 1, 0))


def test_labels_on_a_scripted_toy_are_the_path_that_the_target_takes() -> None:
    # Behind the first token comes 1 2 2: a tree of depth 2 (the last token is the bonus) whose path 1, 2 is accepted.
    found = samples_along(TreeDrafter(full_trees(), TwoTokens()), response([9, 1, 2, 2]), 0, 1.0, target())
    got = sorted(zip(found.features[:, P].tolist(), found.accepted.tolist(), strict=True))
    want = [(0.09, False), (0.21, False), (0.21, True), (0.3, False), (0.49, False), (0.7, True)]
    assert [y for _, y in got] == [y for _, y in want]
    assert [p for p, _ in got] == pytest.approx([p for p, _ in want])


def test_each_tree_begins_where_the_last_one_was_left() -> None:
    # 3 is never drafted: the trees are rooted at 9, 3 and 3; the one before the last token has no room.
    found = samples_along(TreeDrafter(full_trees(), TwoTokens()), response([9, 2, 3, 3, 1, 1, 1]), 0, 1.0, target())
    assert int(found.accepted.sum()) == 1 + 0 + 2
    assert found.numbers.tolist() == [0] * len(found.accepted)


class Collected(Observer):
    """Keeps what became of each tree."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes


@pytest.mark.parametrize(("name", "number"), [("relative", 0), ("relative", 3), ("lookup", 0)])  # 3: temperature 1
def test_samples_are_those_of_decoding_with_full_trees(name: str, number: int) -> None:
    model, seed = target(), 7
    (drawn,) = respond(model, PROMPTS, [number], rows=1, max_tokens=20, seed=seed)
    params = SamplingParams(max_tokens=20, temperature=drawn.temperature, seed=seed + number)
    seen = Collected()
    engine = Engine(model, Speculation(drafter(name, model, full_trees()), NODES), observers=[seen])
    engine.generate([PROMPTS[number]], params)
    steps = [outcome for outcome in seen.outcomes if len(outcome.tree)]
    want = Samples.joined([samples_of(step.tree, step.path, number) for step in steps])
    accepted = [np.isin(np.arange(len(step.tree)), step.path) for step in steps]
    assert np.array_equal(want.accepted.numpy(), np.concatenate(accepted))
    got = samples_along(drafter(name, model, full_trees()), drawn, seed, 1.0, model)
    assert torch.equal(got.accepted, want.accepted)
    assert torch.allclose(got.features, want.features, atol=1e-4)
    assert bool(got.accepted.any())


def test_full_trees_have_a_thousand_nodes_and_are_not_pruned() -> None:
    model = target()
    (drawn,) = respond(model, PROMPTS, [0], rows=1, max_tokens=30, seed=0)
    found = samples_along(drafter("relative", model, full_trees()), drawn, 0, 1.0, model)
    depths = found.features[:, list(FEATURES).index("depth")]
    assert NODES == 1010
    assert int((depths == 0).sum()) % 10 == 0 and int((depths == 5).sum()) % 100 == 0


def test_thinning_keeps_all_that_was_accepted_and_a_share_of_the_rest() -> None:
    tree = chain_tree([1] * 2000)
    whole = samples_of(tree, list(range(100)), 3)
    some = thinned(whole, 0.1, torch.Generator().manual_seed(0))
    assert int(some.accepted.sum()) == 100
    assert 130 < len(some.accepted) - 100 < 250
    again = thinned(whole, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(again.features, some.features)
    assert np.array_equal(whole.features[:, P], np.exp(tree.path_logprobs))


def recipe(**changes: object) -> SampleRecipe:
    settings: dict[str, object] = {
        "target": "tiny",
        "target_weights": "0123",
        "drafter": "it",
        "drafter_weights": "4567",
        "prompts": "x",
        "max_tokens": 20,
        "negatives": 0.5,
        "seed": 0,
        "dtype": "float32",
    }
    return SampleRecipe(**{**settings, **changes})  # type: ignore[arg-type]


def run(folder: Path, made: Drafter | None = None, most: int = 10**6) -> SampleStore:
    model, store = target(), SampleStore(folder, recipe())
    drafts = made or drafter("relative", model, full_trees())
    collect(store, model, drafts, PROMPTS, most=most, rows=2, progress=lambda count: None)
    return store


def test_what_is_collected_comes_back_from_disk(tmp_path: Path) -> None:
    store = run(tmp_path / "data")
    again = SampleStore(tmp_path / "data", recipe())
    assert again.counts == store.counts
    assert ({*store.counts}, store.count) == ({0, 1, 2, 3}, len(store.samples(range(4)).accepted))
    assert sorted(store.samples(range(4)).numbers.unique().tolist()) == [0, 1, 2, 3]


def test_an_interrupted_collection_goes_on_and_ends_with_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole").samples(range(4))
    real, calls = samples_along, list[int]()

    def interrupted(made: Drafter, response: Response, *more: object) -> object:
        calls.append(response.number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(made, response, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "samples_along", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "data")
    assert {*SampleStore(tmp_path / "data", recipe()).counts} == {*calls[:2]}
    store = run(tmp_path / "data")
    assert {*store.counts} == {0, 1, 2, 3}
    assert torch.equal(store.samples(range(4)).accepted, whole.accepted)
    assert torch.equal(store.samples(range(4)).numbers, whole.numbers)
    assert torch.allclose(store.samples(range(4)).features, whole.features, atol=1e-4)


def test_collection_stops_when_there_is_enough(tmp_path: Path) -> None:
    store = run(tmp_path / "data", most=10)
    assert len(store.counts) == 1
    assert sum(p.stat().st_size for p in (tmp_path / "data").iterdir()) < 10**6
    before = store.count
    assert run(tmp_path / "data", most=10).count == before


@pytest.mark.parametrize("change", [{"target": "other"}, {"drafter": "x"}, {"negatives": 0.4}, {"seed": 1}])
def test_samples_of_other_settings_are_not_mixed_in(change: dict[str, object], tmp_path: Path) -> None:
    run(tmp_path / "data", most=10)
    with pytest.raises(ConfigError, match="other models.*the folder"):
        SampleStore(tmp_path / "data", recipe(**change))


def test_a_torn_shard_is_refused_by_its_name(tmp_path: Path) -> None:
    run(tmp_path / "data", most=10)
    shard = tmp_path / "data" / "samples-00000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ModelFileError, match="samples-00000"):
        SampleStore(tmp_path / "data", recipe())


def test_a_full_disk_is_one_line(tmp_path: Path, full_disk: None) -> None:
    with pytest.raises(RunError, match="No space left"):
        run(tmp_path / "data", most=10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"rows": 0}, "rows is 0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"negatives": 0.0}, "negatives is 0"),
        ({"negatives": 1.5}, "negatives is 1.5"),
        ({"negatives": math.nan}, "negatives is nan"),
        ({"apart": 1}, "apart is 1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SampleOptions(**change)  # type: ignore[arg-type]


def test_a_drafter_that_reads_hidden_states_gets_them(tmp_path: Path) -> None:
    model = target()
    drafts = TreeDrafter(full_trees(), EagleSource(trained(model), VOCAB))
    drafts.prepare(model)
    store = SampleStore(tmp_path / "data", recipe())
    collect(store, model, drafts, PROMPTS[:2], most=10**6, rows=2, progress=lambda count: None)
    assert {*store.counts} == {0, 1}
    assert bool(store.samples(range(2)).accepted.any())
