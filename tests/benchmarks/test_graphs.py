"""The GPU benchmark, as far as it goes without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks import gpu
from draftree.models.base import Nodes, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.scores import NumpyScores, Scores

from ..tiny import tiny


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_passes_are_timed_and_leave_no_row(runner: str) -> None:
    model = HFModel(tiny(), runner=runner, self_test=False)
    times = gpu.pass_times(model, 20, (1, 4), repeats=2)
    assert len(times) == 2 and all(t > 0 for t in times)
    assert model.rows == 0


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device here.*--device cpu"):
        gpu.main([])


class Shaken(HFModel):
    """Passes over several tokens round otherwise: two tokens that are nearly equal change places."""

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        """See ``LanguageModel``."""
        scores = super().extend(rows, nodes)
        logits = scores.logits(range(scores.starts[-1]))
        if len(logits) > 1:
            first, second = np.argsort(-logits[1])[:2]
            logits[1, second] += 1.5 * (logits[1, first] - logits[1, second])
        return NumpyScores(logits, [len(logits)])


def test_near_ties_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "encode", lambda tokenizer, text: [3, 14, 15, 9])
    exact = gpu.near_ties(HFModel(tiny(), self_test=False), ["a", "b"], tokens=8, width=4)
    assert (exact.places, exact.choices) == (16, 0) and exact.difference < 1e-4
    shaken = gpu.near_ties(Shaken(tiny(), self_test=False), ["a"], tokens=8, width=4)
    assert (shaken.places, shaken.choices) == (8, 2), "one place of each pass over four tokens"
    assert shaken.ties >= 2 and shaken.difference > exact.difference


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["pases"])
    assert "pases is no part: choose from passes" in capsys.readouterr().err
