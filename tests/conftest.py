"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftree.models import profile


@pytest.fixture(scope="session", autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs of tiny models go to a folder of the test run, never to the user's."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "profile_folder", lambda: folder)
        yield
