"""What a command that fails prints."""

from __future__ import annotations

import pytest

Captured = pytest.CaptureFixture[str]


def complaint(capsys: Captured) -> str:
    """The one line of its error."""
    printed = capsys.readouterr()
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert printed.err.startswith("draftree: ")
    return printed.err
