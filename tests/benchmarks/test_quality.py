"""Scores of answers: numbers, phrases, code and queries."""

# ruff: noqa: S608 - hostile queries are what is tested

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from benchmarks.quality.__main__ import main as quality
from benchmarks.quality.answers import answer_entropy, mean_scores, read_scores
from benchmarks.quality.scores import program, scorer
from benchmarks.quality.sql import read_rows, same_rows
from draftree.bench.suites import Item, gsm8k, humaneval
from draftree.cli.main import run
from draftree.errors import RunError
from draftree.models.huggingface.hf_model import HFModel

from ..tiny import causal_logits, save_tiny, tiny

ONE = {
    "task_id": "x/1",
    "prompt": "import math\n\ndef helper():\n    return 1\n\ndef one():\n    '''one'''\n",
    "entry_point": "one",
    "test": "def check(f):\n    assert f() == 1\n",
}


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("```python\ndef one():\n    return helper()\n```\nThat is it.", 1.0),
        ("Sure!\n```\ndef one():\n    return math.floor(1.5)\n```", 1.0),
        ("    return 1\n", 1.0),
        ("```python\ndef one():\n    return 2\n```", 0.0),
        ("```python\ndef one():\n    return 1", 1.0),
        ("I cannot.", 0.0),
    ],
)
def test_humaneval_runs_the_code_of_the_answer(answer: str, worth: float) -> None:
    score = scorer("humaneval", Path(), unsafe=True)
    assert score is not None
    item = next(humaneval(ONE, 1))
    assert score(item, [answer]) == {"pass@1": worth}, program(item, answer)


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("300 * 4 = 1,200\n#### 1200", 1.0),
        ("so 1,200.", 1.0),
        ("#### 1200 legs in 5 minutes", 1.0),
        ("#### 1201", 0.0),
        ("first 1200, then 7", 0.0),
        ("none", 0.0),
    ],
)
def test_gsm8k_matches_the_number(answer: str, worth: float) -> None:
    item = next(gsm8k({"question": "q", "answer": "x\n#### 1,200"}, 1))
    score = scorer("gsm8k", Path())
    assert score is not None
    assert score(item, [answer]) == {"exact": worth}


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [("The Alps!", 1.0, 1.0), ("in the high Alps", 0.0, 0.5), ("Denver Broncos", 1.0, 1.0), ("nothing", 0.0, 0.0)],
)
def test_squad_scores_words_without_articles_and_punctuation(answer: str, exact: float, f1: float) -> None:
    score = scorer("squad", Path())
    assert score is not None
    assert score(Item("1", "squad", ("q",), ["Alps", "the Denver Broncos"]), [answer]) == {"exact": exact, "f1": f1}


def test_prompts_of_a_file_are_scored_like_squad_where_they_have_a_reference() -> None:
    score = scorer("own.jsonl", Path())
    assert score is not None
    assert score(Item("1", "all", ("q",), "Bern"), ["bern"]) == {"exact": 1.0, "f1": 1.0}
    assert score(Item("1", "all", ("q",)), ["bern"]) == {}
    assert scorer("mt-bench", Path()) is None


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    path = tmp_path / "pets.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table pet (name text, age int)")
        connection.executemany("insert into pet values (?, ?)", [("Rex", 3), ("Tom", 5), ("Ida", 5)])
    connection.close()
    return path


def test_spider_compares_rows(pets: Path) -> None:
    score = scorer("spider", pets.parent)
    assert score is not None
    item = Item("1", "spider", ("q",), {"query": "SELECT name FROM pet WHERE age = 5", "database": "pets"})
    right = "```sql\nSELECT p.name FROM pet p WHERE p.age > 4 ORDER BY name;\n```"
    for answer, worth in ((right, 1.0), ("SELECT name FROM pet", 0.0), ("SELECT", 0.0), ("DROP TABLE pet", 0.0)):
        assert score(item, [answer]) == {"execution": worth}


