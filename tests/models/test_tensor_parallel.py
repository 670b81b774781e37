"""Tensor parallel over two processes on a CPU: the texts of one process, whoever drafts; rank 0 alone is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftree.beams.beam_engine import load_beam_engine
from draftree.beams.forest import BeamParams
from draftree.config import SamplingParams
from draftree.engine.engine import load_engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError, RunError, UnsupportedModelError
from draftree.models.huggingface.hf_loading import load_part, read_pretrained
from draftree.models.huggingface.tensor_parallel import load_over_ranks
from draftree.models.loading import load_here
from draftree.text.encoding import user

from ..tiny import save_tiny

ROOT = Path(__file__).parents[2]
TEXT = "a b a b a b the cat in the hat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def launched(*words: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc-per-node COUNT -m draftree WORDS``."""
    return torchrun(count, "-m", "draftree", *words)


def torchrun(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603


def test_many_requests_that_share_an_engine_have_the_texts_of_one_process(model: str, tmp_path: Path) -> None:
    """Methods that decide by measured times and draws, drafters of three kinds, prompts of several lengths, a queue."""
    asked: list[dict[str, Any]] = [
        {"method": method, "temperature": temperature, "tokens": 10 + 5 * i, "prompt": TEXT + " x" * 3 * i}
        for i, (method, temperature) in enumerate([("auto", 0), ("auto", 1), ("static", 1), ("opt-tree", 0)] * 2)
    ]
    lines = [
        {
            "prompt": each["prompt"],
            "max_tokens": each["tokens"],
            "temperature": each["temperature"],
            "seed": 5,
            "draftree": {"method": each["method"]},
        }
        for each in asked
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    made = launched("batch", str(source), str(out), "--target", model, "--drafter", "lookup+recycle", "--rows", "3")
    assert made.returncode == 0, made.stderr
    found = {record["custom_id"]: _text(record) for record in map(json.loads, out.read_text().splitlines())}
    alone = load_engine(model, SpeculationParams(drafter="none"))
    for number, each in enumerate(asked, start=1):
        params = SamplingParams(max_tokens=each["tokens"], temperature=each["temperature"], seed=5)
        assert found[f"line-{number}"] == alone.generate([user(str(each["prompt"]))], params)[0].text


def _text(record: dict[str, Any]) -> str:
    return str(record["response"]["body"]["choices"][0]["message"]["content"])


PARTS = """
import json, sys
from draftree.models.base import prefill
from draftree.models.huggingface.hf_loading import load_part
from draftree.models.loading import load
from draftree.models.huggingface.tensor_parallel import run_on_ranks

def command():
    model = load(sys.argv[1])
    row = prefill(model, [3, 5, 7])
    weight = model._part.model.model.layers[0].self_attn.q_proj.weight
    keys = model._part.cache.layers[0].keys
    model.close(row)
    can = model.capabilities
    shapes = list(weight.shape), list(weight.to_local().shape), keys.shape[1]
    print(json.dumps([*shapes, can.fingerprint, can.slot_bytes]))
    return 0

sys.exit(run_on_ranks(command, load_part))
"""


def test_each_process_has_its_part_of_weights_and_cache(model: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    made = torchrun(2, str(tmp_path / "parts.py"), model)
    assert made.returncode == 0, made.stderr
    whole, part, heads, fingerprint, slot_bytes = json.loads(made.stdout)
    can = load_here(model, backend="transformers").capabilities
    assert part == [whole[0] // 2, whole[1]] and heads == 1
    assert fingerprint == can.fingerprint and slot_bytes == can.slot_bytes // 2


def test_rank_0_alone_prints(model: str) -> None:
    words = ["--method", "chain", "--max-tokens", "20", "--json"]  # auto may draft nothing on a busy machine
    made = launched("generate", TEXT, "--target", model, *words)
    assert made.returncode == 0, made.stderr
    (line,) = made.stdout.splitlines()
    expected = load_engine(model, SpeculationParams(drafter="none")).generate(
        [user(TEXT)], SamplingParams(max_tokens=20)
    )[0]
    report = json.loads(line)
    assert report["token_ids"] == expected.token_ids and sum(report["stats"]["drafted"]) > 0
    assert "Traceback" not in made.stderr


def test_beams_over_two_processes_are_those_of_one(model: str) -> None:
    words = ["--beams", "3", "-n", "2", "--max-tokens", "12", "--drafter", "lookup", "--json"]
    made = launched("generate", TEXT, "--target", model, *words)
    assert made.returncode == 0, made.stderr
    engine = load_beam_engine(model, drafter="none")
    (expected,) = engine.generate([user(TEXT)], SamplingParams(max_tokens=12), BeamParams(width=3, returned=2))
    found = json.loads(made.stdout)["beams"]
    assert [each["token_ids"] for each in found] == [each.token_ids for each in expected.hypotheses]
    assert [each["score"] for each in found] == pytest.approx([each.score for each in expected.hypotheses], abs=1e-4)


def test_what_cannot_be_shared_is_one_line_by_rank_0(model: str) -> None:
    made = launched("generate", TEXT, "--target", model, count=3)
    assert made.returncode != 0 and not made.stdout
    complaints = [line for line in made.stderr.splitlines() if line.startswith("draftree: ")]
    assert len(complaints) == 1 and "which 3 processes cannot share evenly: use 2" in complaints[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "graph"}, "runner 'graph' does not go with torchrun"),
        ({"device": "cuda:7"}, "device 'cuda:7' does not go with torchrun"),
        ({"backend": "llama.cpp"}, "backend 'llama.cpp' does not go with torchrun"),
    ],
)
def test_options_that_need_whole_layers_are_refused(model: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_part(model, **options)


def test_models_that_transformers_cannot_split_are_refused(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(UnsupportedModelError, match="has no tensor-parallel plan"):
        read_pretrained(folder, "mine", dtype=None, attention=None, parts=2)


def test_a_part_needs_other_processes(model: str) -> None:
    with pytest.raises(RunError, match="run the command with torchrun"):
        load_over_ranks(model, {}, load_part)
