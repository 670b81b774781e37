"""Beams are drafted three layers deep where a test does not say how deep, but where it is about that."""

import pytest

from draftree.beams.drafting import DepthRule
from draftree.beams.forest import BeamRequest


@pytest.fixture(autouse=True)
def three_layers_deep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def three(plan: DepthRule, own: BeamRequest) -> int:
        return 3

    if request.node.path.name != "test_drafting.py":
        monkeypatch.setattr(DepthRule, "depth", three)
        monkeypatch.setattr(DepthRule, "opens", lambda plan, own: True)
