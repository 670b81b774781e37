"""Published prompt sets, and files of JSON lines, as items: one parser for each format, and where sets are found.

A parser raises ValueError, KeyError, TypeError or IndexError where a row is not of its format.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from ..artifacts import LARGEST_DATA, read_bytes, reason, user_path
from ..errors import PromptError, UnknownNameError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a suite.

    Attributes:
        id: unique in its suite.
        category: the suite's own.
        turns: the user's side of a conversation; one for most suites.
        reference: what answers are scored by, as JSON can hold it (``benchmarks.quality``); None: nothing.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    reference: Any = None


_PYTHON = "Answer with the whole function in one Python code block."


def question(row: Row, number: int) -> Iterator[Item]:
    """Spec-Bench and MT-Bench (FastChat's ``question.jsonl``)."""
    yield Item(str(row["question_id"]), _text(row["category"]), _turns(row["turns"]))


def humaneval(row: Row, number: int) -> Iterator[Item]:
    """HumanEval as an instruction; the reference is its test."""
    prompt = _text(row["prompt"])
    prompt_text = f"Complete this Python function. {_PYTHON}\n\n```python\n{prompt.rstrip()}\n```"
    test = f"{_text(row['test'])}\n\ncheck({_text(row['entry_point'])})\n"
    yield Item(_text(row["task_id"]), "humaneval", (prompt_text,), {"prefix": prompt, "test": test})


def mbpp(row: Row, number: int) -> Iterator[Item]:
    """MBPP: the test split (tasks 11 to 510), with its first assertion in the prompt, as its authors ask it."""
    tests = [_text(t) for t in row["test_list"]]
    prompt_text = f"{_text(row['text'])} {_PYTHON}\n\nYour code must pass this test:\n\n```python\n{tests[0]}\n```"
    test = "\n".join([row.get("test_setup_code") or "", *tests])
    if 11 <= int(row["task_id"]) <= 510:
        yield Item(str(row["task_id"]), "mbpp", (prompt_text,), {"prefix": "", "test": test})


def gsm8k(row: Row, number: int) -> Iterator[Item]:
    """GSM8K; the reference is the number behind ``####``."""
    reference = _text(row["answer"]).rpartition("####")[2].strip().replace(",", "").rstrip(".")
    float(reference)
    prompt_text = f"{_text(row['question'])}\nThink step by step. End with the answer as a number after ####."
    yield Item(str(number), "gsm8k", (prompt_text,), reference)


def squad(row: Row, number: int) -> Iterator[Item]:
    """An article of SQuAD v1.1's JSON, whose title is the category; the reference is the list of answers."""
    for part in row["paragraphs"]:
        for qa in part["qas"]:
            query = f"Answer with the shortest phrase of this text that is right: {_text(qa['question'])}"
            prompt = f"{_text(part['context'])}\n\n{query}"
            reference = [_text(answer["text"]) for answer in qa["answers"]]
            yield Item(_text(qa["id"]), _text(row["title"]), (prompt,), reference)


def spider(row: Row, number: int, schemas: Mapping[str, str]) -> Iterator[Item]:
    """Spider, where its database, the category, has a schema. The reference is the gold query and the database."""
    if schema := schemas.get(name := _text(row["db_id"])):
        prompt = f"{schema}\n\nWrite one SQLite query, and nothing else, that answers: {_text(row['question'])}"
        reference = {"query": _text(row["query"]), "database": name}
        yield Item(str(row.get("id", number)), name, (prompt,), reference)


def user_line(row: Row, number: int) -> Iterator[Item]:
    """A user's own line: ``prompt`` or ``turns``, optional ``id``, ``category`` and ``reference``."""
    if ("prompt" in row) == ("turns" in row):
        raise ValueError('it needs either "prompt" (text) or "turns" (a list of texts)')
    reference = row.get("reference")
    texts = reference if isinstance(reference, list) else [reference]
    if reference is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError(f'"reference" is {reference!r}: use a text, or a list of texts')
    turns = _turns([row["prompt"]] if "prompt" in row else row["turns"])
    yield Item(str(row.get("id", number)), _text(row.get("category", "all")), turns, reference)


def _turns(turns: Any) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise ValueError('"turns" is not a list of texts')
    return tuple(map(_text, turns))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text of at least one character")
    value.encode()  # half of a surrogate pair is no text
    return value


Parse = Callable[..., Iterator[Item]]
"""(row, its number) -> items."""
_BAD_ROW = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
DATA = "DRAFTREE_DATA"
STARTER = "starter"
"""The suite that ships: 20 prompts of ten kinds, two each, of which four have answers that copy much of the prompt."""
STARTER_FILE = Path(__file__).with_name("starter.jsonl")


@dataclass(frozen=True, slots=True)
class Suite:
    """A published prompt set.

    Attributes:
        parse: what turns a row into items.
        home: where to get it.
        files: where it may lie in the data folder.
    """

    parse: Parse
    home: str
    files: tuple[str, ...]


SUITES = {
    "spec-bench": Suite(question, "github.com/hemingkx/Spec-Bench", ("spec_bench/question.jsonl",)),
    "mt-bench": Suite(question, "github.com/lm-sys/FastChat", ("mt_bench/question.jsonl",)),
    "humaneval": Suite(humaneval, "github.com/openai/human-eval", ("humaneval/HumanEval.jsonl.gz",)),
    "gsm8k": Suite(gsm8k, "github.com/openai/grade-school-math", ("gsm8k/test.jsonl",)),
    "mbpp": Suite(mbpp, "github.com/google-research/google-research", ("mbpp/mbpp.jsonl",)),
    "squad": Suite(squad, "github.com/rajpurkar/SQuAD-explorer", ("squad/dev-v1.1.json", "squad_xquad/xquad.en.json")),
    "spider": Suite(spider, "github.com/taoyds/spider", ("spider_dev/dev.jsonl",)),
}


def data_folder(given: str | None = None) -> Path:
    """Where prompt sets lie: ``given``, else what ``DRAFTREE_DATA`` names, else ``data`` in the working folder."""
    return user_path(given or os.environ.get(DATA) or "data")


def load_suite(name: str, *, data: str | None = None) -> list[Item]:
    """All prompts of a suite.

    Args:
        name: ``STARTER``, one of ``SUITES``, or a file of JSON lines (``user_line``).
        data: the folder that holds suites (``data_folder``).

    Raises:
        UnknownNameError: there is no such suite or file; the message says where to put it.
        PromptError: a line cannot be read; the message has its number. Or two prompts have one id.
    """
    parse: Parse = user_line
    if name in SUITES:
        suite, folder = SUITES[name], data_folder(data)
        path = next((folder / file for file in suite.files if (folder / file).is_file()), None)
        if path is None:
            raise UnknownNameError(
                f"no {name} at {folder / suite.files[0]}: put it there (from {suite.home}) and set {DATA} or --data to "
                "the folder above"
            )
        parse = partial(spider, schemas=_schemas(folder)) if suite.parse is spider else suite.parse
    else:
        path = STARTER_FILE if name == STARTER else user_path(name)
        if not path.exists() or path.is_dir():
            suites = ", ".join((STARTER, *SUITES))
            raise UnknownNameError(f"no suite {name!r}: choose from {suites}, or name a file of JSON lines")
    items = _parsed(path, parse)
    key, count = Counter(item.id for item in items).most_common(1)[0]
    if count > 1:  # their results could not be distinguished
        raise PromptError(f"suite {name} has {count} prompts with id {key!r}: give each its own")
    return items


def choose(items: Iterable[Item], *, limit: int | None = None) -> list[Item]:
    """The first ``limit`` prompts, taken from the categories in turn."""
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.category].append(item)
    return [item for turn in zip_longest(*groups.values()) for item in turn if item is not None][:limit]


