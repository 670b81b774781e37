"""The example for vLLM: chains by its interface, and the same text inside it where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import vllm_proposer
from examples.vllm_proposer import ChainProposer

from ..tiny import MAX_LENGTH, VOCAB, tiny_tokenizer

ROOT = Path(__file__).parents[2]
ASK = """
import json, sys
from vllm import LLM, SamplingParams

chains = {"method": "custom_class", "model": "examples.vllm_proposer.ChainProposer", "num_speculative_tokens": 4}
params, found = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), []
for speculative in (None, chains):
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "disable_log_stats": False}
    engine = LLM(sys.argv[1], speculative_config=speculative, **options)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], params, use_tqdm=False)
    found.append([list(answer.outputs[0].token_ids) for answer in answers])
    counted = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()} if speculative else {}
    del engine
print(json.dumps([*found, counted["vllm:spec_decode_num_accepted_tokens"]]))
"""


def config(tokens: int, longest: int = 100) -> SimpleNamespace:
    speculative = SimpleNamespace(num_speculative_tokens=tokens)
    return SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(max_model_len=longest))


def test_rows_get_chains_of_their_own_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = np.array([[1, 2, 3, 4, 5, 1, 2, 0], [5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 5, 1, 2, 0]])
    proposer = ChainProposer(config(3))
    assert proposer.propose([[2], [9], []], np.array([7, 5, 7]), texts, slot_mappings=None) == [[3, 4, 5], [], []]
    monkeypatch.setattr(vllm_proposer, "COST", 0.4)
    assert proposer.propose([[2], [9], []], np.array([7, 5, 7]), texts) == [[3], [], []]
    texts[0, 6:8] = 9, 9
    assert proposer.propose([[9], [9], []], np.array([8, 5, 7]), texts) == [[], [], []]


def test_nothing_is_drafted_beyond_the_context() -> None:
    text = np.array([[1, 2, 3, 4, 1, 2]])
    assert ChainProposer(config(3, longest=7)).propose([[2]], np.array([6]), text) == [[]]


def saved(folder: Path) -> Path:
    """A tiny model whose heads are as wide as vLLM's CPU kernels take them."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=MAX_LENGTH, **sizes, **heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is missing: see examples/vllm_proposer.py")
def test_vllms_greedy_text_stays_the_same(tmp_path: Path) -> None:
    model = saved(tmp_path / "tiny")
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
    plain, drafted, accepted = json.loads(made.stdout.splitlines()[-1])
    assert drafted == plain and len(plain[0]) == 40 and accepted > 0
