"""Servers under load: guidellm, a program of its own, measures them, and its reports are read.

guidellm sends each prompt once at every concurrency, as a stream, and measures at the client.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..artifacts import LARGEST_DATA, first_error, read_bytes
from ..errors import ConfigError, RunError
from .summary import markdown


@dataclass(frozen=True, slots=True)
class LoadTest:
    """One server, loaded with the same prompts at several concurrencies.

    Attributes:
        url: of the server, without ``/v1``.
        prompts: a file of JSON lines, each with a ``prompt``.
        count: prompts in it.
        concurrency: requests under way at once, one load after the other.
        body: what every request has beside its messages.
        key: that the server wants; None: none.
    """

    url: str
    prompts: Path
    count: int
    concurrency: Sequence[int]
    body: Mapping[str, Any]
    key: str | None = None

    def scenario(self, report: Path) -> dict[str, Any]:
        """What guidellm's ``run --config`` reads.

        Args:
            report: file for its report.
        """
        return {
            "spec": {
                "backend": {
                    "kind": "openai_http",
                    "target": self.url,
                    "api_key": self.key,
                    "extras": {"body": dict(self.body)},
                },
                "profile": {"kind": "concurrent", "streams": [self.concurrency[0]]},
                "constraints": [{"kind": "max_requests", "count": self.count}],
                "data": [{"kind": "json_file", "path": str(self.prompts)}],
                "outputs": [{"kind": "json", "path": str(report)}],
            },
            "benchmarks": [{"profile.streams": streams} for streams in self.concurrency],
        }

    def run(self, program: str, report: Path) -> None:
        """Let guidellm measure.

        Raises:
            RunError: it failed.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # that only its owner can read
            json.dump(self.scenario(report), file)
            file.flush()
            command = [program, "run", "--config", file.name, "--disable-console"]
            environment = {"HF_HUB_OFFLINE": "1"} | os.environ  # it needs no tokenizer, and looks for one
            ended = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603
        if ended.returncode or not report.exists():
            lines = (ended.stderr.strip() or ended.stdout.strip() or "it wrote no report").splitlines()
            raise RunError(f"guidellm failed at {self.url}: {lines[-1].strip()}")


def find_guidellm(name: str) -> str:
    """The program.

    Raises:
        ConfigError: it is not there.
    """
    if (found := shutil.which(name)) is None:
        raise ConfigError(
            f"no program '{name}': guidellm measures servers; install it into an environment of its own (pip install "
            "guidellm) and name the program there with --guidellm"
        )
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured at one concurrency, of requests that were answered; times are p50 and p95.

    Attributes:
        requests, failed: that were answered, and that were not.
        tokens: generated a second, by all together.
        first: milliseconds to the first token.
        between: milliseconds from one token to the next, the mean of each request.
    """

    concurrency: int
    requests: int
    failed: int
    tokens: float
    first: tuple[float, float]
    between: tuple[float, float]


class _Percentiles(BaseModel):
    p50: float
    p95: float


class _Summary(BaseModel):
    mean: float
    percentiles: _Percentiles

    @property
    def both(self) -> tuple[float, float]:
        return self.percentiles.p50, self.percentiles.p95


class _Figure(BaseModel):
    successful: _Summary | None


class _Totals(BaseModel):
    successful: int
    errored: int
    incomplete: int


class _Figures(BaseModel):
    request_totals: _Totals
    output_tokens_per_second: _Figure
    time_to_first_token_ms: _Figure
    inter_token_latency_ms: _Figure


class _Strategy(BaseModel):
    streams: int


class _Settings(BaseModel):
    strategy: _Strategy


class _Measured(BaseModel):
    config: _Settings
    metrics: _Figures


class _Report(BaseModel):
    """What is read of a report of guidellm."""

    benchmarks: list[_Measured]


def read_report(path: Path) -> list[Load]:
    """The loads of a report of guidellm, in its order.

    Raises:
        ConfigError: the file cannot be read, or is none.
        RunError: no request was answered.
    """
    try:
        report = _Report.model_validate_json(read_bytes(path, LARGEST_DATA))
    except OSError as error:
        raise ConfigError(f"cannot read report '{path}': {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"'{path}' is no report that guidellm 0.8 wrote ({first_error(error)})") from None
    loads = []
    for measured in report.benchmarks:
        figures, streams = measured.metrics, measured.config.strategy.streams
        totals = figures.request_totals
        tokens = figures.output_tokens_per_second.successful
        first, between = figures.time_to_first_token_ms.successful, figures.inter_token_latency_ms.successful
        if not totals.successful or tokens is None or first is None or between is None:
            raise RunError(f"'{path}': no request was answered at concurrency {streams}: look into the server's log")
        failed = totals.errored + totals.incomplete
        loads.append(Load(streams, totals.successful, failed, tokens.mean, first.both, between.both))
    return loads


def load_table(found: Mapping[str, Sequence[Load]]) -> str:
    """A table in Markdown: a line for each load of each server; the last server is what the others are compared with.

    Args:
        found: what a server is called -> its loads, at the same concurrencies.
    """
    *_, (last, base) = found.items()
    head = ["", "concurrency", "requests", "failed", "tokens/s"]
    head += ["first token, ms", "between tokens, ms", f"over {last}"]
    rows = []
    for at, ground in enumerate(base):
        for name, loads in found.items():
            load = loads[at]
            ratio = "" if name == last else f"{load.tokens / ground.tokens:.2f}"
            times = [f"{p50:.0f}, {p95:.0f}" for p50, p95 in (load.first, load.between)]
            counts = [name, str(load.concurrency), str(load.requests), str(load.failed)]
            rows.append([*counts, f"{load.tokens:.1f}", *times, ratio])
    return markdown(head, rows)
