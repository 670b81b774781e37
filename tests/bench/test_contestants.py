"""Names of contestants."""

from __future__ import annotations

import pytest

from draftree.bench.entries import entries, split_names
from draftree.config import MAX_NODES
from draftree.errors import ConfigError, DraftreeError
from draftree.papers.opt_tree import OptTree


def test_ar_decoding_takes_part_at_every_temperature() -> None:
    labels = [e.label for e in entries(["auto", "ar"], ["lookup"], [0.0, 1.0], 8)]
    assert labels == ["ar T=0", "auto T=0", "ar T=1", "auto T=1"]


def test_a_method_has_settings_nodes_and_verification() -> None:
    _, entry = entries(["opt-tree:delta=0.2:nodes=16:depth=3:verify=relaxed"], ["lookup"], [0.4], 8)
    assert entry.speculation("lookup").method == OptTree(0.2, 3)
    assert (entry.nodes, entry.verify, entry.temperature, entry.drafter) == (16, "relaxed", 0.4, "lookup")
    assert not entry.draws_as_ar


def test_candidates_are_of_all_that_match_or_of_one_contestant() -> None:
    methods = ["chain", "chain:candidates=coupled", "chain:verify=multi-round", "chain:verify=relaxed"]
    plain, *given = entries(methods, ["lookup"], [1.0], 8, "plain")
    assert [e.candidates for e in given] == ["plain", "coupled", None, None]
    assert [e.candidates for e in entries(["chain", "chain:candidates=plain"], ["lookup"], [1.0], 8)[1:]] == [
        None,
        "plain",
    ]


def test_several_drafters_name_the_contestants() -> None:
    labels = [e.label for e in entries(["auto", "chain"], ["lookup", "lookup+head"], [0.0], 8)]
    assert labels == ["ar", "auto@lookup", "auto@lookup+head", "chain@lookup", "chain@lookup+head"]


def test_a_peer_takes_the_first_drafting_model() -> None:
    _, peer, assisted = entries(["peer:hf-generate", "peer:hf-assisted"], ["lookup", "some/model"], [0.0], 8)
    assert peer.drafter is None
    assert assisted.drafter == "some/model"


@pytest.mark.parametrize(
    ("method", "drafter", "why"),
    [
        ("opttree", "lookup", "did you mean opt-tree"),
        ("opt-tree:16", "lookup", "KEY=VALUE"),
        ("opt-tree:nodes=0", "lookup", "nodes is 0: use at least 1"),
        ("opt-tree:nodes=x", "lookup", "nodes is 'x'"),
        ("opt-tree:speed=1", "lookup", "no setting 'speed'"),
        ("chain:verify=wrong", "lookup", "wrong"),
        ("chain:candidates=odd", "lookup", "candidates are 'odd': choose from coupled, plain"),
        ("chain:verify=multi-round:candidates=plain", "lookup", "verification multi-round are always drawn"),
        ("chain:verify=match:when=both", "lookup", "no setting 'when'"),
        ("peer:hf-beam-search:4", "lookup", "KEY=VALUE"),
        ("auto", "none", "leave it out"),
        ("auto,auto", "lookup", "twice"),
        ("auto", "", "has no drafter"),
        ("peer:vllm", "lookup", "choose from peer:llama.cpp"),
        ("peer:hf-assisted", "lookup", "needs a draft model"),
    ],
)
def test_bad_names_are_one_line(method: str, drafter: str, why: str) -> None:
    with pytest.raises(DraftreeError) as error:
        entries(split_names(method), [drafter] if drafter else [], [0.0], 8)
    assert why in str(error.value)


def test_other_draws_are_expected_where_the_distribution_alone_is_kept() -> None:
    made = entries(["static:verify=multi-round", "peer:hf-generate", "static"], ["lookup"], [1.0], 8)
    assert [e.draws_as_ar for e in made] == [True, False, False, True]
    assert all(e.draws_as_ar for e in entries(["static", "peer:hf-generate"], ["lookup"], [0.0], 8))


def test_a_name_of_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError):
        entries(["auto"], ["lookup+"], [0.0], 8)


def test_without_a_node_budget_each_method_has_its_own() -> None:
    made = entries(["dynamic-width", "dynamic-width-budget", f"dynamic-width:nodes={MAX_NODES}"], ["lookup"], [0.0])
    assert [entry.nodes for entry in made[1:]] == [31, 31, MAX_NODES]
