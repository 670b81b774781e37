"""Progress of a long command."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftree import progress as module
from draftree.progress import progress_reporter


@pytest.mark.parametrize("terminal", [False, True])
def test_it_reports_how_far_and_how_long(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 30))
    if not terminal:
        monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))  # type: ignore[attr-defined]
    text = io.StringIO()
    monkeypatch.setattr(module, "err", Console(file=text, force_terminal=terminal, width=100))
    with progress_reporter("steps", total=50, done=10) as report:
        for done in (20, 30, 40):
            report(done)
    if terminal:
        assert "40/50" in text.getvalue()
    else:  # a line a minute
        assert text.getvalue() == "steps: 30 of 50, 1 minutes left\n"
