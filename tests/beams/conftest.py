"""Beams are drafted three layers deep where a test does not say how deep, but where it is about that."""

import pytest

from draftree.beams.drafting import Plan
from draftree.beams.forest import BeamRequest


@pytest.fixture(autouse=True)
def three_layers_deep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def three(plan: Plan, own: BeamRequest) -> int:
        return 3

    if request.node.path.name != "test_drafting.py":
        monkeypatch.setattr(Plan, "prepare", lambda plan: None)
        monkeypatch.setattr(Plan, "depth", three)
        monkeypatch.setattr(Plan, "opens", lambda plan, own: True)