def _unpacked(file: BinaryIO) -> gzip.GzipFile:
    return gzip.GzipFile(fileobj=file)


def _parsed(path: Path, parse: Parse) -> list[Item]:
    """The items of a file of JSON lines, or of a SQuAD file's articles."""
    try:
        packed = path.suffix == ".gz"
        content = read_bytes(path, LARGEST_DATA, _unpacked) if packed else read_bytes(path, LARGEST_DATA)
        text = content.decode("utf-8-sig")
        rows = json.loads(text)["data"] if path.suffix == ".json" else text.split("\n")
    except (*_BAD_ROW, OSError, EOFError, zlib.error) as error:
        raise PromptError(f"cannot read {path}: {reason(error)}: name a file of JSON lines in UTF-8") from None
    items: list[Item] = []
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str) and not row.strip():
            continue
        try:
            value = json.loads(row) if isinstance(row, str) else row
            if not isinstance(value, Mapping):
                raise ValueError("it is no object")
            items += parse(value, number)
        except _BAD_ROW as error:
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise PromptError(f"{path}, line {number} is bad ({why}): repair it, or take it out") from None
    if not items:
        raise PromptError(f"{path} has no prompts: give a file with at least one")
    return items


def _schemas(folder: Path) -> dict[str, str]:
    """The schemas of Spider's databases that are there, by their names: one line a table.

    Raises:
        UnknownNameError: there are no databases.
        PromptError: the schemas cannot be read.
    """
    path, databases = folder / "spider_dev" / "tables.json", folder / "spider_dev" / "database"
    names = {p.stem for p in databases.glob("*.sqlite")}
    if not names or not path.is_file():
        raise UnknownNameError(
            f"Spider needs schemas and databases: put tables.json at {path} and the SQLite files into {databases}"
        )
    try:
        rows = json.loads(read_bytes(path, LARGEST_DATA))
        return {row["db_id"]: _schema(row) for row in rows if row["db_id"] in names}
    except _BAD_ROW as error:
        raise PromptError(f"cannot read {path}: {error!r}: get the file again") from None


def _schema(row: Row) -> str:
    columns = row["column_names_original"]
    return "\n".join(
        f"{table}({', '.join(column for of, column in columns if of == number)})"
        for number, table in enumerate(row["table_names_original"])
    )
