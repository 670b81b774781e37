"""Runs as reports read them: from the files of their folders, without models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError
from ...verify.schemes import DEFAULT_SCHEME
from ..compare import compare, partings_of, plain_labels
from ..contestants import PLAIN, Entry
from ..results import CONFIG, Record, read_config, read_results, read_summary
from ..summary import Table, tabulate


@dataclass(frozen=True)
class LoadedRun:
    """One run.

    Attributes:
        path: its folder.
        config: ``config.json``.
        entries: its contestants.
        records: its answers.
        table: its figures.
    """

    path: Path
    config: dict[str, Any]
    entries: tuple[Entry, ...]
    records: tuple[Record, ...]
    table: Table

    @property
    def suite(self) -> str:
        """The suite's name, or the name of its file."""
        return Path(self.config["suite"]).name

    @property
    def command(self) -> str:
        """What made it."""
        return str(self.config["command"])

    @cached_property
    def by_method(self) -> dict[str, list[Record]]:
        """Label -> records."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.method, []).append(record)
        return found

    def of(self, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """The contestants that are wanted and have answers."""
        return [e for e in self.entries if e.label in self.by_method and wanted(e)]

    def named(self, method: str) -> list[Entry]:
        """The contestants of a method, verified without loss by the default scheme."""
        return self.of(lambda e: e.method == method and e.verify == DEFAULT_SCHEME)

    def plain(self, temperature: float) -> list[Record]:
        """Plain decoding's answers."""
        labels = [e.label for e in self.entries if e.method == PLAIN and e.temperature == temperature]
        return self.by_method.get(labels[0], []) if labels else []


def load_runs(folder: Path) -> list[LoadedRun]:
    """The run of a folder, or those of the folders in it, by name.

    Raises:
        ConfigError: there is no run, one cannot be read, or one has no answers yet.
    """
    if (folder / CONFIG).is_file():
        return [_load(folder)]
    found = sorted(p.parent for p in folder.glob(f"*/{CONFIG}"))
    if not found:
        raise ConfigError(
            f"no run in {folder}: name a folder that 'draftree bench --out' wrote, or one that holds some"
        )
    return [_load(path) for path in found]


def _load(path: Path) -> LoadedRun:
    config, records = read_config(path), read_results(path)
    entries = tuple(Entry(**values) for values in config["entries"])
    if not records:
        raise ConfigError(f"{path} has no answers yet: give its command again: {config['command']}")

    def unfinished() -> NoReturn:
        raise ConfigError(f"{path} is not finished: give its command again: {config['command']}")

    known = partings_of(read_summary(path).get("partings", []))
    verdicts, _ = compare(records, entries, [], known, unfinished)
    return LoadedRun(path, config, entries, tuple(records), tabulate(records, plain_labels(entries), verdicts))


def first(runs: Sequence[LoadedRun], wanted: Callable[[LoadedRun], bool]) -> LoadedRun | None:
    """The first run that is wanted."""
    return next((run for run in runs if wanted(run)), None)
