"""Tensor parallel over two processes on a CPU: the texts of one process, whoever drafts; rank 0 alone is seen."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from draftree.beams.beam_engine import load_beam_engine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.drafters.registry import load_draft_model
from draftree.engine.engine import load_engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError, UnsupportedModelError
from draftree.models.huggingface.cache import bytes_of
from draftree.models.huggingface.hf_loading import load_part, read_pretrained
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.tensor_parallel import ParallelModel, Ranks
from draftree.models.loading import load, load_here
from draftree.text.encoding import user

from ..tiny import save_tiny, tiny

ROOT = Path(__file__).parents[2]
TEXT = "a b a b a b the cat in the hat"


COMMANDS = """
import json, sys
from draftree.cli import main as command_line
from draftree.models.base import prefill
from draftree.models.loading import load

def part(name):
    model = load(name)
    row = prefill(model, [3, 5, 7])
    weight = model._part.model.model.layers[0].self_attn.q_proj.weight
    keys = model._part.cache.of(0)[0]
    model.close(row)
    can = model.capabilities
    shapes = list(weight.shape), list(weight.to_local().shape), keys.shape[1]
    print(json.dumps([*shapes, can.fingerprint, can.slot_bytes]))

run, lines = command_line.run, json.loads(sys.argv[2])

def run_all():
    codes = [run(words) for words in lines]
    part(sys.argv[1])
    print(json.dumps(codes))
    return 0

command_line.run = run_all
command_line.main()
"""
"""Several commands in processes that torchrun starts once, and what one of them holds of a model."""
PLAIN = SpeculationParams(drafter="none")
REQUESTS = [("auto", 0), ("auto", 1), ("static", 1), ("opt-tree", 0)]


class Made(NamedTuple):
    """What two processes printed and wrote."""

    batch: list[dict[str, Any]]
    generated: dict[str, Any]
    beams: list[dict[str, Any]]
    part: list[Any]
    codes: list[int]
    err: str


@pytest.fixture(scope="module")
def made(model: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    lines = [
        {
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "draftree": {"method": method},
        }
        for method, prompt, params in requests()
    ]
    source, out, script = folder / "in.jsonl", folder / "out.jsonl", folder / "commands.py"
    source.write_text("\n".join(map(json.dumps, lines)))
    script.write_text(COMMANDS)
    generate = f"generate --max-tokens 20 --json {shlex.quote(TEXT)} --target"
    commands = [
        f"batch {source} {out} --target {model} --drafter lookup --rows 3",
        f"{generate} {model} --method chain",  # auto may draft nothing on a busy machine
        f"{generate} {model} --beams 3 -n 2",
        f"{generate} {save_tiny(folder / 'gpt2', 'gpt2')}",
    ]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(script), model, json.dumps([shlex.split(command) for command in commands])]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)  # noqa: S603 - our own script
    assert done.returncode == 0, done.stderr
    generated, beams, part, codes = map(json.loads, done.stdout.splitlines())  # rank 0 alone prints
    return Made([*map(json.loads, out.read_text().splitlines())], generated, beams["beams"], part, codes, done.stderr)


def requests() -> list[tuple[str, str, SamplingParams]]:
    """Methods that decide by measured times and draws, prompts of several lengths."""
    return [
        (method, TEXT + " x" * 3 * i, SamplingParams(max_tokens=6 + 2 * i, temperature=temperature, seed=5))
        for i, (method, temperature) in enumerate(REQUESTS)
    ]


def test_many_requests_that_share_an_engine_have_the_texts_of_one_process(model: str, made: Made) -> None:
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in made.batch}
    alone = load_engine(model, PLAIN)
    for number, (_, prompt, params) in enumerate(requests(), start=1):
        assert found[f"line-{number}"] == alone.generate([user(prompt)], params)[0].text


def test_each_process_has_its_part_of_weights_and_cache(model: str, made: Made) -> None:
    whole, part, heads, fingerprint, slot_bytes = made.part
    can = load_here(model, backend="transformers").capabilities
    assert part == [whole[0] // 2, whole[1]] and heads == 1
    assert fingerprint == can.fingerprint and slot_bytes == can.slot_bytes // 2


def test_a_text_is_that_of_one_process(model: str, made: Made) -> None:
    (expected,) = load_engine(model, PLAIN).generate([user(TEXT)], SamplingParams(max_tokens=20))
    assert made.generated["token_ids"] == expected.token_ids and sum(made.generated["stats"]["drafted"]) > 0


def test_beams_over_two_processes_are_those_of_one(model: str, made: Made) -> None:
    engine = load_beam_engine(model, drafter="none")
    (expected,) = engine.generate([user(TEXT)], SamplingParams(max_tokens=20), BeamParams(width=3, returned=2))
    assert [each["token_ids"] for each in made.beams] == [each.token_ids for each in expected.hypotheses]
    scores = [each.score for each in expected.hypotheses]
    assert [each["score"] for each in made.beams] == pytest.approx(scores, abs=1e-4)


def test_what_cannot_be_shared_is_one_line_by_rank_0(model: str, made: Made) -> None:
    assert made.codes == [0, 0, 0, 2]
    complaints = [line for line in made.err.splitlines() if line.startswith("draftree: ")]
    assert len(complaints) == 1 and "has no tensor-parallel plan" in complaints[0]
    assert "Traceback" not in made.err
    with pytest.raises(UnsupportedModelError, match="3 processes .*: use 2"):
        read_pretrained(model, "mine", dtype=None, parts=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "graph"}, "runner 'graph' .*torchrun"),
        ({"device": "cuda:7"}, "device 'cuda:7' .*torchrun"),
        ({"backend": "llama.cpp"}, "backend 'llama.cpp' .*torchrun"),
    ],
)
def test_options_that_need_whole_layers_are_refused(model: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_part(model, **options)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> ParallelModel:
    """Rank 0's part of a model over two processes."""
    return _shared(monkeypatch, "cpu")


def _shared(monkeypatch: pytest.MonkeyPatch, device: str) -> ParallelModel:
    """Its cache takes one row of 64 tokens of the whole model."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    part = HFModel(tiny(), self_test=False)
    part.cache_bytes = bytes_of([64], part.capabilities.slot_bytes)
    part.capabilities = replace(part.capabilities, device=device)
    return ParallelModel(part, Ranks())


@pytest.mark.parametrize(("device", "most"), [("cuda:0", 2), ("cpu", 1)])
def test_a_process_holds_rows_by_the_bytes_of_its_own_part(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot was counted with the heads of all processes: rows that fit were left out, and none fitted at all.

    Each process has a GPU of its own, and a share of the host's memory.
    """
    shared = _shared(monkeypatch, device)
    assert [shared.holds([64] * rows) for rows in (1, 2, 3)] == [rows <= most for rows in (1, 2, 3)]


def test_a_draft_model_is_not_eager_because_its_target_is_shared(
    shared: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict[str, Any]()

    def loaded(name: str, **options: Any) -> HFModel:
        given.update(options)
        return HFModel(tiny(seed=1), self_test=False)

    monkeypatch.setattr("draftree.drafters.registry.load_here", loaded)
    shared.capabilities = replace(shared.capabilities, device="cuda:0")
    load_draft_model("near", shared)
    assert given == {"device": "cuda:0"}


def test_a_process_that_waits_for_no_other_has_whole_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert isinstance(load(model), HFModel)
