"""A draft model in the native engine: nothing is read twice, a level is one pass, and threads are the target's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import TokenType

from draftree import Engine, SamplingParams, SpeculationParams, load, user
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_draft_model
from draftree.engine.scheduler import SchedulerParams
from draftree.models.base import Nodes, Row
from draftree.models.heads.head_folder import head_for
from draftree.models.model_files import DEFAULT_MODEL
from draftree.models.native.native_model import NativeModel
from draftree.scores import Scores
from draftree.tree import ROOT

from .. import tiny_gguf

PROMPTS = ["the cat in the hat sat on the mat, the cat in", "one two three one two", "a"]
CHUNK, DEPTH = 16, 3
PAIR = os.environ.get("DRAFTREE_PAIR")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model that is nearly the target, and one that is half as large."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_gguf.write(folder / "target.gguf", weights="Q8_0")
    tiny_gguf.write(folder / "near.gguf", weights="Q4_0")
    tiny_gguf.write(folder / "small.gguf", weights="Q4_0", layers=1)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> NativeModel:
    return NativeModel(folder / "target.gguf", threads=2)


class Reader(NativeModel):
    """A draft model that notes what it is fed.

    Attributes:
        passes: [rows] tokens of each.
        twice: texts that a row was fed again, the last token of each.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, threads=2)
        self.passes: list[list[int]] = []
        self.twice: list[tuple[int, ...]] = []
        self._texts: dict[Row, tuple[int, ...]] = {}
        self._nodes: dict[Row, list[tuple[int, ...]]] = {}
        self._seen: dict[Row, set[tuple[int, ...]]] = {}

    def extend(self, rows: Sequence[Row], nodes: Sequence[Nodes]) -> Scores:
        self.passes.append([len(new.tokens) for new in nodes])
        for row, new in zip(rows, nodes, strict=True):
            paths, seen = self._nodes.setdefault(row, []), self._seen.setdefault(row, set())
            for token, parent in zip(new.tokens, new.parents, strict=True):
                paths.append((*(self._texts.get(row, ()) if parent == ROOT else paths[parent]), int(token)))
                if paths[-1] in seen:
                    self.twice.append(paths[-1])
                seen.add(paths[-1])
        return super().extend(rows, nodes)

    def commit(self, row: Row, path: Sequence[int]) -> None:
        if path:
            self._texts[row] = self._nodes[row][path[-1]]
        self._nodes[row] = []
        super().commit(row, path)


@pytest.fixture
def reader(folder: Path) -> Iterator[Reader]:
    yield Reader(folder / "near.gguf")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "static", "opt-tree", "dynamic-width"])
def test_a_draft_model_reads_nothing_twice(
    method: str, temperature: float, target: NativeModel, reader: Reader
) -> None:
    """Prompts are read once, accepted nodes never again: what ends a text is the root of the next tree alone.

    Only a token that the policy had drafted and left out of the tree may come again, as such a root.
    """
    engine = Engine(target, SpeculationParams(drafter=reader, method=method, nodes=8))
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=temperature, seed=3))
    assert sum(sum(result.stats.accepted) for result in results) > 10
    leaves_out = method in ("opt-tree", "dynamic-width")
    assert len(reader.twice) <= leaves_out * sum(result.stats.steps for result in results) / 4


def test_a_level_of_all_requests_is_one_pass(target: NativeModel, reader: Reader) -> None:
    """Of nodes that wait too: tokens that the draft model has not read go along with the root."""
    engine = Engine(target, SpeculationParams(drafter=reader, method="static", nodes=8))
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    steps = max(result.stats.steps for result in results)
    levels = len(reader.passes) / steps
    depth = max(len(result.stats.drafted) for result in results)
    assert levels <= depth, "the last layer is not scored"
    assert sum(len(each) == len(PROMPTS) for each in reader.passes) > len(reader.passes) / 2


@pytest.mark.parametrize(("name", "times"), [("near", 1), ("small", 2)])
def test_long_prompts_are_read_in_chunks_beside_the_targets(
    name: str, times: int, folder: Path, target: NativeModel
) -> None:
    """As long ones as the target's time for its chunk allows."""
    reader = Reader(folder / f"{name}.gguf")
    engine = Engine(
        target,
        SpeculationParams(drafter=reader, method="chain", settings={"depth": DEPTH}),
        scheduling=SchedulerParams(chunk=CHUNK),
    )
    short = engine.submit(PROMPTS[1], SamplingParams(max_tokens=200, ignore_eos=True))
    long = engine.submit(" ".join(PROMPTS * 4), SamplingParams(max_tokens=24, ignore_eos=True))
    engine.wait(lambda: short.done and long.done)
    assert long.request.prompt_length > 4 * CHUNK
    assert (times - 0.5) * CHUNK <= max(max(each) for each in reader.passes) <= times * CHUNK + DEPTH
    assert not reader.twice


