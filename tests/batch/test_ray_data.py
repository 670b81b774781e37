"""A batch on Ray: two replicas give the records that one engine gives."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..tiny import save_tiny

ROOT = Path(__file__).parents[2]
DRAFTREE = [sys.executable, "-m", "draftree", "batch"]


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is missing: pip install 'draftree[ray]'")
def test_replicas_give_the_records_of_one_engine(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    source = tmp_path / "in.jsonl"
    requests = [{"prompt": f"a b a b {i}", "max_tokens": 12} for i in range(9)]
    sampled = {"prompt": "the cat", "max_tokens": 12, "temperature": 1, "seed": 3}
    source.write_text("\n".join(map(json.dumps, [*requests, {"no": "prompt"}, sampled])))
    found = []
    for out, words in ((tmp_path / "one.jsonl", []), (tmp_path / "two.jsonl", ["--ray", "--replicas", "2"])):
        command = [*DRAFTREE, str(source), str(out), "--target", str(model), "--drafter", "lookup", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        made = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603
        assert made.returncode == 1 and "1 of 11 lines could not be answered" in made.stderr, made.stderr
        found.append({record["id"]: _plain(record) for record in map(json.loads, out.read_text().splitlines())})
    assert found[0] == found[1] and len(found[0]) == 11


def _plain(record: dict[str, Any]) -> Any:
    """Without what depends on when it was answered, and beside whom."""
    response = record["response"]
    return record | {"response": response and response["body"]["choices"]}
