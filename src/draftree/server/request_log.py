"""A line of the log for each request that has ended, and logs as JSON. Texts are in it only where they are wanted."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from ..engine.speculation import EngineRequest

log = logging.getLogger("draftree.requests")


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
