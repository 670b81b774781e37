"""Calibration on tiny models: what is counted, what an interruption costs, and the trees that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.draft_model import ModelSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.errors import ConfigError, RunError
from draftree.models.base import prefill
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.torch_sampling import gumbel_noise
from draftree.policies.base import Provenance
from draftree.policies.fixed import Counts
from draftree.sampling.noise import stream_key
from draftree.train.rank_acceptance import AcceptanceMeasurement, Tally, TruePath, conclude, measure, ranks_along

from ..lookups import Reference
from ..pairs import drafter, target
from ..tiny import VOCAB, causal_logits, tiny

PROMPTS = ((3, 14, 15, 9, 2, 6, 14, 15), (27, 1, 8), (31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8))
TOKENS = 24


def calibration(**changes: object) -> AcceptanceMeasurement:
    settings: dict[str, object] = {
        "made_for": Provenance("tiny", "it"),
        "prompts": PROMPTS,
        "depth": 4,
        "stride": 3,
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "seed": 0,
        "dtype": "float32",
    }
    return AcceptanceMeasurement(**{**settings, **changes})  # type: ignore[arg-type]


def counts(name: str, path: Path, wanted: AcceptanceMeasurement) -> Counts:
    model, policy = target(), TruePath()
    tally = Tally.load(path, wanted)
    for _ in measure(wanted, model, drafter(name, model, policy), policy, tally):
        pass
    return tally.counts


def decoded(prompt: tuple[int, ...], temperature: float = 0.0) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5)
    return Engine(target()).generate([list(prompt)], params)[0].token_ids, params


def along(made: Drafter, policy: TruePath, stride: int, temperature: float = 0.0) -> list[list[int | None]]:
    output, params = decoded(PROMPTS[0], temperature)
    return list(ranks_along(made, policy, PROMPTS[0], output, params, depth=4, stride=stride))


@pytest.mark.parametrize("stride", [1, 3, 4, 7])
def test_a_drafter_that_is_the_target_is_always_right_at_rank_0(stride: int, tmp_path: Path) -> None:
    found = counts("self", tmp_path / "part", calibration(stride=stride))
    assert found.acceptance.tolist() == [[1.0]] * 4


@pytest.mark.parametrize("stride", [1, 2, 5, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_ranks_of_a_model_are_those_of_a_plain_forward(stride: int, temperature: float) -> None:
    """Whatever the stride and depth: distributions depend on the tokens before, and on the target's noise, alone."""
    policy, weights = TruePath(), tiny(seed=5)
    made = TreeDrafter(policy, ModelSource(HFModel(weights, self_test=False), VOCAB))
    output, _ = decoded(PROMPTS[0], temperature)
    logits = causal_logits(weights, [*PROMPTS[0], *output])[len(PROMPTS[0]) - 1 : -1]
    if temperature:  # the drafter foresees the target's noise
        positions = range(len(PROMPTS[0]), len(PROMPTS[0]) + len(output))
        logits = logits + gumbel_noise([stream_key(5, position) for position in positions], logits.shape[1])
    ranks = [int((row > row[token]).sum()) for row, token in zip(logits, output, strict=True)]
    want = [ranks[start : start + 4] for start in range(1, len(output), stride)]
    assert along(made, policy, stride, temperature) == want


def test_the_ranks_of_lookup_are_those_of_its_index_at_the_start_of_the_draft() -> None:
    policy = TruePath()
    made = TreeDrafter(policy, NgramSource(shortest=1))
    output, _ = decoded(PROMPTS[0])
    for start, ranks in zip(range(1, len(output)), along(made, policy, 1), strict=True):
        reference = Reference([[*PROMPTS[0], *output[:start]]], shortest=1)
        for d, rank in enumerate(ranks):
            path, token = output[start : start + d], output[start + d]
            best = list(reference.predict(path, start - 1))[:64]
            assert rank == (best.index(token) if token in best else None)


def test_a_draft_ends_at_the_first_token_without_a_rank() -> None:
    policy = TruePath()
    for ranks in along(TreeDrafter(policy, NgramSource(shortest=1)), policy, 1):
        assert None not in ranks[:-1]
        assert 1 <= len(ranks) <= 4


def test_the_drafter_is_left_without_sequences() -> None:
    policy, model = TruePath(), target()
    drafting = model.twin()
    along(TreeDrafter(policy, ModelSource(drafting, VOCAB)), policy, 3)
    assert prefill(drafting, list(PROMPTS[1])).slot == 0


