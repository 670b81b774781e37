"""What operators read: figures for Prometheus, with vLLM's names of speculative decoding beside our own, and the log.

The log has a line for each request that has ended; texts are in it only where they are wanted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..engine.engine import Engine
from ..engine.speculation import EngineRequest, Observer
from ..policies.auto import AutoTree, Report
from ..request import Outcome, Request

log = logging.getLogger("draftree.requests")
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of the bins of times."""


@dataclass(slots=True)
class _Clock:
    arrival: float
    last: float | None = None


class Metrics(Observer):
    """Counts what an engine does; every server has a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._clocks: WeakKeyDictionary[Request, _Clock] = WeakKeyDictionary()

        def counter(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, about, labels, registry=registry)

        self._finished = counter("draftree:requests", "Requests that have ended, by why.", ["finish_reason"])
        self._tokens = counter("draftree:generation_tokens", "Generated tokens.")
        self._prompt = counter("draftree:prompt_tokens", "Tokens of prompts.")
        self._seconds = counter("draftree:step_seconds", "Seconds of steps, by part.", ["part"])
        self._by_depth = counter("draftree:draft_tokens", "Drafted tokens, by depth and fate.", ["depth", "accepted"])
        self._by_drafter = counter(
            "draftree:drafter_tokens",
            "Drafted tokens of ended requests, by drafter.",
            ["drafter", "accepted"],
        )
        self._rejected = counter("draftree:admission_rejections", "Requests that were turned away: the queue was full.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Draft trees that were verified.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._positions = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens, by depth from 0.", ["position"]
        )
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._first = histogram("draftree:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = histogram("draftree:inter_token_seconds", "From one token to the next, as they come.")
        gauge = partial(Gauge, registry=registry)
        self._running = gauge("draftree:requests_running", "Requests that run: rows in use.")
        self._waiting = gauge("draftree:requests_waiting", "Requests that wait: length of the queue.")
        self._hits = counter("draftree:prefix_hits", "Requests whose prompt began as a kept row does.")
        self._reused = counter("draftree:prompt_tokens_reused", "Tokens of prompts that kept rows had.")
        self._kept = gauge("draftree:prefix_rows_kept", "Rows kept for prompts to come.")
        self._held = gauge("draftree:kv_tokens", "Tokens whose keys and values are held, by kind of row.", ["rows"])
        self._most = gauge("draftree:kv_tokens_most", "Tokens that the memory of the cache has room for.")
        self._used = gauge("vllm:kv_cache_usage_perc", "Share of this room that is taken; 1 is all.")
        self._auto = gauge(
            "draftree:auto_step_mean",
            "What a step of method auto gains and costs: `tokens` a request, `passes` of AR decoding.",
            ["of"],
        )
        self._auto_nodes = gauge(
            "draftree:auto_step_nodes",
            "Drafted tokens a step of method auto, by requests that it decodes.",
            ["requests"],
        )
        self._auto_on = gauge("draftree:auto_drafter_on", "Whether method auto drafts by it now.", ["drafter"])

    def arrived(self, request: Request, began: float) -> None:
        """A request has been submitted, at this ``time.monotonic()``; its first token may be there by now."""
        clock = self._clocks.setdefault(request, _Clock(began))
        if clock.last is not None:
            self._first.observe(clock.last - began)
        self._prompt.inc(request.prompt_length)

    def rejected(self) -> None:
        self._rejected.inc()

    def opened(self, request: Request) -> None:
        clock, now = self._clocks.get(request), time.monotonic()
        if clock is None:
            self._clocks[request] = _Clock(now, now)
        else:
            self._first.observe(now - clock.arrival)
            clock.last = now
        self._tokens.inc()
        self._reused.inc(request.stats.reused)
        if request.stats.reused:
            self._hits.inc()

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """Seconds of a step that requests share count once; prompts that it reads have their part of them."""
        now = time.monotonic()
        for outcome in outcomes:
            self._tokens.inc(outcome.taken)
            clock = self._clocks.get(outcome.request)
            if clock is not None and clock.last is not None and outcome.taken:
                for _ in range(outcome.taken):
                    self._between.observe((now - clock.last) / outcome.taken)
                clock.last = now
            if not len(outcome.tree):
                continue
            self._drafts.inc()
            self._drafted.inc(len(outcome.tree))
            accepted = outcome.path[: outcome.taken]
            self._accepted.inc(len(accepted))
            for depth, drafted in enumerate(np.bincount(outcome.tree.depths).tolist()[1:], start=1):
                hit = depth <= len(accepted)
                self._by_depth.labels(str(depth), "no").inc(drafted - hit)
                if hit:
                    self._by_depth.labels(str(depth), "yes").inc()
                    self._positions.labels(str(depth - 1)).inc()
        if outcomes:
            step = outcomes[0].step
            share = len(outcomes) / step.batch  # of a step that requests with other drafters are in too
            seconds = {"draft": step.draft, "verify": share * step.verify, "other": share * step.other}
            for part, value in seconds.items():
                self._seconds.labels(part).inc(value)

    def closed(self, request: Request) -> None:
        for name, made in request.stats.drafters.items():
            self._by_drafter.labels(name, "no").inc(made.drafted - made.accepted)
            self._by_drafter.labels(name, "yes").inc(made.accepted)

    def ended(self, request: Request) -> None:
        """A request has ended, be it in the queue, where no observer hears of it."""
        self._finished.labels(request.finish_reason or "cancelled").inc()

    def text(self, engine: Engine) -> bytes:
        running, kept = engine.scheduler.running, engine.stepper.prefixes.lengths
        self._running.set(len(running))
        self._waiting.set(engine.scheduler.waiting)
        self._kept.set(len(kept))
        held = sum(row.length for job in running if (row := job.request.row) is not None)
        self._held.labels("running").set(held)
        self._held.labels("kept").set(sum(kept))
        target = engine.target
        if (slot := target.capabilities.slot_bytes) and (most := target.cache_bytes // slot):
            self._most.set(most)
            self._used.set((held + sum(kept)) / most)
        policy = engine.speculation.drafter.policy
        if isinstance(policy, AutoTree):
            self._set_auto(policy.report)
        return generate_latest(self.registry)

    def _set_auto(self, report: Report) -> None:
        if report.steps:
            self._auto.labels("tokens").set(report.tokens / report.steps)
            self._auto.labels("passes").set(report.passes / report.steps)
        for requests, nodes in report.nodes_by_requests().items():
            self._auto_nodes.labels(str(requests)).set(nodes)
        for record in report.selection.records:
            if record.source is not None:
                self._auto_on.labels(record.source.name).set(record.on)


class JsonLines(logging.Formatter):
    """A line as a JSON object; that of a request has its fields in place of a message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name}
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_request(request: EngineRequest, key: str, choice: int, method: str, seconds: float, prompt: str | None) -> None:
    """Log the end of a request.

    Args:
        key: id of the answer, as the client has it.
        choice: its number in that answer.
        method: how its trees grew.
        seconds: since it arrived.
        prompt: to be logged, as is the text; None: neither is.
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
        "seconds": round(seconds, 4),
        "mean_acceptance_length": round(stats.mal, 4),
        "drafted": sum(stats.drafted),
        "accepted": sum(stats.accepted),
    }
    if request.error is not None:
        fields["error"] = str(request.error)
    if prompt is not None:
        fields |= {"prompt": prompt, "text": request.text}
    line = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in fields.items())
    log.info("%s", line, extra={"fields": fields})
