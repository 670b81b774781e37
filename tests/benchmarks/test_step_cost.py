"""The costs of steps of a tiny model are printed, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.step_cost import main
from draftree.policies.methods import METHODS

from ..tiny import save_tiny


@pytest.mark.filterwarnings("ignore::draftree.errors.DraftreeWarning")  # the classifier is another target's
def test_the_command_prints_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, threads = save_tiny(tmp_path / "tiny"), str(torch.get_num_threads())
    main(["--target", str(model), "--context", "20", "--nodes", "4", "--repeats", "2", "--threads", threads])
    assert len(capsys.readouterr().out.splitlines()) > sum(m.complete for m in METHODS.values())
