"""``draftree generate | chat | batch | serve | info | methods | bench | report | show | profile | calibrate | train |
heads``.

Text goes to standard output, figures and complaints to standard error. Bad input is one line and exit code 2; a failure
while running is one line and exit code 1; so is Ctrl-C, with exit code 130. A command is loaded when it runs, so
that help comes at once.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import warnings
from collections import UserDict
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ..errors import ChatTemplateError, DraftreeWarning, InputError, RunError, first_line, needs_extra
from .interrupt import INTERRUPTED, InterruptError
from .option_groups import GroupedCommand

COMMANDS = {
    "generate": ("generate", "Answer one prompt, with the target's exact output."),
    "chat": ("generate", "Talk to a model."),
    "batch": ("serve", "Answer a file of requests, many at a time."),
    "serve": ("serve", "Serve a model over HTTP as OpenAI's API does."),
    "info": ("info", "Print what a model can do, or what a draft head is for."),
    "methods": ("main", "List methods, papers and when to use them; schemes; drafters."),
    "bench": ("bench", "Measure methods and drafters on prompts."),
    "report": ("bench", "Report on runs of bench."),
    "show": ("info", "Draw what the steps of a trace did, as a page of HTML."),
    "profile": ("info", "Measure what passes of a model cost on this machine."),
    "calibrate": ("train", "Make a tree for two models out of measured acceptance."),
    "train": ("train", "Train draft heads and classifiers."),
    "heads": ("heads", "List, check and remove draft heads."),
}
"""Command -> (module of this folder that has it, first line of its help), in the order of the help."""


class _Commands(UserDict[str, Any]):
    """Commands of typer; each is built when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            with needs_extra("torch", f"draftree {name}"):
                module = import_module(f".{COMMANDS[name][0]}", __package__)
            command = getattr(module, name)
            if not isinstance(command, typer.Typer):
                single = typer.Typer(add_completion=False, rich_markup_mode=None)
                single.command(name, cls=GroupedCommand)(command)
                command = single
            self.data[name] = get_command(command)
        return self.data[name]


class _CommandGroup(TyperGroup):
    """Lists ``COMMANDS`` without importing them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands(dict.fromkeys(COMMANDS))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"draftree {version('draftree')}")
        raise typer.Exit


def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding with draft trees that change shape at every step."""


app = typer.Typer(
    name="draftree",
    cls=_CommandGroup,
    callback=_start,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[METHOD]", help="One method: what it does, its settings.")
    ] = None,
) -> None:
    """List the ways to shape draft trees and when to use which, the verification schemes, and the drafters."""
    from ..drafters.registry import COMPOSED, DRAFTERS
    from ..policies.methods import METHODS, find_method
    from ..verify.schemes import SCHEMES

    if name is not None:
        method = find_method(name)
        typer.echo(f"{method.name} ({method.paper}): {method.summary}\nuse: {method.use}\nnodes: {method.nodes}")
        for key, value in method.settings.items():
            typer.echo(f"--set {key}={'FILE' if value == '' else value}")
        return
    typer.echo(f"{'method':21} {'paper':29} when to use it; 'draftree methods METHOD' has its settings")
    for method in METHODS.values():
        typer.echo(f"{method.name:21} {method.paper:29} {method.use}")
    typer.echo("\nverification")
    for scheme in SCHEMES.values():
        typer.echo(f"{scheme.name:23} {scheme.summary}")
    typer.echo("\ndrafter")
    for drafter, summary in (DRAFTERS | COMPOSED).items():
        typer.echo(f"{drafter:20} {summary}")


_ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for unusable arguments; typer carries its own click, so click's class would not do."""
_OUT_OF_MEMORY = "out of memory: use a smaller --nodes, a shorter prompt, or --dtype bfloat16"


def complain(message: str) -> None:
    """Print one line to standard error."""
    from ..progress import complain as show

    show(message)


def run(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DraftreeWarning)
        warnings.showwarning = lambda message, *_, **__: complain(str(message))
        return _run_command(sys.argv[1:] if arguments is None else arguments)


def _run_command(arguments: list[str]) -> int:
    try:
        if app(args=arguments or ["--help"], prog_name="draftree", standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt  # typer returns this instead of letting it pass
    except typer.Exit as stop:
        return stop.exit_code
    except _ClickError as error:
        command = context.command_path if (context := getattr(error, "ctx", None)) else "draftree"
        complain(f"{error.format_message().rstrip('.')}: see '{command} --help'")  # type: ignore[attr-defined]
        return 2
    except (InputError, RunError) as error:
        options = " (--raw, or --chat-template FILE)" if isinstance(error, ChatTemplateError) else ""
        complain(f"{error}{options}")
        return 2 if isinstance(error, InputError) else 1
    except (KeyboardInterrupt, InterruptError, typer.Abort) as error:
        complain(str(error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 1
    except (MemoryError, RuntimeError, OSError) as error:
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
        complain(_OUT_OF_MEMORY if full else f"failed while running: {first_line(error)}")
        return 1
    return 0


def _flushed(code: int) -> int:
    """The exit code of a command once its output is written; what cannot be is given up, which is said once."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0:
            complain(f"failed while running: {first_line(error)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return code or 1
    return code


def main() -> None:
    """Run the command line of this process; standard input or error that the caller closed are empty."""
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if getattr(sys, "stdout", None) is None:
        complain("standard output is closed: send it to a file, or to /dev/null")
        sys.exit(1)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # what is not text costs its line, not those read with it
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")  # what a terminal's encoding lacks is no reason to stop
        else:  # a file or a program gets the same bytes on every system and under every locale
            sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun
        from ..models.huggingface.tensor_parallel import run_on_ranks

        signal.signal(signal.SIGINT, signal.default_int_handler)  # rank 0 lets the others end
        code = run_on_ranks(run)
    else:
        code = run()
    code = _flushed(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done
    gc.freeze()  # nor is garbage looked for in all that is loaded
    sys.exit(code)
