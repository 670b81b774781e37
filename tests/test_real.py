"""The default model with its real weights, end to end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import draftree
from draftree.config import SamplingParams
from draftree.drafters.registry import load_drafter
from draftree.engine.engine import Engine
from draftree.engine.replay import first_difference
from draftree.engine.speculation import Speculation
from draftree.errors import UnsupportedModelError
from draftree.models.base import Nodes
from draftree.models.heads.eagle_model import HeadModel
from draftree.models.heads.head_folder import load_head_for
from draftree.models.huggingface import hf_model, norms
from draftree.models.huggingface.hf_loading import load_huggingface, load_stock
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.pass_inputs import POSITION, PassInputs
from draftree.papers.c2t import DEFAULT, read_classifier
from draftree.policies.methods import METHODS
from draftree.text.encoding import encode
from draftree.tree import ROOT

from .pairs import policy
from .references import beam_search, generate_greedily, same_beams

pytestmark = pytest.mark.real

QUESTIONS = [
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers, then the same function for three numbers.",
    "Name two colours.",
]
TOKENS = 16


@pytest.fixture(scope="module")
def model() -> HFModel:
    found = load_huggingface("smollm2")
    assert isinstance(found, HFModel)
    return found


@pytest.fixture(scope="module")
def prompts(model: HFModel) -> list[list[int]]:
    return [encode(model.tokenizer, draftree.user(q)) for q in QUESTIONS]


def _agree(model: HFModel, prompt: list[int], want: list[int], got: list[int], params: SamplingParams) -> None:
    difference = first_difference(model, prompt, want, got, params)
    assert difference is None or difference.near_tie, difference


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    """With transformers' own layers."""
    return load_stock("smollm2")[0]