@pytest.mark.parametrize("name", ["lookup", "relative"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_calibration_goes_on_where_it_was(name: str, temperature: float, tmp_path: Path) -> None:
    wanted = calibration(temperature=temperature)
    whole = counts(name, tmp_path / "whole", wanted)
    model, policy = target(), TruePath()
    first = Tally.load(tmp_path / "part", wanted)
    steps: Iterator[int] = measure(wanted, model, drafter(name, model, policy), policy, first)
    assert next(steps) == 1
    second = Tally.load(tmp_path / "part", wanted)
    assert second.done == 1
    assert counts(name, tmp_path / "part", wanted) == whole
    assert sum(whole.trials) > sum(second.trials)


def test_prompts_that_are_done_are_not_decoded_again(tmp_path: Path) -> None:
    counts("lookup", tmp_path / "part", calibration())
    model, policy = target(), TruePath()
    again = Tally.load(tmp_path / "part", calibration())
    assert list(measure(calibration(), model, drafter("lookup", model, policy), policy, again)) == []
    assert model.pass_seconds == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"made_for": Provenance("tiny", "another")},
        {"prompts": PROMPTS[:2]},
        {"depth": 5},
        {"stride": 2},
        {"max_tokens": 23},
        {"temperature": 0.5},
        {"seed": 1},
        {"dtype": "float16"},
    ],
)
def test_what_was_measured_otherwise_is_not_mixed_in(change: dict[str, object], tmp_path: Path) -> None:
    Tally.load(tmp_path / "part", calibration()).save()
    with pytest.raises(ConfigError, match="other models, prompts or settings: repeat that one .* --force"):
        Tally.load(tmp_path / "part", calibration(**change))
    assert Tally.load(tmp_path / "part", calibration(**change), force=True).done == 0


@pytest.mark.parametrize("content", ["", "[]", '{"key": 1}', '{"trials": 3, "accepted": 4}'])
def test_a_corrupt_part_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "part").write_text(content)
    for force in (False, True):
        with pytest.raises(ConfigError, match="part is of no calibration"):
            Tally.load(tmp_path / "part", calibration(), force=force)


def test_the_tree_is_the_best_for_the_counts(tmp_path: Path) -> None:
    tally = Tally.load(tmp_path / "part", calibration(depth=2))
    for ranks in [[0, 0]] * 5 + [[0, 1]] * 3 + [[2, None]] * 2:
        tally.add(ranks)
    found = conclude(calibration(depth=2), tally, 3)
    assert found.counts == Counts((10, 10), ((8, 0, 2), (5, 3, 0)))
    assert found.tree == ((0,), (0, 0), (0, 1))
    assert found.expected_acceptance_length == pytest.approx(1 + 0.8 + 0.4 + 0.24)


def test_a_drafter_that_is_never_right_gives_no_tree(tmp_path: Path) -> None:
    tally = Tally.load(tmp_path / "part", calibration())
    tally.add([None])
    with pytest.raises(RunError, match="it was never right in 1 trials: use more prompts"):
        conclude(calibration(), tally, 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"depth": 0}, "depth is 0: use 1 to 64"),
        ({"depth": 65}, "depth is 65"),
        ({"stride": 0}, "stride is 0"),
        ({"max_tokens": 1}, "max_tokens is 1: use at least 2"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        calibration(**change)


def test_what_is_accepted_at_rank_0_is_what_the_drafters_own_argmax_gets_right(tmp_path: Path) -> None:
    found = counts("relative", tmp_path / "part", calibration(stride=1))
    model, policy = target(), TruePath()
    hits = total = 0
    for prompt in PROMPTS:
        output = Engine(model).generate([list(prompt)], SamplingParams(max_tokens=TOKENS))[0].token_ids
        made = drafter("relative", model, policy)
        logits = causal_logits(made.source.model.model, [*prompt, *output])[len(prompt) :]  # type: ignore[attr-defined]
        hits += int((logits[:-1].argmax(-1) == torch.tensor(output[1:])).sum())
        total += len(output) - 1
    assert (found.accepted[0][0], found.trials[0]) == (hits, total)
    assert json.loads((tmp_path / "part").read_text())["done"] == len(PROMPTS)
