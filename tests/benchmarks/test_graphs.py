"""The GPU benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from draftree.models.huggingface import HFModel

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
