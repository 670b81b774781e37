"""What ``draftree generate`` and ``draftree chat`` share: the prompt, the trace, and a request run to its end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from ..config import option
from ..engine import Engine
from ..errors import ConfigError, PromptError
from ..progress import out
from ..request import Chunk, Request
from ..trace import Observer, Trace
from . import console as show
from .console import complain


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """A trace, if there is a file for it."""

    trace: Path | None = option("Write what every step did to this file (JSON lines).", metavar="FILE")
    force: bool = option("Overwrite the file of --trace.", False)

    def observers(self, context: typer.Context, method: str) -> list[Observer]:
        """A trace that ends with the command, or nothing."""
        if self.trace is None:
            if self.force:
                raise ConfigError("--force overwrites the file of --trace: name one with --trace FILE")
            return []
        trace = Trace(self.trace, force=self.force, labels={"method": method}, warn=complain)
        return [context.with_resource(trace)]


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-".

    Raises:
        PromptError: it is empty or not valid UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise PromptError("the prompt is not valid UTF-8: convert it, for example with iconv") from None
    if not text.strip():
        raise PromptError("the prompt is empty: give it at least one character")
    return text


def run(engine: Engine, request: Request, *, silent: bool = False, stream: bool = True) -> bool:
    """Run a request to its end and print its text, as it comes or at the end; true when Ctrl-C ended it."""
    try:
        for chunk in engine.follow(request):
            if stream and not silent:
                _print(chunk)
    except KeyboardInterrupt:
        return True
    finally:
        engine.close(request)
        if not silent:
            out.out("" if stream else request.text, highlight=False)
    return False


def _print(chunk: Chunk) -> None:
    """Coloured in a terminal; byte for byte elsewhere (a console would expand tabs)."""
    if out.is_terminal:
        out.print(show.token(chunk), end="")
    else:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