def test_a_draft_model_runs_on_the_targets_threads(folder: Path, target: NativeModel) -> None:
    """Two pools on the same cores waited for each other; and a draft model took all cores beside a target of one."""
    draft = load_draft_model(str(folder / "near.gguf"), target)
    assert isinstance(draft, NativeModel) and draft.threads == target.threads
    shared: list[object] = []
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(draft, "share_threads", shared.append)
        Engine(target, SpeculationParams(drafter=draft, method="chain"))
    assert shared == [target]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("padding", [(0, 40), (40, 0)])
def test_padded_vocabularies_of_one_tokenizer_go_together(
    padding: tuple[int, int], temperature: float, tmp_path: Path
) -> None:
    """No token that pads the draft model's alone is drafted, though it has logits."""
    models = []
    for name, weights, more in zip(("target", "near"), ("Q8_0", "Q4_0"), padding, strict=True):
        words = tiny_gguf.byte_level()
        tokens = (*words.tokens, *(f"[PAD{i}]" for i in range(more)))
        padded = replace(words, tokens=tokens, types=(*words.types, *[TokenType.UNUSED] * more))
        path = tiny_gguf.write(tmp_path / f"{name}.gguf", weights=weights, vocabulary=padded)
        models.append(NativeModel(path, threads=1))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    alone = Engine(models[0]).generate(PROMPTS, params)
    engine = Engine(models[0], SpeculationParams(drafter=models[1], method="opt-tree", nodes=8))
    for result, expected in zip(engine.generate(PROMPTS, params), alone, strict=True):
        assert result.token_ids == expected.token_ids


@pytest.mark.pair
@pytest.mark.skipif(not PAIR, reason="set DRAFTREE_PAIR")
def test_the_small_coder_drafts_for_the_large_one() -> None:
    """So does a model of another vocabulary."""
    large, small = sorted(Path(str(PAIR)).glob("*.gguf"), reverse=True)
    target = load(str(large))
    params = SamplingParams(max_tokens=24)
    prompt = "def fibonacci(n):\n    if n < 2:\n        return n\n"
    (alone,) = Engine(target).generate([prompt], params)
    engine = Engine(target, SpeculationParams(drafter=str(small), method="opt-tree", nodes=6))
    (result,) = engine.generate([prompt], params)
    assert result.token_ids == alone.token_ids
    assert result.stats.steps < 12
    engine = Engine(target, SpeculationParams(drafter=DEFAULT_MODEL, method="chain", nodes=4))
    (result,) = engine.generate([prompt], params)
    assert result.token_ids == alone.token_ids
    assert result.stats.steps < 18


@pytest.mark.pair
@pytest.mark.skipif(not PAIR, reason="set DRAFTREE_PAIR")
def test_a_head_comes_for_the_large_coder_alone() -> None:
    large, small = sorted(Path(str(PAIR)).glob("*.gguf"), reverse=True)
    target = load(str(large))
    found = head_for(target)
    assert found is not None
    assert found.name == "qwen2.5-coder-1.5b"
    assert head_for(load(str(small))) is None
    prompt = "Mia has 12 apples and buys 3 bags of 8. She gives a quarter of all to Tom. How many are left?"
    params = SamplingParams(max_tokens=48)
    (alone,) = Engine(target).generate([user(prompt)], params)
    (result,) = Engine(target, SpeculationParams(drafter="head", method="chain")).generate([user(prompt)], params)
    assert result.token_ids == alone.token_ids
    assert result.stats.mal > 1.5


def test_the_target_drafts_for_itself(target: NativeModel) -> None:
    """Every draft is accepted."""
    engine = Engine(target, SpeculationParams(drafter="self", method="chain", settings={"depth": DEPTH}))
    assert isinstance(engine.speculation.drafter, TreeDrafter)
    assert isinstance(engine.speculation.drafter.source, ModelSource)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=33, temperature=temperature, seed=3, ignore_eos=True)
        (alone,) = Engine(target).generate(PROMPTS[:1], params)
        (result,) = engine.generate(PROMPTS[:1], params)
        assert result.token_ids == alone.token_ids
        assert result.stats.steps == 32 / (DEPTH + 1)
