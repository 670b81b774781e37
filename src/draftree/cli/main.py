"""``draftree generate | chat | batch | serve | info | methods | bench | report | profile | calibrate | train``, ...

Text goes to standard output, figures and complaints to standard error. Bad input is one line and exit code 2; a failure
while running is one line and exit code 1; so is Ctrl-C, with exit code 130.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings

import torch
import typer

from ..config import DEFAULT_NODES
from ..drafters.registry import DRAFTERS
from ..drafters.spec import LOOPS
from ..errors import DraftreeWarning, InputError, RunError
from ..models.huggingface.tensor_parallel import processes, run_on_ranks
from ..models.loading import load_part
from ..policies.methods import METHODS
from ..progress import out
from ..verify.schemes import SCHEMES
from .batch import batch
from .bench import bench, bench_serve, report
from .calibrate import calibrate
from .chat import chat
from .console import complain
from .generate import generate
from .info import info, profile
from .interrupt import INTERRUPTED, Interrupted
from .serve import serve
from .train_classifier import classifier
from .train_head import app as train

app = typer.Typer(
    name="draftree",
    help="Lossless speculative decoding with draft trees that change shape at every step.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What typer raises for unusable arguments; typer carries its own click, so click's class would not do."""

app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(info)
app.command()(serve)


@app.command()
def methods() -> None:
    """List the ways to shape draft trees, the verification schemes, and the drafters."""
    out.print(f"methods [settings]; --nodes is {DEFAULT_NODES} where a method names no other:", markup=False)
    for method in METHODS.values():
        settings = " ".join(f"{key}={'FILE' if value == '' else value}" for key, value in method.settings.items())
        nodes = "" if method.nodes == DEFAULT_NODES else f" --nodes {method.nodes}"
        out.print(f"{method.name:20} {method.summary}{f' [{settings}]' if settings else ''}{nodes}", markup=False)
    out.print(
        f"{'':20} width_of, depth_of: steps of the entropy H, such as 0.02:1,1:2,inf:7: 1 below 0.02 nats, 2 below 1"
    )
    out.print("\nverification:")
    for scheme in SCHEMES.values():
        settings = "".join(f":{key}={value}" for key, value in scheme.settings.items())
        out.print(f"{scheme.name:23} {scheme.summary}{f' [{settings}]' if settings else ''}", markup=False)
    out.print("\ndrafters:")
    for name, summary in DRAFTERS.items():
        out.print(f"{name:20} {summary}")
    out.print(f"{'FOLDER':20} a draft head that 'draftree train head' wrote")
    out.print(f"{'MODEL':20} any model with the target's vocabulary")
    out.print(f"{'A+B':20} an ensemble: one tree out of what A and B propose")
    out.print(f"{'A>B':20} a cascade: A proposes to B, B verifies, corrects and lets A go on, before the target")
    loop = f"loop={'|'.join(LOOPS)}:tau=H:memory=N:pending=N"
    out.print(f"{'':20} A:method=M:... shapes proposals; B:{loop} sets when", markup=False)


app.command()(bench)
app.command()(bench_serve)
app.command()(report)
app.command()(profile)
app.command()(calibrate)
train.command()(classifier)
app.add_typer(train, name="train")


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    complain(str(message))


def run(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DraftreeWarning)
        warnings.showwarning = _show_warning
        return _run_command(arguments)


def _run_command(arguments: list[str] | None) -> int:
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        if app(args=arguments or ["--help"], prog_name="draftree", standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt  # typer returns this instead of letting it pass
    except typer.Exit as stop:
        return stop.exit_code
    except _ClickError as error:
        complain(f"{error.format_message().rstrip('.')}: see 'draftree --help'")  # type: ignore[attr-defined]
        return 2
    except InputError as error:
        complain(str(error))
        return 2
    except RunError as error:
        complain(str(error))
        return 1
    except (MemoryError, torch.OutOfMemoryError):
        complain("out of memory: use a smaller --nodes, a shorter prompt, or --dtype bfloat16")
        return 1
    except (KeyboardInterrupt, Interrupted, typer.Abort) as error:
        complain(str(error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 1
    except (RuntimeError, OSError) as error:
        complain(f"failed while running: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}")
        return 1
    return 0


def main() -> None:
    """Run the command line of this process; standard input or error that the caller closed are empty."""
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if getattr(sys, "stdout", None) is None:
        complain("standard output is closed: send it to a file, or to /dev/null")
        sys.exit(1)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not text costs its line, not those read with it
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal's encoding lacks is no reason to stop
    if processes() > 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # rank 0 lets the others end
        code = run_on_ranks(run, load_part)
    else:
        code = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done
    sys.exit(code)