def test_order_counts_where_the_gold_query_orders(pets: Path) -> None:
    gold = "SELECT name FROM pet ORDER BY name"
    assert same_rows(pets, "SELECT name FROM pet ORDER BY 1", gold)
    assert not same_rows(pets, "SELECT name FROM pet ORDER BY name DESC", gold)
    assert not same_rows(pets, "-- I do not know", "SELECT name FROM pet WHERE name = 'nobody'")


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
LONG = "SELECT replace(hex(zeroblob(15000)), '0', 'a') y, replace(hex(zeroblob(7500)), '0', 'a') || 'b' z"
DOUBLED = ", ".join(f"a{i + 1} AS (SELECT p.x FROM a{i} p, a{i} q)" for i in range(24))


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM pet",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x (y)",
        "ATTACH '{other}' AS other",
        "VACUUM INTO '{other}'",
        "PRAGMA journal_mode = WAL",
        "PRAGMA writable_schema = 1",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('{other}')",
        f"{ENDLESS} SELECT count(x) FROM n",
        f"{ENDLESS} SELECT x FROM n",
    ],
)
def test_a_query_only_reads_and_ends(query: str, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quality.sql.SECONDS", 0.3)
    monkeypatch.setattr("benchmarks.quality.sql.RESULT", 1 << 20)
    before = pets.read_bytes()
    assert not same_rows(pets, query.format(other=tmp_path / "other.sqlite"), "SELECT name FROM pet")
    assert pets.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["pets.sqlite"]


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT length(randomblob(1000000000))", sqlite3.DataError),
        ("SELECT length(hex(zeroblob(400000000)))", sqlite3.DataError),
        (f"{ENDLESS} SELECT zeroblob(40000) FROM n", sqlite3.OperationalError),
        (f"{ENDLESS} SELECT zeroblob(40000) || x y FROM n ORDER BY y", MemoryError),
        (f"WITH a0 AS (SELECT 1 x), {DOUBLED} SELECT count(*) FROM a24", MemoryError),
    ],
)
def test_a_query_takes_no_more_memory_than_it_may(
    query: str, error: type[Exception], pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value had up to 10^9 bytes, a result 100 000 rows of any size, and 24 nested views took all of the memory
    while they were compiled, when no clock is read."""
    monkeypatch.setattr("benchmarks.quality.sql.SECONDS", 600.0)
    with pytest.raises(error):
        read_rows(pets, query)
    assert read_rows(pets, "SELECT count(*) FROM pet") == [(3,)]


def test_a_query_of_slow_functions_ends(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was read every 10 000 steps, each of which may search one long text for another: here, never."""
    monkeypatch.setattr("benchmarks.quality.sql.SECONDS", 0.1)
    with pytest.raises(sqlite3.OperationalError):
        read_rows(pets, f"{ENDLESS} SELECT count(instr(y, z)) FROM ({LONG}), (SELECT x FROM n LIMIT 500)")


def test_a_broken_gold_query_is_an_error(pets: Path) -> None:
    with pytest.raises(RunError, match="gold query"):
        same_rows(pets, "SELECT 1", "SELECT nothing FROM nowhere")


def test_the_entropy_of_an_answer_is_that_of_the_targets_distributions() -> None:
    model = tiny()
    prompt, answer = [5, 6, 7], [8, 9, 10, 11]
    logprobs = causal_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)
    want = float(-(logprobs.exp() * logprobs).sum(-1).mean())
    assert answer_entropy(HFModel(model), prompt, answer) == pytest.approx(want, rel=1e-4)
    one = float(-(logprobs[0].exp() * logprobs[0]).sum())
    assert answer_entropy(HFModel(model), prompt, answer[:1]) == pytest.approx(one, rel=1e-4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two prompts, one of which has a reference."""
    folder = tmp_path_factory.mktemp("scored")
    suite, model = folder / "own.jsonl", save_tiny(folder / "tiny")
    suite.write_text('{"prompt": "the cat", "reference": "hat"}\n{"prompt": "a"}\n')
    asked = ["bench", "--suite", str(suite), "--target", str(model), "--max-tokens", "8", "--out", str(folder / "out")]
    assert run([*asked, "--methods", "chain:verify=relaxed", "--drafters", "self"]) == 0
    suite.unlink()  # the folder of a run has all that scoring needs
    return folder / "out"


def test_a_finished_run_is_scored(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quality([str(finished), "--entropy"])
    scores = read_scores(finished)
    assert {(s.prompt, s.method): set(s.score) for s in scores} == {
        (prompt, method): ({"exact", "f1"} if prompt == "1" else set())
        for prompt in ("1", "2")
        for method in ("ar", "chain:verify=relaxed")
    }
    assert all((s.entropy is not None) == (s.method == "ar") for s in scores)
    assert mean_scores(scores)["ar"] == {"exact": 0.0, "f1": 0.0}
    assert "| ar " in capsys.readouterr().out
