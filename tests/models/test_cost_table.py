"""The tables of costs that ship: one for each tier, and what they give for models."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.cost_tables import DERIVED, Measured, fit, main
from draftree.models.cost_profile import estimated
from draftree.models.cost_table import FOLDER, TABLES, CostTable, shipped_table
from draftree.models.huggingface.inspection import computing
from draftree.models.native.binding import tiers

from .. import tiny_gguf
from ..toy import ToyModel

NATIVE = ("base", "avx2", "avx-vnni", "avx512-vnni", "neon")
TIERS = (*NATIVE, "llama.cpp", "torch", "torch-cuda")
SMALL = replace(ToyModel(max_length=8192).capabilities, threads=2, weights=134_500_000, weight_bytes=97_000_000)
SMALL = replace(SMALL, slot_bytes=23_040)


def test_each_tier_has_its_table_and_there_is_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(TIERS)
    assert set(tiers()) <= set(NATIVE)


@pytest.mark.parametrize("tier", TIERS)
def test_seconds_rise_with_tokens_context_and_weights_and_fall_with_threads(tier: str) -> None:
    table = shipped_table(tier)
    sizes = [table.seconds(SMALL, n, 64) for n in range(1, 65)]
    assert 0 < sizes[0] and sizes == sorted(set(sizes))
    assert sizes[15] < 16 * sizes[0]  # a pass over several tokens is shared work
    contexts = [table.seconds(SMALL, 4, context) for context in (0, 64, 1024, 8192)]
    assert contexts == sorted(set(contexts))
    larger = replace(SMALL, weights=2 * SMALL.weights, weight_bytes=2 * SMALL.weight_bytes)
    assert table.seconds(larger, 1, 0) == pytest.approx(2 * table.seconds(SMALL, 1, 0))
    assert table.seconds(replace(SMALL, threads=4), 16, 64) < table.seconds(SMALL, 16, 64)


@pytest.mark.parametrize("tier", TIERS)
def test_a_profile_by_a_table_is_the_table(tier: str) -> None:
    model, table = ToyModel(max_length=8192), shipped_table(tier)
    model.capabilities = replace(SMALL, tier=tier)
    profile = estimated(model)
    for nodes, context in ((1, 1), (8, 100), (17, 1000), (64, 8192)):
        assert profile.seconds(nodes, context) == pytest.approx(table.seconds(SMALL, nodes, context))
    of_a_row = table.seconds(SMALL, 1, 100) - table.seconds(SMALL, 1, 1)
    assert profile.seconds(4, 100, batch=8) == pytest.approx(table.seconds(SMALL, 32, 100) + 7 * of_a_row)


@pytest.mark.parametrize("tier", TIERS)
def test_a_pass_reads_the_experts_of_all_its_tokens(tier: str) -> None:
    """As far as other tokens have not chosen them: never more than all, and at one token its own."""
    table = shipped_table(tier)
    routed = replace(SMALL, weights=1, slot_bytes=0, expert_bytes=SMALL.weight_bytes // 2, expert_share=0.25)
    seconds = [table.seconds(routed, n, 0) for n in (1, 2, 100)]
    dense = table.seconds(replace(SMALL, weights=1, slot_bytes=0), 1, 0)
    assert seconds == pytest.approx([dense, dense * (1 + 0.75 / 2), dense * (1 + 3 / 2)], rel=1e-3)


def test_passes_on_an_accelerator_cost_the_same_whatever_threads_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table has the rates of all of it, which were taken times the threads of the host."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    seconds, of_cpu = list[float](), list[int]()
    for threads in (1, 16):
        monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
        can = replace(SMALL, **computing([torch.ones(1000, 1000)], "cuda:0"))
        seconds.append(shipped_table(can.tier).seconds(can, 8, 64))
        of_cpu.append(computing([], "cpu")["threads"])
    assert seconds[0] == seconds[1] == shipped_table("torch-cuda").seconds(replace(can, threads=1), 8, 64)
    assert of_cpu == [1, 16]


def test_short_models_have_a_profile_too() -> None:
    assert estimated(ToyModel(max_length=1)).seconds(1, 1) > 0


@pytest.mark.parametrize("overlap", [1.0, 3.0])
def test_a_fit_finds_the_rates_of_passes_that_follow_a_table(overlap: float) -> None:
    true = CostTable("made up", 4e10, 2e11, overlap, 6e10, 5e10)
    large = replace(SMALL, weights=1_500_000_000, weight_bytes=980_000_000, slot_bytes=28_672)
    passes = [
        Measured(can, n, context, true.seconds(can, n, context))
        for can in (SMALL, large)
        for n in (1, 2, 4, 8, 16, 32)
        for context in (64, 900)
    ]
    found = fit("made up", passes)
    assert found.overlap == overlap
    for each in passes:
        assert math.isclose(found.seconds(each.can, each.tokens, each.context), each.seconds, rel_tol=0.01)


@pytest.mark.skipif("avx2" not in tiers(), reason="this machine has no AVX2")
def test_the_command_measures_this_machines_tiers_and_derives_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.cost_tables.FOLDER", tmp_path)
    model = tiny_gguf.write(tmp_path / "tiny.gguf", weights="Q4_1", context=256)
    main(["--models", str(model), "--tiers", "base,avx2", "--repeats", "1"])
    made = {path.stem: TABLES.read(path) for path in tmp_path.glob("*.json")}
    assert made.keys() == {"base", "avx2", *DERIVED}
    assert made["base"].source.startswith("measured: ") and made["neon"].source.startswith("not measured")
    assert made["avx-vnni"].products == pytest.approx(DERIVED["avx-vnni"] * made["avx2"].products, rel=0.01)
    assert capsys.readouterr().out.count("at most") == 2