@pytest.fixture(scope="module")
def greedy(stock: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [generate_greedily(stock, p, TOKENS) for p in prompts]


def test_beam_search_finds_the_sequences_of_transformers(
    model: HFModel, stock: PreTrainedModel, prompts: list[list[int]]
) -> None:
    engine = draftree.BeamEngine(model, draftree.load_beam_source("self", model))
    want = beam_search(stock, prompts[2], 3, 6)
    made = engine.generate([prompts[2]], SamplingParams(max_tokens=6), draftree.BeamParams(width=3, returned=3))[0]
    assert same_beams([(h.token_ids, h.score) for h in made.hypotheses], want)


@pytest.mark.parametrize("method", ["auto", "static"])
def test_greedy_ids_equal_transformers_generate_for_a_batch_of_three(
    method: str, model: HFModel, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=TOKENS)
    engine = Engine(model, Speculation(draftree.load_drafter("lookup", model, policy(method)), 12))
    for prompt, want, got in zip(prompts, greedy, engine.generate(prompts, params), strict=True):
        _agree(model, prompt, want, got.token_ids, params)


def test_the_default_drafter_takes_the_head_that_ships(
    model: HFModel, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    made = draftree.load_drafter("auto", model, policy("opt-tree"))
    assert made.name == "lookup+head"
    got = Engine(model, Speculation(made, 16)).generate(prompts[:1], SamplingParams(max_tokens=TOKENS))[0]
    _agree(model, prompts[0], greedy[0], got.token_ids, SamplingParams())
    assert got.stats.mal > 1.5


def test_the_target_of_the_head_is_known_by_its_weights() -> None:
    weights, _ = load_stock("smollm2", dtype="bfloat16")
    made = draftree.load_drafter("auto", HFModel(weights, name="mine", self_test=False), policy("opt-tree"))
    assert made.name == "lookup+head"


def test_greedy_ids_equal_with_a_drafting_model(
    model: HFModel, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=16)
    engine = Engine(model, Speculation(draftree.load_drafter("self", model, METHODS["static"].policy()), 14))
    got = engine.generate(prompts[:1], params)[0]
    _agree(model, prompts[0], greedy[0][:16], got.token_ids, params)
    assert got.stats.mal > 2


def test_sampled_ids_equal_ar_decoding(model: HFModel, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=0.95, seed=9)
    trees = Engine(model, Speculation(draftree.load_drafter("lookup", model, METHODS["dynamic-width"].policy())))
    plain = Engine(model)
    for prompt in prompts[:2]:
        want = plain.generate([prompt], params)[0].token_ids
        _agree(model, prompt, want, trees.generate([prompt], params)[0].token_ids, params)


def test_in_16_bits_right_passes_are_taken_and_wrong_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms as on a GPU its logits differ by more, from one pass to another, than those of small models do."""
    stock, tokenizer = load_stock("smollm2", dtype="bfloat16")
    assert norms.fuse(stock) == 61
    HFModel(stock, tokenizer)
    hf_model._SHARED.pop(stock)
    right = PassInputs.of

    def in_order(*given: Any) -> PassInputs:
        inputs = right(*given)
        inputs.table[POSITION] = inputs.table[POSITION, 0] + np.arange(inputs.count)
        return inputs

    monkeypatch.setattr(PassInputs, "of", in_order)
    with pytest.raises(UnsupportedModelError, match="self-test"):
        HFModel(stock, tokenizer)


def test_streamed_text_is_the_tokenizers_text(model: HFModel) -> None:
    question = "Repeat exactly: naïve café, 你好, 🙂🙃, ½ × ⅓ ≈ 0.17"
    chunks = list(Engine(model).stream(draftree.user(question), SamplingParams(max_tokens=48)))
    assert model.tokenizer is not None
    want = model.tokenizer.decode([c.token for c in chunks], skip_special_tokens=True)
    assert "".join(c.text for c in chunks) == want


def _command() -> str:
    command = shutil.which("draftree", path=str(Path(sys.executable).parent))
    assert command, "the entry point is not installed"
    return command


def test_the_command_decodes_as_ar_decoding_and_does_not_convert_again(model: HFModel) -> None:
    asked = [_command(), "generate", QUESTIONS[0], "--max-tokens", "32", "--json", "--compare"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)  # noqa: S603 - our own command
    report = json.loads(done.stdout)
    assert report["ar"]["same_tokens"] is True
    assert report["stats"]["tokens"] == len(report["token_ids"]) <= 32
    assert "Converting" not in done.stderr


def test_ctrl_c_keeps_and_prints_what_was_generated(model: HFModel) -> None:
    asked = [_command(), "generate", "Tell me a very long story about a lighthouse.", "--max-tokens", "4000"]
    running = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603 - our own command
    assert running.stdout is not None
    first = running.stdout.read(40)
    running.send_signal(signal.SIGINT)
    rest, complaint = running.communicate()
    assert running.returncode == 130
    assert len(first + rest) >= 40
    assert b"interrupted after " in complaint.splitlines()[-1]
    assert b"Traceback" not in complaint


def test_the_shipped_classifiers_learned_from_the_default_model_and_its_head(model: HFModel) -> None:
    """Of other weights they would warn, and a warning is an error here."""
    assert read_classifier(DEFAULT).made_for.target_weights == model.capabilities.fingerprint
    Engine(model, Speculation(draftree.load_drafter("head", model, METHODS["c2t"].policy())))


@pytest.mark.parametrize("method", ["opt-tree", "auto"])
def test_the_shipped_head_drafts_and_changes_nothing(
    method: str, model: HFModel, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    engine = Engine(model, Speculation(load_drafter("head", model, policy(method)), 8))
    results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS))
    for prompt, want, got in zip(prompts, greedy, results, strict=True):
        _agree(model, prompt, want, got.token_ids, SamplingParams())
    if method == "opt-tree":
        assert sum(sum(g.stats.accepted) for g in results) > 0.5 * sum(g.stats.steps for g in results)


_HEAD_TOP = {
    411: ([1372, 653, 582, 451], [34.0217, 33.8351, 33.3068, 31.3206]),
    260: ([1867, 1142, 817, 3832], [29.5697, 27.6774, 27.0250, 27.0192]),
    28: ([216, 638, 970, 338], [20.9302, 20.5204, 20.3315, 20.1176]),
}
"""After which token of the text below -> the tokens of the highest logits, and these."""


def test_the_shipped_head_has_the_logits_that_it_was_trained_to() -> None:
    """They were computed by the network and the format that it was trained with."""
    head = load_head_for(draftree.load("smollm2", backend="transformers"))
    assert isinstance(head, HeadModel)
    tokens = [284, 510, 1904, 253, 28, 1000, 411]
    states = 4 * np.sin(np.arange(len(tokens) * 576, dtype=np.float32)).reshape(-1, 576)
    row = head.open()
    first = head.advance([row], [tokens], [torch.from_numpy(states)]).logits([0])
    nodes = head.extend([row], [Nodes([260, 28], [ROOT, ROOT])]).logits([0, 1])
    for logits, (ids, values) in zip(np.concatenate([first, nodes]), _HEAD_TOP.values(), strict=True):
        best = np.argsort(-logits)[:4]
        assert head.vocabulary_of(row)[best].tolist() == ids
        np.testing.assert_allclose(logits[best], values, atol=1e-3)
