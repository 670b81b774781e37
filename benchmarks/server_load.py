"""Does a server under load give each request the text that it has alone, keep nothing of it, and cost little?

    python -m benchmarks.server_load texts [--requests 200] [--concurrency 8]
    python -m benchmarks.server_load soak [--minutes 10] [--concurrency 64] [--requests 200]
    python -m benchmarks.server_load overhead [--requests 20] [--tokens 64] [--concurrency 1]
    python -m benchmarks.server_load llama [--target FILE.gguf] [--requests 24] [--tokens 64] [--concurrency 8]

All start ``draftree serve`` (``--target``, ``--drafter``), send requests and print what they found. The exit code is 1
where a text differs, a row is left or a request fails. ``texts``: methods, drafters, seeds, grammars, stops, penalties,
predictions, priorities, several answers, whole answers and streams, of which a tenth is left in between and a tenth is
read slowly; then each request once more alone and without drafts. A stream that was left has to be the beginning of its
text. ``soak``: the same requests again and again for some minutes, in random order; the server's resident memory,
tokens a second, and the time to a stream's first token and between two of its events; the exit code is 1 too where
memory grows. ``overhead``: streams by a raw client in a process of its own, and the same by the Python API in this
process, in turn, both without rows that are kept: tokens a second of the one over those of the other, prompts included,
in all rounds, and the CPU time of the server's event loop.
``llama``: the same streams by llama.cpp's own server (``xllamacpp``) of the same file on as many threads, in turn, both
without rows that are kept: tokens a second, prompts included, and the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from draftree.bench.suites import choose, load_suite
from draftree.config import SamplingParams
from draftree.engine.engine import Engine, Handle
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import SpeculationParams
from draftree.models.loading import load
from draftree.models.model_files import DEFAULT_MODEL, gguf_path
from draftree.text.encoding import user

from .load_requests import Asked, made
from .raw_client import raw_client

_WARM = 120.0
_LEAK = 2.0
"""MiB a minute: what a server of months may not grow by, and minutes of a soak can tell."""


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address, and its process."""
    command = [sys.executable, "-m", "draftree", "serve", args.target, "--port", "0", "--name", "model"]
    command += ["--drafter", args.drafter, "--rows", str(args.concurrency)]
    if args.what in ("llama", "overhead"):  # prompts come again: each time they are to be read
        command += ["--prefixes", "0"]
    if args.what == "llama":
        command += ["--threads", str(args.threads)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            said = list[str]()
            for line in process.stderr or ():
                said.append(line)
                if found := re.search(r"(http://\S+)/v1,", line):
                    break
            else:
                raise RuntimeError("".join(said))
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # or its log would stop it
            yield found[1], psutil.Process(process.pid)
            process.terminate()
            process.wait()
        finally:
            process.kill()


async def loaded(client: httpx.AsyncClient, requests: Iterable[Asked], concurrency: int) -> None:
    """Send all, so many at once."""
    left = iter(requests)

    async def worker() -> None:
        for asked in left:
            await asked.send(client)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def rows_left(client: httpx.AsyncClient) -> float:
    """Tokens in rows of requests that run, and requests that run or wait, when the server has had time to see that
    clients have left."""
    for _ in range(100):
        wanted = ('draftree:kv_tokens{rows="running"}', "draftree:requests_running", "draftree:requests_waiting")
        if not (left := sum([await figure(client, name) for name in wanted])):
            break
        await asyncio.sleep(0.1)
    return left


async def texts(args: argparse.Namespace, url: str, process: psutil.Process) -> bool:
    """Print how many texts are those of the requests alone; whether all are, and nothing is left."""
    rng = Random(args.seed)  # noqa: S311 - kinds, not secrets
    requests = [made(i, rng, "model", args.tokens) for i in range(args.requests)]
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:  # noqa: S113 - a slow machine is no failure
        began = time.perf_counter()
        await loaded(client, requests, args.concurrency)
        seconds = time.perf_counter() - began
        left = await rows_left(client)
        alone = [asked.alone for asked in requests]
        await loaded(client, alone, 1)
    differ = [(asked, one) for asked, one in zip(requests, alone, strict=True) if not asked.fits(one.text)]
    whole = sum(bool(asked.reason) for asked in requests)
    print(f"{args.requests} requests, {args.concurrency} at once, in {seconds:.0f} s: {whole} ended, ", end="")
    print(f"{args.requests - whole} were left; {len(differ)} texts differ from the request alone; {left:.0f} rows left")
    print("ended by", dict(Counter(asked.reason or "leaving" for asked in requests)))
    for asked, one in differ:
        print(f"  {asked}\n  alone: {one.text!r}")
    return not differ and not left


@dataclass
class Memory:
    """A server's memory while it runs.

    Attributes:
        samples: seconds, MiB that are resident, and tokens in its cache.
    """

    process: psutil.Process
    began: float = field(default_factory=time.perf_counter)
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    async def sample(self, client: httpx.AsyncClient, every: float) -> None:
        """Sample every so many seconds, until it is cancelled."""
        while True:
            tokens = await figure(client, "draftree:kv_tokens{")
            self.samples.append((time.perf_counter() - self.began, self.process.memory_info().rss / 2**20, tokens))
            await asyncio.sleep(every)

    @property
    def slope(self) -> tuple[float, float]:
        """MiB a minute by which memory grows beside what tokens in the cache explain, and its standard error.

        Of the samples after a warm-up, a third of them and at least ``_WARM`` seconds, by least squares; 0 of fewer
        than four.
        """
        warm = [sample for sample in self.samples[len(self.samples) // 3 :] if sample[0] > _WARM]
        if len(warm) < 4:
            return 0.0, 0.0
        seconds, resident, tokens = np.array(warm).T
        known = np.stack([np.ones_like(seconds), seconds / 60, tokens], axis=1)
        found, *_ = np.linalg.lstsq(known, resident, rcond=None)
        variance = np.sum((resident - known @ found) ** 2) / (len(seconds) - 3)
        return float(found[1]), float(np.sqrt(variance * np.linalg.pinv(known.T @ known)[1, 1]))


async def soak(args: argparse.Namespace, url: str, process: psutil.Process) -> bool:
    """Print memory and times; whether all texts are those of the requests alone, nothing is left, and memory stays."""
    rng = Random(args.seed)  # noqa: S311
    kinds = [made(i, rng, "model", args.tokens) for i in range(args.requests)]
    sent, memory = list[Asked](), Memory(process)
    began, own = time.perf_counter(), time.process_time()

    def endless() -> Iterator[Asked]:
        while time.perf_counter() - began < 60 * args.minutes:
            sent.append(rng.choice(kinds).anew)
            yield sent[-1]

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:  # noqa: S113
        sampling = asyncio.create_task(memory.sample(client, 0.6 * args.minutes))
        await loaded(client, endless(), args.concurrency)
        sampling.cancel()
        seconds, own = time.perf_counter() - began, time.process_time() - own
        tokens = await figure(client, "draftree:generation_tokens_total")
        left, alone = await rows_left(client), [kind.alone for kind in kinds]
        await loaded(client, alone, 1)
    (growth, error), resident = memory.slope, [sample[1] for sample in memory.samples]
    texts = {json.dumps(kind.body): one.text for kind, one in zip(kinds, alone, strict=True)}
    differ = sum(not asked.fits(texts[json.dumps(asked.body)]) for asked in sent)
    whole = sum(bool(asked.reason) for asked in sent)
    streams = [asked for asked in sent if asked.times and not asked.slow]
    table = {
        "requests": f"{len(sent)}, {args.concurrency} at once, in {seconds:.0f} s",
        "ended, left by their clients": f"{whole}, {len(sent) - whole}",
        "read slowly": f"{sum(bool(asked.times and asked.slow) for asked in sent)}",
        "texts unlike the request alone": f"{differ}",
        "tokens and requests in rows that are left": f"{left:.0f}",
        "tokens a second": f"{tokens / seconds:.1f}",
        "first token, 50th and 99th percentile": _percentiles([asked.times[0] - asked.began for asked in streams]),
        "between events, 50th and 99th percentile": _percentiles(
            [after - before for asked in streams for before, after in pairwise(asked.times)]
        ),
        "MiB resident at each tenth": ", ".join(
            f"{m:.0f}" for m in [*resident[:: max(1, len(resident) // 10)], resident[-1]]
        ),
        "MiB a minute beside the cache": f"{growth:.1f}, standard error {error:.1f}",
        "CPU time of the clients, of a processor": f"{own / seconds:.2f}",
    }
    for name, found in table.items():
        print(f"{name:<42} {found}")
    return not differ and not left and growth < _LEAK + 2 * error


def _percentiles(seconds: Sequence[float]) -> str:
    half, most = np.quantile(seconds, (0.5, 0.99))
    return f"{1e3 * half:.0f} ms, {1e3 * most:.0f} ms"


async def figure(client: httpx.AsyncClient, name: str) -> float:
    """The sum of the metrics that begin so."""
    page = (await client.get("/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


async def overhead(args: argparse.Namespace, url: str, process: psutil.Process) -> bool:
    """Print what the server takes of the rate of the Python API; whether the texts are the same."""
    scheduling = SchedulerParams(rows=args.concurrency, prefixes=0)  # every way reads every prompt
    engine = Engine(load(args.target), SpeculationParams(drafter=args.drafter), scheduling=scheduling)
    groups, params = in_groups("spec-bench", args), SamplingParams(max_tokens=args.tokens)
    kinds = {args.drafter: (None, {}), "none": (SpeculationParams(drafter="none"), {"drafter": "none"})}
    ratios, seconds = defaultdict[str, list[float]](list), Counter[tuple[str, bool]]()
    tokens, loop_seconds, differ = Counter[str](), Counter[str](), 0
    with raw_client() as client:
        for number, group in enumerate([groups[0], *groups]):  # once to warm up
            for kind, (speculation, asked) in kinds.items():
                bodies = [[stream(question, args.tokens, asked).body] for question in group]
                taken, handles = dict[bool, float](), list[Handle]()
                for served in (False, True) if number % 2 else (True, False):
                    (process.resume if served else process.suspend)()  # an idle server may measure what passes cost
                    began, busy = time.perf_counter(), _loop_seconds(process)
                    if served:
                        answers = client.send(url, bodies, "/v1/chat/completions")
                        loop_seconds[kind] += (_loop_seconds(process) - busy) * bool(number)  # type: ignore[assignment]
                    else:
                        handles = [engine.submit(user(question), params, speculation) for question in group]
                        engine.wait(lambda handles=handles: all(one.done for one in handles))  # type: ignore[misc]
                    taken[served] = time.perf_counter() - began
                process.resume()
                texts = [handle.request.text for handle in handles]
                differ += sum(answer.text != text for (answer,), text in zip(answers, texts, strict=True))
                if number:
                    ratios[kind].append(taken[False] / taken[True])
                    tokens[kind] += sum(len(one.request.output_ids) for one in handles)
                    for served, duration in taken.items():
                        seconds[kind, served] += duration  # type: ignore[assignment]
    for kind, count in tokens.items():
        by_api, by_server = (count / seconds[kind, served] for served in (False, True))
        print(f"drafter {kind}: {by_api:.1f} tokens/s by the API, {by_server:.1f} by the server, ", end="")
        print(f"{by_server / by_api:.3f}; the event loop took {1e6 * loop_seconds[kind] / count:.0f} us of CPU a token")
        print("  rounds:", " ".join(f"{one:.2f}" for one in ratios[kind]))
    whole = sum(duration for (_, served), duration in seconds.items() if served)
    print(f"{args.concurrency} streams at once; the client took {client.busy / whole:.2f} of a processor; ", end="")
    print(f"{differ} texts differ")
    return not differ


def _loop_seconds(process: psutil.Process) -> float:
    """CPU seconds of the thread that runs a server's event loop: its first one."""
    return float(sum(t.user_time + t.system_time for t in process.threads() if t.id == process.pid))


def in_groups(suite: str, args: argparse.Namespace) -> list[list[str]]:
    """Questions of a suite, as many together as there are streams; those that fill no group are left out."""
    questions = (item.turns[0] for item in choose(load_suite(suite), limit=args.requests))
    return [*map(list, zip(*[questions] * args.concurrency, strict=False))]


def stream(question: str, tokens: int, speculation: dict[str, Any], usage: bool = False) -> Asked:
    """A greedy stream of a chat."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "model", "max_tokens": tokens, "temperature": 0, "messages": messages, "stream": True}
    return Asked(True, body | ({"stream_options": {"include_usage": True}} if usage else {}), speculation, None)


@contextmanager
def served_by_llama(args: argparse.Namespace) -> Iterator[str]:
    """The address of llama.cpp's server of the same file, as many rows and threads, in a process of its own."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    own = (str(gguf_path(args.target) or args.target), args.concurrency, args.threads, theirs)
    process = processes.Process(target=_serve_by_llama, args=own)
    process.start()
    theirs.close()
    yield ours.recv()
    ours.close()
    process.join()


def _serve_by_llama(path: str, rows: int, threads: int, pipe: Connection) -> None:
    """Serve until the other end is closed."""
    library: Any = importlib.import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.port, params.cache_prompt, params.cache_ram_mib = path, 0, False, 0
    params.n_parallel, params.n_ctx, params.verbosity = rows, 4096 * rows, 1  # errors
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = library.Server(params)  # it ends with its last name
    pipe.send(server.listening_address)
    with suppress(EOFError):
        pipe.recv()


async def llama(args: argparse.Namespace, url: str, process: psutil.Process) -> bool:
    """Print tokens a second and times to the first token of both servers."""
    groups = in_groups("mt-bench", args)
    with served_by_llama(args) as other:
        ways = {"llama.cpp": (other, {}), "AR": (url, {"drafter": "none"}), f"drafter {args.drafter}": (url, {})}
        found: dict[str, list[Asked]] = {way: [] for way in ways}
        seconds = Counter[str]()
        limits = httpx.Limits(max_keepalive_connections=0)  # llama.cpp's server closes connections that wait
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:  # noqa: S113
            for number, group in enumerate([groups[0], *groups]):  # once to warm up
                for way in (*list(ways)[number % 3 :], *list(ways)[: number % 3]):
                    address, speculation = ways[way]
                    streams = [stream(question, args.tokens, speculation, usage=True) for question in group]
                    if way == "llama.cpp":
                        process.suspend()  # an idle server may measure what passes cost
                    began = time.perf_counter()
                    await asyncio.gather(*(one.send(client, address) for one in streams))
                    process.resume()
                    if number:
                        seconds[way] += time.perf_counter() - began  # type: ignore[assignment]
                        found[way] += streams
    rates = {way: sum(one.tokens for one in streams) / seconds[way] for way, streams in found.items()}
    print(f"{len(groups)} times {args.concurrency} requests, {args.threads} threads, {args.tokens} tokens at most")
    for way, streams in found.items():
        first = _percentiles([one.times[0] - one.began for one in streams])
        figures = f"{rates[way]:6.1f} tokens/s, {rates[way] / rates['llama.cpp']:.2f} of llama.cpp"
        print(f"{way:<16} {figures}; first token after {first} (50th and 99th percentile)")
    return True


def main() -> None:
    """Load a server, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {f.__name__: f for f in (texts, soak, overhead, llama)}
    parser.add_argument("what", choices=what)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="auto")
    for count in ("requests", "concurrency", "tokens"):
        parser.add_argument(f"--{count}", type=int)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of passes, of llama; by default one a core")
    args = parser.parse_args()
    args.requests = args.requests or {"texts": 200, "soak": 200, "overhead": 20, "llama": 24}[args.what]
    args.concurrency = args.concurrency or {"texts": 8, "soak": 64, "overhead": 1, "llama": 8}[args.what]
    args.tokens = args.tokens or (64 if args.what in ("overhead", "llama") else 24)
    args.threads = args.threads or psutil.cpu_count(logical=False)
    with served(args) as (url, process):
        sys.exit(not asyncio.run(what[args.what](args, url, process)))


if __name__ == "__main__":
    main()
