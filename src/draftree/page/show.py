"""Pictures of traces: the inspector's views of them, as one document that loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path

from ..artifacts import LARGEST_DATA, read_text, reason, user_path
from ..engine.trace import VERSION, trace_line, trace_version
from ..errors import ConfigError
from ..request import Generation

_VIEWS = ("trace.js", "charts.js", "views.js", "show.js")
"""Scripts of the document; each imports from those before it."""
_WRITE = "'draftree generate --trace FILE' and draftree.Trace write one"


@lru_cache(maxsize=1)
def page_files() -> dict[str, str]:
    """Map the names of the page's files to their texts."""
    paths = [path for path in Path(__file__).parent.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@dataclass(frozen=True, slots=True)
class TracePage:
    """A trace as a document: notebooks draw it, ``html`` can be saved.

    Attributes:
        html: the whole document.
    """

    html: str

    def _repr_html_(self) -> str:
        style = "width:100%;height:44rem;border:0"
        return f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" style="{style}"></iframe>'


def show(trace: Generation | Sequence[Generation] | str | Path) -> TracePage:
    """Draw what every step did: its draft tree, the accepted path, entropies, and what it cost.

    Args:
        trace: what ``Engine.generate(..., trace=True)`` returned, or one item of it; or a trace file.

    Raises:
        ConfigError: it has no trace.
    """
    text = _read(trace) if isinstance(trace, (str, Path)) else _lines_of(trace)
    files = page_files()
    script = "\n".join(re.sub(r"^(import .*|export )", "", files[name], flags=re.MULTILINE) for name in _VIEWS)
    parts = {"/* style */": files["inspector.css"], "/* script */": script, "/* trace */": text.replace("<", "\\u003c")}
    return TracePage(re.sub("|".join(map(re.escape, parts)), lambda mark: parts[mark[0]], files["show.html"]))


def _read(name: str | Path) -> str:
    path = user_path(name)
    try:
        text = read_text(path, LARGEST_DATA)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"trace '{path}' cannot be read: {reason(error)}: {_WRITE}") from None
    version = trace_version(text.partition("\n")[0])
    if version is None:
        raise ConfigError(f"'{path}' is no trace: {_WRITE}")
    if version != VERSION:
        raise ConfigError(f"'{path}' is a trace of version {version}, not {VERSION}: record it again")
    return text


def _lines_of(trace: object) -> str:
    results = [trace] if isinstance(trace, Generation) else trace
    traces = [getattr(result, "trace", ()) for result in results] if isinstance(results, (list, tuple)) else []
    if not traces or not all(traces):
        raise ConfigError(f"a {type(trace).__name__} without a trace cannot be drawn: call generate(..., trace=True)")
    records = [record for records in traces for record in records]
    return "".join(trace_line(record) for i, record in enumerate(records) if i == 0 or record["kind"] != "run")
