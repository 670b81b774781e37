"""What clients name is never imported; what the server was started with is, and clients may name it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftree.drafters.spec import read_drafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams

from .running import posted, running

NAME, OTHER = "draftree_test_served", "draftree_test_client"
OWN = f"lookup+{NAME}:made"
MINE = """
from draftree.drafters.ngram import NgramSource

made_for = []

def made(target):
    made_for.append(target)
    return NgramSource()
"""
TEXT = "a b a b a b"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (NAME, OTHER):
        (tmp_path / f"{name}.py").write_text(MINE)
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_client_names_what_the_server_was_started_with_and_imports_nothing(alone: Engine) -> None:
    started = SpeculationParams(drafter=read_drafter(OWN), method="chain")
    with running(speculation=started) as served:
        texts = set()
        for chosen in (None, {"drafter": OWN}, {"drafter": OWN, "method": "static"}, {"drafter": "none"}):
            body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "draftree": chosen}
            status, found = posted(served, "/v1/completions", body)
            assert status == 200, found
            texts.add(found["choices"][0]["text"])
        assert len(texts) == 1
        assert len(sys.modules[NAME].made_for) == 2
        for chosen in (
            {"drafter": f"{OTHER}:made"},
            {"drafter": f"lookup+{OTHER}:made"},
            {"method": f"{OTHER}:made"},
            {"verification": f"{OTHER}:made"},
            {"verification": f"{NAME}:made"},
        ):
            status, found = posted(served, "/v1/completions", {"prompt": TEXT, "draftree": chosen})
            assert status == 400 and found["error"]["param"].startswith("draftree")
            assert next(iter(chosen.values())) in found["error"]["message"]
    assert OTHER not in sys.modules
