"""The example for vLLM: chains by its interface, and the same text inside it where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples.vllm_proposer import ChainProposer

from ..tiny import save_tiny

ROOT = Path(__file__).parents[2]
ASK = """
import json, sys
from vllm import LLM, SamplingParams

chains = {"method": "custom_class", "model": "examples.vllm_proposer.ChainProposer", "num_speculative_tokens": 4}
params, found = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), []
for speculative in (None, chains):
    engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, speculative_config=speculative)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], params, use_tqdm=False)
    found.append([list(answer.outputs[0].token_ids) for answer in answers])
    del engine
print(json.dumps(found))
"""


def config(tokens: int, longest: int = 100) -> SimpleNamespace:
    speculative = SimpleNamespace(num_speculative_tokens=tokens)
    return SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(max_model_len=longest))


def test_rows_get_chains_of_their_own_lengths() -> None:
    texts = np.array([[1, 2, 3, 4, 1, 2, 0], [5, 6, 7, 8, 9, 0, 0], [1, 2, 3, 4, 1, 2, 0]])
    proposer = ChainProposer(config(3))
    assert proposer.propose([[2], [9], []], np.array([6, 5, 6]), texts, slot_mappings=None) == [[3, 4, 1], [], []]
    texts[0, 5:7] = 9, 9
    assert proposer.propose([[9], [9], []], np.array([7, 5, 6]), texts) == [[], [], []]


def test_nothing_is_drafted_beyond_the_context() -> None:
    text = np.array([[1, 2, 3, 4, 1, 2]])
    assert ChainProposer(config(3, longest=7)).propose([[2]], np.array([6]), text) == [[]]


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is missing: see examples/vllm_proposer.py")
def test_vllms_greedy_text_stays_the_same(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    prompts = [[3, 14, 15, 9, 2, 6, 3, 14], [5, 5, 5, 5]]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", ASK, str(model), json.dumps(prompts)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603
    assert made.returncode == 0, made.stderr
    plain, drafted = json.loads(made.stdout.splitlines()[-1])
    assert drafted == plain and len(plain[0]) == 40
