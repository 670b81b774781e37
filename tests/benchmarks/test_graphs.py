"""The GPU benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu, gpu_parts, serving
from draftree.cli.main import run as run_cli
from draftree.models.base import Nodes, Row, prefill
from draftree.models.huggingface.attention import attend_as_one
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.pass_inputs import GRAIN
from draftree.scores import NumpyScores, Scores

from ..tiny import save_tiny, tiny


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_passes_are_timed_and_leave_no_row(runner: str) -> None:
    model = HFModel(tiny(), runner=runner, self_test=False)
    times = gpu_parts.pass_times(model, 20, (1, 4), repeats=2)
    assert len(times) == 2 and all(t > 0 for t in times)
    assert model.rows == 0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model, drafts and prompts."""
    folder = tmp_path_factory.mktemp("gpu")
    suite = folder / "suite.jsonl"
    lines = [{"id": str(i), "category": "a", "turns": [text]} for i, text in enumerate(("a b a b", "c d c"))]
    suite.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    target = save_tiny(folder / "target")
    return ["--dry-run", "--target", str(target), "--drafter", "lookup", "--suite", str(suite)]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("exactness", r"0 of 2 greedy answers differ.*\n(bfloat16, (eager|graph) passes.*in 8 places.*\n){2}"),
        ("passes", r"(?s)GB/s.*float32.*eager .*T\(32\)/T\(1\).*own forward\)\ngraph .*memory.*no CUDA graphs\)"),
        ("attention", r"(\n(Smol|Llama)[^\n]* SDPA [0-9.]+, passes [0-9.]+; ([0-9]e-0[6-9]|0e[+]00)){12}\n"),
        ("kernels", r"(?s)float32, +1 tokens: [1-9][0-9]* kernels.* us .*bfloat16, 16 tokens: "),
        ("8b", r"(?s)GB/s.*bfloat16.*eager .*graph "),
    ],
)
def test_a_part_prints_its_figures(
    part: str, said: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main(["OUT", *settings, "--only", part])
    assert re.search(said, capsys.readouterr().out)


def test_the_commands_of_parts_run(settings: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = gpu_parts.Options(settings[2], "lookup", settings[-1], "cpu", prompts=2, tokens=4)
    (bench,) = gpu.commands("methods", options)
    assert bench[:2] == ["-m", "draftree"] and run_cli([*bench[2:], "--out", str(tmp_path / "bench")]) == 0
    first, *others = gpu.commands("batches", options)
    assert first[:2] == ["-m", "benchmarks.serving"] and len(others) == 2
    serving.main(first[2:])
    assert "1 requests, auto" in capsys.readouterr().out


def test_bandwidth_is_of_more_than_a_gpus_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiled passes were compared with was copied inside of them."""
    sizes, data = list[int](), torch.zeros(1)

    def zeros(size: int, **options: object) -> torch.Tensor:
        sizes.append(size)
        return data

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(gpu_parts, "_wait", lambda device: None)
    gpu_parts.bandwidth("cuda")
    assert sizes == [1 << 31]


def test_memory_of_a_shape_is_that_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bandwidth is measured on counted too."""
    now, peak, stock = 1.0, 1.0, tiny()

    def takes(gigabytes: float) -> None:
        nonlocal peak
        peak = max(peak, now + gigabytes)

    def bandwidth(device: str) -> float:
        takes(4.0)
        return 1e9

    def table(*given: object) -> str:
        takes(0.5)
        return "passes"

    def reset(device: str) -> None:
        nonlocal peak
        peak = now

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, dtype: stock)
    monkeypatch.setattr(gpu_parts, "bandwidth", bandwidth)
    monkeypatch.setattr(gpu_parts, "table", table)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1e9 * peak)
    lines = gpu_parts.shape(gpu_parts.TINY)(gpu_parts.Options("", "", "", "cuda"))
    assert [*lines][-1] == "memory at most: 1.5 GB"


def test_attention_is_measured_on_views_as_the_cache_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a layer have slots behind them that a pass does not see: its heads lie apart."""
    model = HFModel(tiny(), runner="graph", self_test=False)
    prefill(model, [1] * 5)
    assert model.cache.of(0)[0].shape[2] == GRAIN + GRAIN, "a pass over up to so many slots sees the first half"
    seen = list[torch.Tensor]()

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.extend((key, value))
        return attend_as_one(query, key, value, *others)

    monkeypatch.setattr(gpu_parts, "attend_as_one", noted)
    list(gpu_parts.attention(gpu_parts.Options("", "", "", "cpu", context=20, repeats=1)))
    assert seen
    for held in seen:
        assert held.stride()[1:] == ((held.shape[2] + GRAIN) * held.shape[3], held.shape[3], 1)


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
    monkeypatch.setattr(gpu_parts, "encode", lambda tokenizer, text: [3, 14, 15, 9])
    exact = gpu_parts.near_ties(HFModel(tiny(), self_test=False), ["a", "b"], tokens=8, width=4)
    assert (exact.places, exact.choices) == (16, 0) and exact.difference < 1e-4
    shaken = gpu_parts.near_ties(Shaken(tiny(), self_test=False), ["a"], tokens=8, width=4)
    assert (shaken.places, shaken.choices) == (8, 2), "one place of each pass over four tokens"
    assert shaken.ties >= 2 and shaken.difference > exact.difference
