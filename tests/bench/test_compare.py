"""How answers compare with AR decoding's."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from benchmarks.quality.answers import read_items
from draftree.bench.entries import Entry, entries
from draftree.bench.results import RECORD_LINE, AnswerRecord, Parts, RunFolder, Turn, read_results
from draftree.bench.run import RunPlan, compare, encode_turns, read_differences
from draftree.bench.suites import Item
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_model import HFModel

from ..tiny import tiny, tiny_tokenizer
from .runs import record, turn

ITEM = Item("p0", "a", ("the cat in the hat",))


def _answer(ids: list[int]) -> Turn:
    return replace(turn([1] * (len(ids) - 1), 1.0), ids=ids)


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), tiny_tokenizer())


def _judge(target: HFModel, method: str, own: list[int], plain: list[int], temperature: float = 0.0) -> str:
    made = entries([method], ["lookup"], [temperature], 8)
    records = [record(made[0], 0, _answer(plain)), record(made[1], 0, _answer(own))]
    verdicts, differences = compare(records, RunPlan([ITEM], made, 8), [], lambda: target)
    assert verdicts[records[0].key] == "equal"
    assert [(p.prompt, p.method) for p in differences] == ([] if own == plain else [records[1].key])
    return verdicts[records[1].key]


def test_another_token_is_a_difference(target: HFModel) -> None:
    assert _judge(target, "chain", [5, 6, 7], [5, 6, 7]) == "equal"
    assert _judge(target, "chain", [5, 9, 7], [5, 6, 7]) == "different"
    assert _judge(target, "chain", [5, 6], [5, 6, 7]) == "different"


def test_a_peer_may_differ_from_a_cheaper_weight_format() -> None:
    exact, cheap = (HFModel(tiny(), tiny_tokenizer(), self_test=False) for _ in range(2))
    cheap.capabilities = replace(cheap.capabilities, weight_format="Q4_1")
    assert _judge(cheap, "peer:hf-generate", [5, 9, 7], [5, 6, 7]) == "other-format"
    assert _judge(cheap, "chain", [5, 9, 7], [5, 6, 7]) == "different"
    assert _judge(exact, "peer:hf-generate", [5, 9, 7], [5, 6, 7]) == "different"


def test_a_near_tie_is_told_apart(target: HFModel) -> None:
    """Two tokens of one logit: either is the target's answer."""
    head = target.model.get_output_embeddings()
    assert head is not None
    kept = head.weight.detach().clone()
    with torch.no_grad():
        head.weight[9] = head.weight[6]
    try:
        assert _judge(target, "chain", [5, 9, 7], [5, 6, 7]) == "near-tie"
    finally:
        with torch.no_grad():
            head.weight.copy_(kept)


@pytest.mark.parametrize(
    ("method", "temperature", "verdict"),
    [
        ("chain", 1.0, "different"),
        ("static:verify=multi-round", 1.0, "other-draw"),
        ("peer:hf-generate", 1.0, "other-draw"),
        ("peer:hf-generate", 0.0, "different"),
        ("chain:verify=relaxed", 0.0, "lossy"),
    ],
)
def test_a_difference_has_its_reason(method: str, temperature: float, verdict: str, target: HFModel) -> None:
    assert _judge(target, method, [5, 9, 7], [5, 6, 7], temperature) == verdict


def nobody() -> NoReturn:
    raise AssertionError("the target was asked")


@pytest.mark.parametrize(
    ("method", "verdict"),
    [("static:verify=multi-round", "other-draw"), ("chain:verify=relaxed", "lossy"), ("beams:width=2", "beams")],
)
def test_what_may_differ_anyway_asks_no_target(method: str, verdict: str) -> None:
    """Each answer's prompt was read again for a gap that no verdict needs."""
    made = entries([method], ["lookup"], [1.0], 8)
    records = [record(made[0], 0, _answer([5, 6, 7])), record(made[1], 0, _answer([5, 6, 9]))]
    verdicts, (found,) = compare(records, RunPlan([ITEM], made, 8), [], nobody)
    assert verdicts[records[1].key] == found.verdict == verdict
    assert (found.index, found.gap) == (2, None)


def test_what_is_known_is_not_asked_again(target: HFModel, tmp_path: Path) -> None:
    made = entries(["chain"], ["lookup"], [0.0], 8)
    records = [record(made[0], 0, _answer([5, 6])), record(made[1], 0, _answer([5, 9]))]
    _, differences = compare(records, RunPlan([ITEM], made, 8), [], lambda: target)
    (tmp_path / "summary.json").write_text(json.dumps({"differences": [asdict(found) for found in differences]}))
    verdicts, again = compare(records, RunPlan([], made, 8), read_differences(tmp_path), nobody)
    assert again == differences
    assert verdicts[records[1].key] == "different"
    with pytest.raises(AssertionError):
        compare(records, RunPlan([ITEM], made, 8), [], nobody)


def test_an_answer_without_a_plain_one_is_not_compared(target: HFModel) -> None:
    made = entries(["chain"], ["lookup"], [0.0, 1.0], 8)
    records = [record(made[0], 0, _answer([5])), record(made[3], 0, _answer([6]))]
    verdicts, _ = compare(records, RunPlan([ITEM], made, 8), [], lambda: target)
    assert verdicts == {records[0].key: "equal"}


def test_a_line_comes_back_as_it_was() -> None:
    entry = Entry("chain", "chain", "lookup", 0.4)
    line: AnswerRecord = record(entry, 1, turn([2, 3], 1.0))
    assert RECORD_LINE.validate_json(RECORD_LINE.dump_json(line)) == line


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"turns": []}, "turns"),
        ({"turns": 3}, "turns"),
        ({"turns": [{}]}, "turns.0.prompt_tokens"),
        ({"turns": [asdict(replace(turn([1], 1.0), ids=[]))]}, "turns.0.ids"),
        ({"turns": [asdict(replace(turn([1], 1.0), seconds=Parts(0.0)))]}, "turns.0.seconds.total"),
    ],
)
def test_a_line_that_is_no_answer_is_named(change: dict[str, object], where: str, tmp_path: Path) -> None:
    line = asdict(record(Entry("chain", "chain", "lookup", 0.4), 1, turn([2, 3], 1.0)))
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({**line, **change})}\n")
    with pytest.raises(ConfigError, match=f"line 2 .*{where}: "):
        read_results(tmp_path)


def test_prompts_come_back_whatever_breaks_lines_in_them(tmp_path: Path) -> None:
    """A line separator (U+2028) in a prompt cut its line of JSON in two: the run could not be scored."""
    items = [Item("a", "b", ("one\u2028two\x85three\r\nfour",), {"test": "x"}), Item("b", "b", ("c", "d"))]
    RunFolder(tmp_path / "run", {}, items)
    assert read_items(tmp_path / "run") == items


def test_a_model_without_a_chat_template_gets_plain_text() -> None:
    tokenizer = tiny_tokenizer()
    templated = encode_turns(HFModel(tiny(), tokenizer), ["a", "b", "the"])
    tokenizer.chat_template = None
    model = HFModel(tiny(), tokenizer)
    assert encode_turns(model, ["a", "b", "the"]) == tokenizer("a\n\nb\n\nthe")["input_ids"] != templated
