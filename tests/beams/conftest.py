"""Beams are drafted as deep as asked, whatever the clock says, but where a test is about that."""

import pytest

from draftree.beams.pace import Pace


@pytest.fixture(autouse=True)
def as_deep_as_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.path.name != "test_pace.py":
        monkeypatch.setattr(Pace, "depth", lambda pace, most: most)
