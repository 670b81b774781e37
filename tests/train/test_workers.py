"""Responses by several processes: the same ones, each once, and one line when a worker fails."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch

import draftree
from draftree.errors import ConfigError, RunError
from draftree.models.huggingface import HFModel
from draftree.train.eagle_training import TrainingLimits
from draftree.train.head_data import DataRecipe, HeadData
from draftree.train.responses import respond
from draftree.train.workers import affordable, respond_in

from ..heads import PROMPTS
from ..tiny import save_tiny

RECIPE = DataRecipe(target="tiny", prompts="p", max_tokens=20, seed=5, dtype="float32")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HFModel:
    """Loaded by its name, as workers load it."""
    model = draftree.load(str(save_tiny(tmp_path_factory.mktemp("models") / "tiny")), device="cpu")
    model.track_features()
    return model


def test_workers_draw_what_one_process_draws(target: HFModel) -> None:
    options = {"rows": 2, "max_tokens": 20, "seed": 5}
    one = {r.number: r for r in respond(target, PROMPTS, range(4), **options)}
    several = list(respond_in(2, target, PROMPTS, range(4), **options))
    assert sorted(r.number for r in several) == [0, 1, 2, 3]
    for r in several:
        assert r.prompt_length == one[r.number].prompt_length
        assert torch.equal(r.tokens, one[r.number].tokens)
        assert r.features.dtype == torch.float16
        assert torch.allclose(r.features.float(), one[r.number].features.float(), atol=1e-2)
    assert not multiprocessing.active_children()


def test_interrupted_workers_leave_what_is_finished(target: HFModel, tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    data = HeadData.open(tmp_path / "work", RECIPE, PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        data.collect(target, tokens=1000, seconds=600, rows=1, progress=interrupt, workers=2)
    assert not multiprocessing.active_children()
    data = HeadData.open(tmp_path / "work", RECIPE, PROMPTS)
    assert len(data.store.numbers) == 1
    data.collect(target, tokens=1000, seconds=600, rows=1, progress=lambda done: None, workers=2)
    assert HeadData.open(tmp_path / "work", RECIPE, PROMPTS).store.numbers == {0, 1, 2, 3}


def test_a_worker_that_fails_is_one_line(target: HFModel, tmp_path: Path) -> None:
    gone = save_tiny(tmp_path / "gone")
    model = draftree.load(str(gone), device="cpu")
    shutil.rmtree(gone)
    with pytest.raises(RunError, match="draws responses failed: no such folder: .*the same command goes on"):
        list(respond_in(2, model, PROMPTS, range(4), rows=1, max_tokens=5, seed=0))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_one_line(target: HFModel) -> None:
    """As a system short of memory does."""
    drawn = respond_in(2, target, PROMPTS * 500, range(2000), rows=1, max_tokens=20, seed=0)
    next(drawn)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(RunError, match="a worker that draws responses was killed: .*fewer --workers"):
        list(drawn)
    assert not multiprocessing.active_children()


def test_a_cpu_gets_a_worker_for_each_thread_and_a_gpu_one() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (TrainingLimits().workers_on(cpu), TrainingLimits().workers_on(gpu)) == (torch.get_num_threads(), 1)
    assert (TrainingLimits(workers=3).workers_on(cpu), TrainingLimits(workers=1).workers_on(gpu)) == (3, 1)
    with pytest.raises(ConfigError, match="workers is 2: on cuda one process draws all: use more --rows"):
        TrainingLimits(workers=2).workers_on(gpu)


def test_no_more_workers_than_memory_holds(target: HFModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers x 2 x key heads x their width x 4 bytes a token, and the weights twice."""
    config = target.model.config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    each = 10 * 100 * per_token + 8 * target.capabilities.parameters
    for memory, workers in ((6 * each + 9, 3), (6 * each - 9, 2), (each, 1), (9, 1)):
        monkeypatch.setattr(os, "sysconf", lambda name, n=memory: n if name == "SC_PHYS_PAGES" else 1)
        assert affordable(target, rows=10, tokens=100) == workers
