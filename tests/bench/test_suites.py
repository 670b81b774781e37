"""Every suite's parser on a tiny sample, and where suites are looked for."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftree.bench.suites import STARTER, SUITES, Item, choose, load_suite
from draftree.errors import PromptError, UnknownNameError

QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now shorter."]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n    '''1'''\n",
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}
GSM8K = {"question": "How many legs have 300 cows?", "answer": "300 * 4 = <<300*4=1200>>1200\n#### 1,200"}
MBPP = {
    "task_id": 11,
    "text": "Add.",
    "code": "",
    "test_setup_code": "x = 1",
    "test_list": ["assert f() == 1", "assert 1"],
}
SQUAD = {
    "title": "Bern",
    "paragraphs": [
        {
            "context": "Bern lies in Switzerland.",
            "qas": [{"id": "q1", "question": "Where is Bern?", "answers": [{"text": "Switzerland"}]}],
        }
    ],
}
SPIDER = {"id": 3, "db_id": "pets", "question": "How many pets?", "query": "SELECT count(*) FROM pet"}
TABLES = {
    "db_id": "pets",
    "table_names_original": ["owner", "pet"],
    "column_names_original": [[-1, "*"], [0, "name"], [1, "name"], [1, "age"]],
}


def _write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A data folder with one row of every suite."""
    _write(tmp_path / "spec_bench" / "question.jsonl", QUESTION)
    _write(tmp_path / "mt_bench" / "question.jsonl", QUESTION)
    _write(tmp_path / "humaneval" / "HumanEval.jsonl.gz", HUMANEVAL)
    _write(tmp_path / "gsm8k" / "test.jsonl", GSM8K)
    _write(tmp_path / "mbpp" / "mbpp.jsonl", {**MBPP, "task_id": 1}, MBPP, {**MBPP, "task_id": 511})
    _write(tmp_path / "squad_xquad" / "xquad.en.json").write_text(json.dumps({"data": [SQUAD]}))
    _write(tmp_path / "spider_dev" / "dev.jsonl", SPIDER, {**SPIDER, "id": 4, "db_id": "elsewhere"})
    (tmp_path / "spider_dev" / "tables.json").write_text(json.dumps([TABLES, {**TABLES, "db_id": "elsewhere"}]))
    (tmp_path / "spider_dev" / "database").mkdir()
    sqlite3.connect(tmp_path / "spider_dev" / "database" / "pets.sqlite").close()
    return str(tmp_path)


@pytest.mark.parametrize("name", ["spec-bench", "mt-bench"])
def test_questions_have_turns(name: str, data: str) -> None:
    assert load_suite(name, data=data) == [Item("81", "writing", ("Write a poem.", "Now shorter."))]


def test_humaneval_asks_for_the_function_and_keeps_its_test(data: str) -> None:
    (item,) = load_suite("humaneval", data=data)
    assert item.id == "HumanEval/0"
    assert "def one():" in item.turns[0]
    assert item.reference["prefix"] == HUMANEVAL["prompt"]
    assert item.reference["test"].rstrip().endswith("check(one)")


def test_gsm8k_keeps_the_number(data: str) -> None:
    (item,) = load_suite("gsm8k", data=data)
    assert item.reference == "1200"
    assert item.turns[0].startswith("How many legs")


def test_mbpp_is_its_test_split(data: str) -> None:
    (item,) = load_suite("mbpp", data=data)
    assert item.id == "11"
    assert "assert f() == 1" in item.turns[0] and "assert 1\n" not in item.turns[0]
    assert item.reference["test"] == "x = 1\nassert f() == 1\nassert 1"


def test_squad_has_the_text_and_all_answers(data: str) -> None:
    (item,) = load_suite("squad", data=data)
    assert (item.id, item.reference, item.category) == ("q1", ["Switzerland"], "Bern")
    assert "Bern lies in" in item.turns[0] and "Where is Bern?" in item.turns[0]


def test_spider_has_the_schema_and_only_databases_that_are_there(data: str) -> None:
    (item,) = load_suite("spider", data=data)
    assert "owner(name)\npet(name, age)" in item.turns[0]
    assert item.reference == {"query": "SELECT count(*) FROM pet", "database": "pets"}
    assert item.category == "pets"


