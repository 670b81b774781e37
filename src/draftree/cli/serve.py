"""The commands ``draftree serve`` and ``draftree batch``: requests in OpenAI's shape."""

from __future__ import annotations

import copy
import ipaddress
import os
import re
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer
from annotated_types import Interval

from ..artifacts import file_path, locked, user_path
from ..config import NodeCount, check_fields, option
from ..engine.engine import Engine
from ..engine.scheduler import SchedulerParams
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError, RunError, needs_extra
from ..models.base import LanguageModel
from ..models.cost_profile import profile_of
from ..models.model_files import DEFAULT_MODEL
from ..openai.batches import QUEUE, Answering, BatchOutput, batch_lines
from ..progress import err, progress_reporter
from .console import read_file
from .interrupt import GO_ON, on_interrupt
from .options import ComputeOptions, Model, Target, TemplateOptions, TraceOptions, with_options

KEY = "DRAFTREE_API_KEY"
"""Environment variable with a key."""
_SLOWDOWN = 2.0
"""Most that drafts slow down requests that run together (``SchedulerParams.slowdown``)."""
_LONGEST = 8.0
"""Most time of a pass over one request's tree, as a multiple of one without it: whoever comes waits for its end."""
_MOST = 10**9
"""Seconds of a request, of clients and of an end, and kilobytes of a body; timers count no more of either."""
Timer = Annotated[float, Interval(gt=0, le=_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where a server listens, and who may send requests."""

    host: str = option("Address to listen at; 0.0.0.0 is all of this machine's.", "127.0.0.1")
    port: Annotated[int, Interval(ge=0, le=65535)] = option("Port to listen at; 0 takes a free one.", 8000, metavar="N")
    name: str | None = option("What clients call the model; its own name by default.")
    api_key: tuple[str, ...] = option(
        f"Clients must send it; may be repeated. Better: --api-key-file, or ${KEY}.", (), metavar="KEY"
    )
    api_key_file: str | None = option("A file with a key a line.", metavar="FILE")
    origin: tuple[str, ...] = option(
        "Web pages from this origin may send requests (CORS); may be repeated.", (), metavar="URL"
    )
    allowed_host: tuple[str, ...] = option(
        "A name by which clients may call a server without keys, beside localhost, addresses and --host; * allows any; "
        "may be repeated.",
        (),
        metavar="NAME",
    )
    timeout: Timer | None = option("Seconds in which each request has to end; no limit by default.", metavar="S")
    client_timeout: Timer = option(
        "Seconds in which a request has to come and an answer to be taken, or its connection is closed.",
        60.0,
        metavar="S",
    )
    nodes_limit: NodeCount | None = option(
        "Most drafted tokens in one step's tree of a request; by default as many as make a pass take 8 times as long.",
        metavar="N",
    )
    max_body: Annotated[int, Interval(ge=1, le=_MOST)] = option("Most kilobytes of a request.", 4096, metavar="N")
    kept_rows: int = option(
        "Rows of ended requests that are kept for prompts that begin as they do.", 64, name="--prefixes", metavar="N"
    )
    drain: Timer = option("Seconds that requests under way get to end when the server is stopped.", 30, metavar="S")
    json_log: bool = option(
        "How the log is written; each request that has ended is a line of it.",
        False,
        name="--log-format",
        choices={"text": False, "json": True},
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.host:
            raise ConfigError("--host is empty: name an address; 0.0.0.0 is all of this machine's")
        for origin in self.origin:
            if not re.fullmatch(r"\*|\w[\w+.-]*://[^/?#\s]+", origin):
                raise ConfigError(f"--origin is {origin!r}: write it as browsers do, as https://example.com, or *")

    def keys(self) -> list[str]:
        """Collect the keys of the options, the file and the environment.

        Raises:
            ConfigError: the file cannot be read or is empty, or a key is empty or has spaces or is no printable ASCII.
        """
        keys = [*self.api_key, *filter(None, [os.environ.get(KEY)])]
        if self.api_key_file is not None:
            keys += read_file(self.api_key_file, "--api-key-file").split()
        if not all(re.fullmatch("[!-~]+", key) for key in keys):
            raise ConfigError("a key is empty, or has spaces or characters beyond ASCII: use letters, digits and signs")
        return keys


@partial(with_options, without=("prefixes",))
def serve(
    *,
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    server: ServerOptions,
    speculation: SpeculationParams,
    scheduling: SchedulerParams,
    trace: TraceOptions,
    template: TemplateOptions,
    compute: ComputeOptions,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat and text completions, streamed or whole.

    Each request may choose how it is drafted for (field "draftree"); its text is that of AR decoding all the same.
    Ctrl-C or SIGTERM: requests are refused, those under way get --drain seconds to end; twice: it ends at once.
    """
    keys = server.keys()
    if server.nodes_limit is not None and (speculation.nodes or 0) > server.nodes_limit:
        raise ConfigError(f"--nodes is {speculation.nodes}: use at most --nodes-limit, {server.nodes_limit}")
    with needs_extra("serve", "a server"):
        import uvicorn

        from ..server.app import Server, ServerSettings
        from ..server.engine_loop import EngineLoop
        from ..server.lifecycle import DrainingServer, loading, patient
        from ..server.metrics import Metrics, UnusedDrafters

    metrics = Metrics()
    observers = [metrics, UnusedDrafters(), *trace.observers(context, str(speculation.method))]
    with _listening(server.host, server.port) as listener:
        scheduling = replace(scheduling, prefixes=server.kept_rows, slowdown=_SLOWDOWN)
        most_nodes = 0

        def load() -> Engine:
            nonlocal most_nodes, speculation
            target = _loaded(compute, model)
            most_nodes = server.nodes_limit or max(profile_of(target).most_nodes(_LONGEST), speculation.nodes or 0)
            speculation = speculation.within(most_nodes)
            return template.engine(target, speculation, observers, scheduling)

        with loading(listener):
            loop = EngineLoop(load)
        settings = ServerSettings(
            name=server.name or loop.engine.target.capabilities.name,
            speculation=speculation,
            keys=keys,
            origins=server.origin,
            hosts=(*server.allowed_host, server.host),
            most_body=server.max_body << 10,
            timeout=server.timeout,
            most_nodes=most_nodes,
        )
        address, port = listener.getsockname()[:2]
        if not keys and not _is_loopback(address):
            err.print(f"anybody who reaches {address} may send requests: set a key with --api-key-file", style="yellow")
        served = Server(loop, settings, metrics)
        config = uvicorn.Config(
            served.app,
            http=patient(server.client_timeout),
            ws="none",
            log_config=_log(uvicorn.config.LOGGING_CONFIG, as_json=server.json_log),
        )
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        err.print(f"{settings.name}: {url}/v1, inspector at {url}/")
        DrainingServer(config, served, server.drain).run(sockets=[listener])


def _loaded(compute: ComputeOptions, name: str) -> LanguageModel:
    model = compute.load(name)
    if model.tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer: requests and answers are text")
    return model


def _log(config: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Extend uvicorn's logging configuration by ours, all of it on standard error."""
    merged = copy.deepcopy(config)
    merged["handlers"]["access"]["stream"] = "ext://sys.stderr"
    merged["formatters"]["default"]["()"] = "draftree.server.metrics.SafeLines"
    if as_json:
        lines = {"()": "draftree.server.metrics.JsonLines"}
        merged["formatters"] = {"default": lines, "access": lines}
    merged["loggers"]["draftree"] = {"handlers": ["default"], "level": "INFO"}
    return merged


def _is_loopback(address: str) -> bool:
    """Test whether only this machine reaches an address, which may have a zone or be IPv4 in IPv6's form."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        RunError: the address or the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise RunError(
            f"cannot listen at {host}, port {port} ({error.strerror or error}): name another with --host or --port"
        ) from None


@partial(with_options, without=("queue",))
def batch(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="Requests, one a line.")],
    out: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="Where the answers go.")],
    target: Target = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="What bodies call the model; its own name by default.")] = None,
    speculation: SpeculationParams,
    scheduling: SchedulerParams,
    trace: TraceOptions,
    template: TemplateOptions,
    compute: ComputeOptions,
) -> None:
    """Answer a file of requests, many at a time: OpenAI's batch format, or lines of {"prompt": "..."}.

    Answers are appended as they come, in any order. The same command again goes on where the last one ended. A line
    that cannot be answered has a record that says why, and the exit code is 1.
    """
    lines = batch_lines(user_path(source))
    context.with_resource(locked(file_path(out, "output"), "output", folder=False))
    output = BatchOutput(out, lines)
    total, before = len(lines), len(output.done)
    if before < total:
        observers = trace.observers(context, str(speculation.method))
        model = _loaded(compute, target)
        engine = template.engine(model, speculation, observers, replace(scheduling, queue=QUEUE))
        answering = Answering(engine, speculation, name or model.capabilities.name, scheduling.rows)
        waiting = (line for line in lines if line.id not in output.done)
        with on_interrupt(lambda: f"interrupted after {len(output.done)} of {total} lines: {GO_ON}"):
            with progress_reporter("batch", total, before) as progress:
                for record in answering.records(waiting):
                    output.append(record)
                    progress(len(output.done))
    again = f", {before} of them before" if before else ""
    if output.errors:
        raise RunError(f"{out}: {output.errors} of {total} lines could not be answered{again}: their records have why")
    err.print(f"{out}: {total} lines answered{again}")
