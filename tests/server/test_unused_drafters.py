"""A drafter that ``auto`` never uses is named in the log, once, with the figure that decided."""

from __future__ import annotations

import logging

import pytest

from draftree.config import SamplingParams
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.cost_profile import Identity, Point, Profile
from draftree.policies.auto import AutoTree
from draftree.server import metrics
from draftree.server.metrics import UnusedDrafters

from ..toy import ToyModel

ME = Identity("toy", "ToyModel", 1, "stock", "float32", "", "eager", "cpu", "toy 1", "torch", 1)


def costs(token: float) -> Profile:
    """A pass takes so many seconds a token."""
    sizes = (1, 33)
    return Profile(ME, (Point(1, 64, sizes, tuple(token * n for n in sizes)),))


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> AutoTree:
    """With a draft model whose passes take a thousand times as long as the target's."""
    monkeypatch.setattr(metrics, "_UNUSED", 20)
    caplog.set_level(logging.INFO, "draftree")
    return AutoTree(target=costs(1e-3), drafter=costs(1.0))


def test_a_drafter_that_costs_more_than_it_gains_is_named_once_with_its_figure(
    policy: AutoTree, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = TreeDrafter(policy, ModelSource(ToyModel(6), 6), "small")
    engine = Engine(ToyModel(6), Speculation(drafter), observers=[UnusedDrafters()])
    for first in range(3):
        engine.generate([[first, 1]], SamplingParams(max_tokens=60))
    (record,) = caplog.records
    line = record.getMessage()
    assert "drafter small" in line and "takes 1501.50 passes of the target" in line and "--drafter none" in line


def test_one_that_has_drafted_meanwhile_is_not_named(policy: AutoTree, caplog: pytest.LogCaptureFixture) -> None:
    observer, target = UnusedDrafters(), ToyModel(6)
    engine = Engine(
        target, Speculation(TreeDrafter(policy, ModelSource(ToyModel(6), 6), "small")), observers=[observer]
    )
    (record,) = policy.report.drafters
    for drafted in (1, 1, 0):
        assert not caplog.records
        policy.report.steps += 20
        record.steps += drafted
        observer.stepped([])
    assert len(caplog.records) == 1 and engine.speculation.drafter.name == "small"


def test_what_is_left_when_it_is_not_loaded_is_named(policy: AutoTree, caplog: pytest.LogCaptureFixture) -> None:
    observer, target = UnusedDrafters(), ToyModel(6)
    source = EnsembleSource((NgramSource(), ModelSource(ToyModel(6), 6)))
    Engine(target, Speculation(TreeDrafter(policy, source, "lookup+small")), observers=[observer])
    policy.report.steps += 20
    policy.report.drafters[0].steps += 1
    observer.stepped([])
    (record,) = caplog.records
    assert record.args is not None and record.args[0] == "small" and record.args[2] == "lookup"  # type: ignore[index]