def test_spider_without_databases_says_where_they_go(data: str) -> None:
    (Path(data) / "spider_dev" / "database" / "pets.sqlite").unlink()
    with pytest.raises(UnknownNameError, match="spider_dev/database"):
        load_suite("spider", data=data)


def test_a_file_has_prompts_or_turns(tmp_path: Path) -> None:
    own = {"turns": ["a", "b"], "id": 7, "category": "x", "reference": ["y"]}
    path = _write(tmp_path / "own.jsonl", {"prompt": "Hello"}, own)
    assert load_suite(str(path)) == [Item("1", "all", ("Hello",)), Item("7", "x", ("a", "b"), ["y"])]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "bad"),
        ('{"question": "x"}', 'either "prompt"'),
        ('{"prompt": "x", "turns": ["x"]}', 'either "prompt"'),
        ('{"prompt": " "}', "at least one character"),
        ('{"turns": []}', "list of texts"),
        ('{"turns": "x"}', "list of texts"),
        ('{"prompt": "x", "category": 3}', "3 is not a text"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n{{"prompt": "good too"}}\n')
    with pytest.raises(PromptError, match=r"own\.jsonl, line 3 ") as error:
        load_suite(str(path))
    assert why in str(error.value)


@pytest.mark.parametrize("name", [name for name in SUITES if name != "squad"])
@pytest.mark.parametrize("line", ["[]", "5", "null", '"x"', "[[]]", "NaN", "{}"])
def test_a_line_of_another_kind_is_bad_in_every_suite(name: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / SUITES[name].files[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{line}\n")
    with pytest.raises((PromptError, UnknownNameError)) as error:
        load_suite(name, data=str(tmp_path))
    assert len(str(error.value).splitlines()) == 1


def test_two_prompts_of_one_id_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "own.jsonl", {"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"})
    with pytest.raises(PromptError, match="2 prompts .*'1'"):
        load_suite(str(path))


@pytest.mark.parametrize("name", SUITES)
def test_missing_data_says_where_to_put_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        load_suite(name, data=str(tmp_path))
    assert str(tmp_path / SUITES[name].files[0]) in str(error.value)
    assert "DRAFTREE_DATA" in str(error.value)


def test_the_data_folder_is_named_by_the_environment(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_DATA", data)
    assert load_suite("gsm8k")[0].reference == "1200"


def test_the_suite_that_ships_is_twenty_prompts_of_ten_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no data folder, and few of its answers copy their prompts, where drafts gain most."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRAFTREE_DATA", raising=False)
    items = load_suite(STARTER)
    kinds = Counter(item.category for item in items)
    assert len(items) == 20 and len(kinds) == 10 and {*kinds.values()} == {2}
    assert kinds["edit"] + kinds["extraction"] == 4
    assert [item.category for item in choose(items, limit=10)] == [*kinds]
    assert len({item.turns for item in items}) == 20 and max(len(item.turns[0]) for item in items) < 1000


def test_an_unknown_suite_lists_them() -> None:
    with pytest.raises(UnknownNameError, match="starter, spec-bench, mt-bench"):
        load_suite("spec")


def test_prompts_are_taken_from_the_categories_in_turn() -> None:
    items = [Item(str(i), "ab"[i > 2], ("x",)) for i in range(5)]
    assert [i.id for i in choose(items)] == ["0", "3", "1", "4", "2"]
    assert [i.id for i in choose(items, limit=3)] == ["0", "3", "1"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt": "2 + 2?", "reference": 4}, '"reference" is 4: use a text, or a list of texts'),
        ({"prompt": "2 + 2?", "reference": [4]}, "use a text, or a list of texts"),
        ({"prompt": "half \ud800"}, "surrogates not allowed"),
    ],
)
def test_what_no_score_or_tokenizer_can_read_is_named_before_anything_is_decoded(
    line: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(PromptError) as error:
        load_suite(str(path))
    assert "line 2" in str(error.value)
    assert why in str(error.value)


def test_a_compressed_suite_that_is_torn_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl.gz"
    whole = gzip.compress(b'{"prompt": "a text that is long enough to be torn in its middle"}\n' * 50)
    path.write_bytes(whole[:20] + b"\xff\xff\xff\xff" + whole[24:])
    with pytest.raises(PromptError, match="cannot read|not valid"):
        load_suite(str(path))
