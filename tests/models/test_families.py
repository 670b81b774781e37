"""Every family of models that people download, as a tiny file with random weights: what runs it, and that it is right.

Each is made in transformers and converted by llama.cpp's own converter.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from gguf import GGUFReader
from gguf.constants import Keys
from transformers import PreTrainedModel

import draftree
from draftree import Engine, SamplingParams, SpeculationParams
from draftree.errors import DraftreeWarning, ModelFileError
from draftree.models.base import LanguageModel, Nodes, decoded, prefill, prefill_scored
from draftree.models.gguf.gguf_checks import check
from draftree.models.llama import llama_model
from draftree.models.llama.library import OverrideStruct, Weights
from draftree.models.llama.llama_model import EXACT, LlamaModel, exactness
from draftree.models.native.native_model import NativeModel
from draftree.tree import Floats

from ..checkpoints import DENSE, checkpoint, converted
from ..families import CONTEXT, FAMILIES, long_rope, made, repacked
from .llama.damaged import is_fine, overwritten, renamed
from .native.conftest import quantized as quantized_as


class Runs(Enum):
    """What runs a file by default."""

    NATIVE = "the native engine"
    TREES = "llama.cpp, with trees"
    AR = "llama.cpp, by AR decoding"


RUNS: Mapping[str, Runs] = {
    **dict.fromkeys(DENSE, Runs.NATIVE),
    **dict.fromkeys(("phi3+long", "qwen35", "qwen35+mtp", "qwen3moe"), Runs.NATIVE),
    **dict.fromkeys(("gemma4", "gemma4+experts", "gemma4+layer-embeddings", "gpt-oss", "gpt-oss+yarn"), Runs.TREES),
    **dict.fromkeys(("deepseek2", "ernie4_5-moe", "hunyuan-moe", "cohere2", "apertus"), Runs.TREES),
    **dict.fromkeys(("qwen35moe", "qwen35moe+mtp", "qwen3next"), Runs.AR),
    **dict.fromkeys(("granitehybrid", "granitehybrid+experts", "nemotron_h", "nemotron_h_moe"), Runs.AR),
    **dict.fromkeys(("lfm2", "lfm2moe", "falcon-h1"), Runs.AR),
}
BY_TREES = [name for name in FAMILIES if RUNS[name] == Runs.TREES]
PROMPT, TOKENS, TEXTS = 12, 6, 40
"""Ids of a prompt, which are more than a window; ids of an answer; prompts, of which the one with the clearest answer
is taken."""
_LONGER = "longer"
"""The folder of a model with LongRoPE whose trained length is larger than a first context."""
_GAP = 0.2
"""Between the two largest logits of each token of an answer."""


class Tiny(NamedTuple):
    """A tiny model and its file; ``answer`` is what transformers generates behind ``prompt``, greedily."""

    path: Path
    prompt: list[int]
    answer: list[int]


def _clearest(model: PreTrainedModel, path: Path) -> Tiny:
    vocabulary, drawn = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (TEXTS, PROMPT), generator=drawn)
    gaps = torch.full((TEXTS,), torch.inf)
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        first, second = logits.topk(2).values.T
        gaps = torch.minimum(gaps, first - second)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    best = int(gaps.argmax())
    assert gaps[best] > _GAP
    return Tiny(path, ids[best, :PROMPT].tolist(), ids[best, PROMPT:].tolist())


@pytest.fixture(scope="module")
def quantized(files: Mapping[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each family that llama.cpp runs with trees its file in Q8_0."""
    root = tmp_path_factory.mktemp("quantized")
    folders = [root / name for name in BY_TREES]
    for name, folder in zip(BY_TREES, folders, strict=True):
        folder.symlink_to(files[name].path.with_suffix(""))
    return dict(zip(BY_TREES, converted(*folders, kind="MOSTLY_Q8_0"), strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """Of each name its files of float32 weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("families")
    folders = {name: root / f"tiny{i}" for i, name in enumerate(RUNS)}  # llama.cpp looks at names that it knows
    models = {
        name: made(FAMILIES[name], folder) if name in FAMILIES else checkpoint(DENSE[name](), folder)
        for name, folder in folders.items()
    }
    checkpoint(long_rope(trained=2 * CONTEXT), root / _LONGER)
    paths = dict(zip(folders, converted(*folders.values(), root / _LONGER), strict=False))
    found = {name: _clearest(models[name], paths[name]) for name in RUNS}
    torch.set_num_threads(threads)
    return found


def test_every_family_is_in_the_table() -> None:
    assert RUNS.keys() == FAMILIES.keys() | DENSE.keys()


def _loaded(path: Path, runs: Runs) -> LanguageModel:
    """By default, with one line for what the native engine does not run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = draftree.load(str(path))
    said = [str(each.message) for each in caught if each.category is DraftreeWarning]
    assert ["runs on llama.cpp" in line for line in said] == [True] * (runs != Runs.NATIVE), said
    return model


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_decodes_what_transformers_decodes(
    name: str, files: Mapping[str, Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp keeps keys in float32 here: in 8 bits they choose other experts now and then."""
    monkeypatch.setattr(Weights, "_types", lambda self: (Format.F32, Format.F32))
    path, prompt, answer = files[name]
    model, runs = _loaded(path, RUNS[name]), RUNS[name]
    found = model.capabilities
    assert name.startswith(found.architecture)
    assert found.engine.startswith("native" if runs == Runs.NATIVE else "llama.cpp")
    assert bool(found.no_trees) == (runs == Runs.AR)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    by_trees = SpeculationParams(drafter=str(path), method="opt-tree", nodes=6)  # itself: some are accepted
    for speculation in (SpeculationParams(drafter="none"), SpeculationParams(), by_trees):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DraftreeWarning)
            result = Engine(model, speculation).generate([prompt], params)[0]
        assert list(result.token_ids) == answer, speculation.drafter
    assert (sum(result.stats.accepted) > 0) == (runs != Runs.AR)


def test_the_multi_token_prediction_layer_is_in_the_file(files: Mapping[str, Tiny]) -> None:
    for name in ("qwen35+mtp", "qwen35moe+mtp"):
        header = check(files[name].path)
        assert header.metadata.number(Keys.LLM.NEXTN_PREDICT_LAYERS) == 1
        assert any(tensor.name == "blk.2.nextn.eh_proj.weight" for tensor in header.tensors)


def _walk(model: LanguageModel, reference: LanguageModel, steps: int) -> tuple[float, set[int]]:
    """Three rows that grow by random trees, are forked at shorter lengths and read on, against one token at a time.

    Returns:
        the largest difference of any logit; the rows' lengths.
    """
    drawn, vocabulary = random.Random(0), model.capabilities.vocab_size
    texts = [[drawn.randrange(vocabulary) for _ in range(length)] for length in (5, 11, 220)]
    rows, worst, lengths = [prefill(model, text) for text in texts], 0.0, set[int]()
    for step in range(steps):
        tokens = [[drawn.randrange(vocabulary) for _ in range(drawn.randrange(2, 9))] for _ in rows]
        parents = [[drawn.randrange(-1, i) if i else -1 for i in range(len(each))] for each in tokens]
        scores = model.extend(rows, [Nodes(*tree) for tree in zip(tokens, parents, strict=True)])
        first = 0
        for i in range(len(rows)):
            path = [drawn.randrange(len(tokens[i]))]
            while parents[i][path[0]] >= 0:
                path.insert(0, parents[i][path[0]])
            alone = prefill(reference, texts[i])
            wanted = decoded(reference, alone, [tokens[i][node] for node in path])
            reference.close(alone)
            worst = max(worst, float(np.abs(scores.logits([first + node for node in path]) - wanted).max()))
            first += len(tokens[i])
            tokens[i] = [tokens[i][node] for node in path]
            parents[i] = path
        for row, text, path, kept in zip(rows, texts, parents, tokens, strict=True):
            model.commit(row, path)
            text += kept
            lengths.add(len(text))
        if step % 2:
            source, target = drawn.sample(range(3), 2)
            shorter = drawn.randrange(3, len(texts[source]))
            model.close(rows[target])
            rows[target], texts[target] = model.fork(rows[source], shorter), texts[source][:shorter]
    return worst, lengths


@pytest.mark.parametrize("name", BY_TREES)
def test_trees_are_exact_in_batches_forks_and_larger_contexts(
    name: str, quantized: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_model, "FIRST_CELLS", 256)
    model, reference = LlamaModel(quantized[name], threads=2), LlamaModel(quantized[name], threads=1)
    before, exact = model._context.cells, not model.weights.header.has_float_layers
    worst, lengths = _walk(model, reference, steps=6)
    assert worst == 0 if exact else worst < 0.5  # rounding; logits have a standard deviation of 2.4
    assert min(lengths) < 20 and max(lengths) > 200 and model._context.cells > before
    assert exactness(model, 600) == (EXACT, 0.0)
    assert exact == (name in ("gemma4", "gemma4+layer-embeddings", "cohere2", "apertus"))
    assert (model.capabilities.trees == EXACT, model.capabilities.rounding) == (exact, 0.0 if exact else None)


def test_experts_in_mxfp4_are_drafted_for(quantized: Mapping[str, Path]) -> None:
    """As gpt-oss is published."""
    path = repacked(quantized["gpt-oss"], "_exps.weight", Format.MXFP4)
    model = _loaded(path, Runs.TREES)
    assert model.capabilities.weight_format == "MXFP4+Q8_0"
    params, prompt = SamplingParams(max_tokens=24, ignore_eos=True), [*range(20, 36)]
    alone = Engine(model, SpeculationParams(drafter="none")).generate([prompt], params)[0]
    drafter = LlamaModel(path, threads=2)
    drafted = Engine(model, SpeculationParams(drafter=drafter, method="opt-tree", nodes=6)).generate([prompt], params)[
        0
    ]
    assert alone.token_ids == drafted.token_ids
    assert sum(drafted.stats.accepted) > 0


def test_a_context_that_grows_keeps_the_rope_of_its_keys(files: Mapping[str, Tiny]) -> None:
    """llama.cpp took the short factors of LongRoPE for contexts up to the trained length, and the long ones beyond."""
    model = LlamaModel(files["phi3+long"].path.with_name(f"{_LONGER}.gguf"), threads=1)
    text = [i * 31 % model.capabilities.vocab_size for i in range(2 * CONTEXT + 200)]

    def last(chunks: Sequence[int]) -> Floats:
        row, at = model.open(), 0
        for size in chunks:
            scores = model.extend([row], [Nodes.chain(text[at : at + size], wanted=1)])
            model.commit(row, range(size))
            at += size
        model.close(row)
        return scores.logits([0]).copy()

    short, cells = last([40]), model._context.cells
    grown = last([CONTEXT - 100, CONTEXT + 300])
    assert cells <= 2 * CONTEXT < model._context.cells
    assert np.abs(last([CONTEXT - 100, CONTEXT + 300]) - grown).max() < 1e-3
    assert np.abs(last([40]) - short).max() < 1e-3


def test_the_factors_of_long_rope_are_those_of_llama_cpp_at_the_whole_context(
    files: Mapping[str, Tiny], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that names no length that was trained on was trained on its context: short factors. It got the long ones
    on llama.cpp."""
    monkeypatch.setattr(Weights, "_types", lambda self: (Format.F32, Format.F32))
    key, stated = "phi3.rope.scaling.original_context_length", files["phi3+long"].path
    unstated = quantized_as(stated, Format.F32, tmp_path / "unstated.gguf", lacking=key)
    assert [key in GGUFReader(path).fields for path in (stated, unstated)] == [True, False]

    def logits(model: LanguageModel) -> Floats:
        text = [i * 31 % model.capabilities.vocab_size for i in range(200)]
        return prefill_scored(model, text)[1].logits([0]).copy()

    kinds: tuple[type[LlamaModel] | type[NativeModel], ...] = LlamaModel, NativeModel
    found = [[logits(kind(path, threads=1)) for kind in kinds] for path in (stated, unstated)]
    monkeypatch.setattr(Weights, "_overrides", lambda self: (OverrideStruct * 2)())
    monkeypatch.setattr(llama_model, "FIRST_CELLS", 8 * CONTEXT)
    plain = [LlamaModel(path, threads=1) for path in (stated, unstated)]
    assert [model._context.cells for model in plain] == [model.capabilities.max_length for model in plain]
    expected = [*map(logits, plain)]
    assert np.abs(expected[0] - expected[1]).max() > 0.5
    for (ours, native), of_llama in zip(found, expected, strict=True):
        assert np.abs(ours - of_llama).max() < 1e-3
        assert np.abs(native - of_llama).max() < 0.05


_GEMMA, _OSS, _MOE = "gemma4.attention.", "gpt-oss.attention.", "qwen3moe."


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"{_GEMMA}{key}_length", value) for key in ("key", "value") for value in (0, 3, 96, 2**20)),
        *((f"{_GEMMA}shared_kv_layers", value) for value in (1, 2, 2**31)),
        (f"{_GEMMA}sliding_window", 2**31 - 1),
        *((f"gemma4.rope.dimension_count{of}", value) for of in ("", "_swa") for value in (0, 1, 66, 2**31)),
        *((f"{_OSS}value_length", value) for value in (0, 1, 33, 2**31 - 1)),
        (f"{_MOE}attention.head_count", 2**32 - 1),
        (f"{_MOE}expert_used_count", 5),
        ("deepseek2.expert_gating_func", 33),
        ("deepseek2.attention.head_count_kv", 2),
        *((f"deepseek2.attention.{of}_length{mla}", 48) for of in ("key", "value") for mla in ("", "_mla")),
        *(("qwen35.ssm.inner_size", value) for value in (0, 3, 2**20)),
        ("qwen35.full_attention_interval", 0),
    ],
)
def test_numbers_on_which_llama_cpp_aborts_are_refused(
    key: str, value: int, files: Mapping[str, Tiny], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(files[key.partition(".")[0]].path.read_bytes())
    overwritten(key, value)(reader := GGUFReader(damaged, "r+"))
    reader.data.flush()
    with pytest.raises(ModelFileError, match=re.escape(f"{key} is {value}, ")):
        check(damaged)


def test_a_window_of_gemma_4_has_a_rope_of_its_own(files: Mapping[str, Tiny], tmp_path: Path) -> None:
    """Without its number of dimensions that of the larger heads is taken."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(files["gemma4"].path.read_bytes())
    renamed("gemma4.rope.dimension_count_swa")(reader := GGUFReader(damaged, "r+"))
    reader.data.flush()
    with pytest.raises(ModelFileError, match="gemma4.rope.dimension_count_swa is 64, .*32"):
        check(damaged)


@pytest.fixture(scope="module")
def outcomes(files: Mapping[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of damaged variants of each file that llama.cpp runs: name, exit code, output and complaint of a request."""
    paths = [str(files[name].path) for name in FAMILIES]
    command = [
        sys.executable,
        "-m",
        "tests.models.llama.damaged",
        str(tmp_path_factory.mktemp("damaged")),
        "700",
        *paths,
    ]
    settings = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_damaged_files_are_refused_in_one_line_or_decode(outcomes: Sequence[Mapping[str, Any]]) -> None:
    assert len(outcomes) > 2 * len(FAMILIES)
    assert [each for each in outcomes if not is_fine(each)] == []
    assert {each["code"] for each in outcomes} == {0, 2}
