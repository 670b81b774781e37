"""What operators read: figures for Prometheus, with vLLM's names of speculative decoding beside our own, and the log.

The log has a line for each request that has ended, without its texts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from uvicorn.logging import DefaultFormatter

from ..drafters.spec import NONE
from ..engine.engine import Engine
from ..engine.speculation import EngineRequest, Observer, Speculation
from ..models.base import LanguageModel
from ..progress import visible
from ..request import Outcome, Request

log = logging.getLogger("draftree.requests")
_UNUSED = 1000
"""Steps after which a drafter that has drafted in none of them is named."""
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the bins of times."""


class Metrics(Observer):
    """Counts what an engine does; every server has a registry of its own.

    Attributes:
        rejected: requests that were turned away.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._last: dict[Request, float] = {}  # when its last tokens came
        counter = partial(Counter, registry=self._registry)
        self._finished = counter("draftree:requests", "Requests that have ended, by why.", ["finish_reason"])
        self._tokens = counter("draftree:generation_tokens", "Generated tokens.")
        self._prompt = counter("draftree:prompt_tokens", "Tokens of prompts.")
        self._seconds = counter("draftree:step_seconds", "Seconds of steps, by part.", ["part"])
        self._by_depth = counter("draftree:draft_tokens", "Drafted tokens, by depth and fate.", ["depth", "accepted"])
        self._by_drafter = counter(
            "draftree:drafter_tokens", "Drafted tokens of ended requests, by drafter.", ["drafter", "accepted"]
        )
        self.rejected = counter("draftree:admission_rejections", "Requests that were turned away: the queue was full.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Draft trees that were verified.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._positions = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens, by depth from 0.", ["position"]
        )
        self._hits = counter("draftree:prefix_hits", "Requests whose prompt began as a kept row does.")
        self._reused = counter("draftree:prompt_tokens_reused", "Tokens of prompts that kept rows had.")
        histogram = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._first = histogram("draftree:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = histogram("draftree:inter_token_seconds", "From one token to the next, as they come.")

    def opened(self, request: Request) -> None:
        self._last[request] = now = time.monotonic()
        self._first.observe(now - request.arrival)
        self._prompt.inc(request.prompt_length)
        self._tokens.inc()
        self._reused.inc(request.stats.reused)
        if request.stats.reused:
            self._hits.inc()

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """Seconds of a step that requests share count once; prompts that it reads have their part of them."""
        now = time.monotonic()
        for outcome in outcomes:
            self._tokens.inc(outcome.taken)
            for _ in range(outcome.taken):
                self._between.observe((now - self._last[outcome.request]) / outcome.taken)
            self._last[outcome.request] = now
            self._drafts.inc(len(outcome.tree) > 0)
            self._drafted.inc(len(outcome.tree))
            accepted = outcome.path[: outcome.taken]
            self._accepted.inc(len(accepted))
            for depth in range(1, outcome.tree.depth + 1):
                drafted, hit = outcome.tree.depths.count(depth), depth <= len(accepted)
                self._by_depth.labels(str(depth), "no").inc(drafted - hit)
                self._by_depth.labels(str(depth), "yes").inc(hit)
                self._positions.labels(str(depth - 1)).inc(hit)
        if outcomes:
            step = outcomes[0].step
            share = len(outcomes) / step.batch  # of a step that requests with other drafters are in too
            seconds = {"draft": step.draft, "verify": share * step.verify, "other": share * step.other}
            for part, value in seconds.items():
                self._seconds.labels(part).inc(value)

    def closed(self, request: Request) -> None:
        self._last.pop(request, None)
        for name, drafts in request.stats.drafters.items():
            self._by_drafter.labels(name, "no").inc(drafts.drafted - drafts.accepted)
            self._by_drafter.labels(name, "yes").inc(drafts.accepted)

    def ended(self, request: Request) -> None:
        """Count an ended request; observers miss those that end in the queue."""
        self._finished.labels(request.finish_reason or "cancelled").inc()

    def text(self, engine: Engine) -> bytes:
        """Return all figures in Prometheus' format: the counters, and gauges of the engine's state."""
        now = CollectorRegistry()
        gauge = partial(Gauge, registry=now)

        def by_label(name: str, about: str, label: str, values: Mapping[Any, float]) -> None:
            labelled = gauge(name, about, [label])
            for key, value in values.items():
                labelled.labels(str(key)).set(value)

        running, prefixes = engine.scheduler.running, engine.stepper.prefixes.lengths
        gauge("draftree:requests_running", "Requests that run: rows in use.").set(len(running))
        gauge("draftree:requests_waiting", "Requests that wait in the queue.").set(len(engine.scheduler.waiting))
        gauge("draftree:prefix_rows_kept", "Rows kept for prompts to come.").set(len(prefixes))
        held = {"running": sum(row.length for job in running if (row := job.request.row)), "kept": sum(prefixes)}
        by_label("draftree:kv_tokens", "Tokens whose keys and values are held, by kind of row.", "rows", held)
        target = engine.target
        if (slot := target.capabilities.slot_bytes) and (most := target.cache_bytes // slot):
            gauge("draftree:kv_tokens_most", "Tokens that the memory of the cache has room for.").set(most)
            share = sum(held.values()) / most
            gauge("vllm:kv_cache_usage_perc", "Share of this room that is taken; 1 is all.").set(share)
        policy = engine.speculation.drafter.policy
        if policy and (report := policy.report):
            gains = {of: getattr(report, of) / report.steps for of in ("tokens", "passes") if report.steps}
            about = "What a step of method auto gains and costs: `tokens` a request, `passes` of AR decoding."
            by_label("draftree:auto_step_mean", about, "of", gains)
            about = "Drafted tokens a step of method auto, by requests that it decodes."
            by_label("draftree:auto_step_nodes", about, "requests", report.nodes_by_requests())
            on = {record.name: record.on for record in report.drafters if record.name}
            by_label("draftree:auto_drafter_on", "Whether method auto drafts by it now.", "drafter", on)
        return generate_latest(self._registry) + generate_latest(now)


class UnusedDrafters(Observer):
    """Names in the log, once each, the drafters that ``auto`` has left off for ``_UNUSED`` steps."""

    def built(self, target: LanguageModel, speculation: Speculation) -> None:
        drafter = speculation.drafter
        self._report = drafter.policy.report if drafter.policy else None
        records = self._report.drafters if self._report else ()
        names = drafter.name.split("+")
        if len(names) != len(records):
            names = [drafter.name] * len(records)
        self._records = dict(zip(names, records, strict=True))
        self._looked, self._used, self._named = 0, dict.fromkeys(names, 0), set[str]()

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        if self._report is None or self._report.steps < self._looked + _UNUSED:
            return
        unused = [name for name, record in self._records.items() if record.steps == self._used[name]]
        others = "+".join([name for name in self._records if name not in unused]) or NONE
        for name in unused:
            if name not in self._named:
                log.info(
                    "drafter %s drafts nothing: here a token by it takes %.2f passes of the target, or is too seldom "
                    "right; a server with --drafter %s starts faster and takes less memory",
                    name,
                    self._records[name].token,
                    others,
                )
        self._named.update(unused)
        self._looked, self._used = self._report.steps, {name: record.steps for name, record in self._records.items()}


class JsonLines(logging.Formatter):
    """A line as a JSON object; that of a request has its fields in place of a message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name}
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class SafeLines(DefaultFormatter):
    """uvicorn's lines, with control characters that clients and files supply made visible."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible(super().formatException(ei))


def log_request(request: EngineRequest, key: str, choice: int, method: str) -> None:
    """Log the end of a request.

    Args:
        key: id of the answer, as the client has it.
        choice: its number in that answer.
        method: how its trees grew.
    """
    stats = request.stats
    fields: dict[str, Any] = {
        "id": key,
        "choice": choice,
        "method": method,
        "drafter": request.speculation.drafter.name,
        "prompt_tokens": request.prompt_length,
        "tokens": len(request.output_ids),
        "finish_reason": request.finish_reason,
        "seconds": round(time.monotonic() - request.arrival, 4),
        "mean_acceptance_length": round(stats.mal, 4),
        "drafted": sum(stats.drafted),
        "accepted": sum(stats.accepted),
    }
    if request.error is not None:
        fields["error"] = str(request.error)
    line = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
    log.info("%s", line, extra={"fields": fields})
