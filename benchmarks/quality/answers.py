"""Scores of the answers of a finished run, kept in ``quality.jsonl`` of its folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic import TypeAdapter, ValidationError

from draftree.artifacts import read_lines, write_whole
from draftree.bench.entries import AR, Entry
from draftree.bench.results import ITEM_LINE, PROMPTS, AnswerRecord, read_config, read_results, read_summary
from draftree.bench.run import encode_turns
from draftree.bench.suites import Item, data_folder
from draftree.bench.summary import interval
from draftree.errors import ConfigError
from draftree.models.base import LanguageModel, Nodes, prefill_scored
from draftree.models.loading import ModelOptions, load

from .scores import scorer

FILE = "quality.jsonl"


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer's scores.

    Attributes:
        prompt, method: of its record.
        score: measure -> from 0 to 1; empty where the prompt has no reference.
        entropy: of each turn, ``answer_entropy``; only for AR decoding, and where it was wanted.
    """

    prompt: str
    method: str
    score: dict[str, float]
    entropy: list[float] | None = None


_LINE: TypeAdapter[Scored] = TypeAdapter(Scored)


def score_run(folder: Path, data: str | None = None, *, unsafe: bool = False, entropy: bool = False) -> list[Scored]:
    """Score all answers of a finished run, and write them to its folder.

    Args:
        folder: of the run.
        data: folder of prompt sets, for Spider's databases.
        unsafe: run code that models write without the sandbox.
        entropy: load the target and measure the entropy of its distributions along AR decoding's answers.

    Raises:
        ConfigError: there is no finished run, nothing can score its suite, or there is no sandbox.
    """
    config, records = read_config(folder), read_results(folder)
    items = {item.id: item for item in read_items(folder)}
    if not read_summary(folder):
        raise ConfigError(f"{folder} is not finished: give its command again: {config['command']}")
    score = scorer(config["suite"], data_folder(data) / "spider_dev" / "database", unsafe=unsafe)
    if score is None:
        raise ConfigError(f"answers to {config['suite']} have no right and wrong: take a run of another suite")
    ar = {e.label for e in (Entry(**values) for values in config["entries"]) if e.method == AR}
    options = {key: config[key] for key in ModelOptions.__annotations__ if config.get(key) is not None}
    target = load(config["target"], **options) if entropy else None
    found = []
    for r in records:
        item = items[r.prompt]
        own = list(_entropies(target, item, r)) if target is not None and r.method in ar else None
        found.append(Scored(r.prompt, r.method, score(item, [t.text for t in r.turns]), own))
    write_whole(folder / FILE, "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in found))
    return found


def read_scores(folder: Path) -> list[Scored]:
    """What ``score_run`` wrote; empty where the run is not scored.

    Raises:
        ConfigError: the file is corrupt.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        return [_LINE.validate_json(line) for line in file.read_text().splitlines()]
    except ValidationError:
        raise ConfigError(f"{file} is corrupt: score the run again") from None


def mean_scores(found: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """Method -> measure -> mean over answers."""
    return {method: {name: fmean(scores) for name, scores in own.items()} for method, own in _grouped(found).items()}


def score_table(found: Sequence[Scored]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: mean of each method and measure, with 95% bootstrap intervals over prompts."""
    groups = _grouped(found)
    measures = sorted({name for own in groups.values() for name in own})
    rows = [
        [
            method,
            *(interval(own[name]).text() if name in own else "" for name in measures),
        ]
        for method, own in groups.items()
    ]
    return ["method", *measures], rows


def _grouped(found: Sequence[Scored]) -> dict[str, dict[str, list[float]]]:
    """Method -> measure -> scores."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        for name, value in one.score.items():
            groups[one.method][name].append(value)
    return dict(groups)


def _entropies(target: LanguageModel, item: Item, record: AnswerRecord) -> Iterator[float]:
    texts: list[str] = []
    for question, turn in zip(item.turns, record.turns, strict=False):
        prompt = encode_turns(target, [*texts, question])
        yield answer_entropy(target, prompt, turn.ids)
        texts += [question, turn.text]


def answer_entropy(target: LanguageModel, prompt: list[int], answer: list[int]) -> float:
    """Mean entropy (nats, at temperature 1) of the target's distribution at each token of an answer."""
    row, scores = prefill_scored(target, prompt)
    entropies = [*scores.top([0], 1).entropies]
    if len(answer) > 1:
        scores = target.extend([row], [Nodes.chain(answer[:-1])])
        entropies += [*scores.top(range(len(answer) - 1), 1).entropies]
    target.close(row)
    return float(np.mean(entropies))


def read_items(path: Path) -> list[Item]:
    """The prompts of a run.

    Raises:
        ConfigError: they are not there, or are corrupt.
    """
    try:
        return [ITEM_LINE.validate_json(line) for line in read_lines(path / PROMPTS)]
    except (OSError, ValidationError):
        raise ConfigError(f"no prompts in {path}: name a folder that 'draftree bench --out' wrote") from None
