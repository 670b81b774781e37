"""What a worker process does: chat templates and grammars of strangers are run and read here (``workers.run``).

The process imports nothing of the package, so that it starts in a tenth of a second. A line of standard input is a job:
[most seconds of the processor, and of the clock, most bytes of memory to keep, name, arguments]; a line of standard
output is what it gives: {"result": ...} or {"error": "..."}, and "last": the worker takes no more jobs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from datetime import datetime
from typing import Any

_MEMORY = 2 << 30
"""Bytes of addresses for the process, of which it takes a tenth at its start."""
_STACK = 1 << 20
"""Bytes of stack: what can be read here can be read by threads of the package too, which have some megabytes."""


def render(template: str, variables: dict[str, Any], day: str | None = None) -> str:
    """Render a chat template.

    Args:
        day: in place of today, as YYYY-MM-DD.
    """
    fixed = {} if day is None else {"strftime_now": datetime.fromisoformat(day).strftime}
    return str(_compiled(template).render({**variables, **fixed}))


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def variables(template: str) -> list[str]:
    """List the names that a chat template reads and does not set."""
    from jinja2 import meta

    environment = _environment()
    return sorted(meta.find_undeclared_variables(environment.parse(template)))


@functools.lru_cache
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Templates mark what an assistant generates, which means something where models are trained."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def read_grammar(kind: str, source: str) -> str:
    """Compile a grammar for llguidance's matchers.

    Args:
        kind: "json_schema", "regex", "lark", or "grammar", which is Lark or GBNF.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = {
        "json_schema": lambda: LLMatcher.grammar_from_json_schema(source, overrides=JSON_LAYOUT),
        "regex": lambda: LLMatcher.grammar_from_regex(source),
        "lark": lambda: LLMatcher.grammar_from_lark(source),
        "grammar": lambda: LLMatcher.grammar_from_lark(any_to_lark(source)),
    }[kind]()
    if error := LLMatcher.validate_grammar(grammar):
        raise ValueError(error)
    return grammar


JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON on one line: models need no freedom there, and what is forced can be drafted. "oneOf" is read as "anyOf"."""
_JOBS = {job.__name__: job for job in (render, variables, read_grammar)}


def _limit(name: str, most: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has all limits
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _resident() -> int:
    """Return the resident memory in bytes, or 0 where it is unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit("RLIMIT_STACK", _STACK)
    _limit("RLIMIT_AS", _MEMORY)
    for line in sys.stdin.buffer:
        cpu_seconds, seconds, most_kept, name, arguments = json.loads(line)
        # The process ends, even where nobody waits for it any more, when a job takes longer.
        _limit("RLIMIT_CPU", int(time.process_time()) + 1 + cpu_seconds)
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            answer: dict[str, Any] = {"result": _JOBS[name](*arguments)}
        except BaseException as error:  # noqa: BLE001 - a library's panics are no Exceptions
            answer = {"error": f"{type(error).__name__}: {error}"[: 1 << 12]}
        faulthandler.cancel_dump_traceback_later()
        answer["last"] = _resident() > most_kept
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
