"""Does a server under load give each request the text that it has alone, keep nothing of it, and cost little?

    python -m benchmarks.server_load texts [--requests 200] [--concurrency 8]
    python -m benchmarks.server_load soak [--minutes 10] [--concurrency 64] [--requests 200]

Both start ``draftree serve`` (``--target``, ``--drafter``), send requests and print what they found. The exit code is 1
where a text differs, a row is left or a request fails. ``texts``: methods, drafters, seeds, grammars, stops, penalties,
predictions, priorities, several answers, whole answers and streams, of which a tenth is left in between and a tenth is
read slowly; then each request once more alone and without drafts. A stream that was left has to be the beginning of its
text. ``soak``: the same requests again and again for some minutes, in random order; the server's resident memory,
tokens a second, and the time to a stream's first token and between two of its events; the exit code is 1 too where
memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import httpx2 as httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from draftree.models.model_files import DEFAULT_MODEL

from .commands import command_parser, one_line_errors
from .load_requests import Asked, made

_WARM = 120.0
_LEAK = 2.0
"""MiB a minute: what a server of months may not grow by, and minutes of a soak can tell."""


@contextmanager
def served(target: str, drafter: str, rows: int, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address, and its process."""
    command = [sys.executable, "-m", "draftree", "serve", target, "--port", "0", "--name", "model"]
    command += ["--drafter", drafter, "--rows", str(rows), *options]
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


@one_line_errors()
def main() -> None:
    """Load a server, and print."""
    parser = command_parser("benchmarks.server_load", __doc__)
    what = {f.__name__: f for f in (texts, soak)}
    parser.add_argument("what", choices=what)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.concurrency = args.concurrency or {"texts": 8, "soak": 64}[args.what]
    with served(args.target, args.drafter, args.concurrency) as (url, process):
        sys.exit(not asyncio.run(what[args.what](args, url, process)))


if __name__ == "__main__":
    main()
