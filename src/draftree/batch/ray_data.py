"""Batches on Ray Data: replicas on the machines of a cluster, each with an engine of its own, answer blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .answering import Answering
from .batch_files import BatchLine, Record

_BLOCKS = 4
"""Blocks for each replica: what they took longer than others for evens out, and records come in time."""
_LONGEST = 256
"""Lines of a block: its records come when all of them have ended, and are lost where the command ends before."""


class Replica:
    """What Ray builds on a machine and hands blocks to."""

    def __init__(self, make: Callable[[], Answering]) -> None:
        self._answering = make()

    def __call__(self, block: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Columns ``number`` and ``text`` of lines to a column ``record``, as JSON."""
        pairs = zip(block["number"], block["text"], strict=True)
        lines = [BatchLine(int(number), bytes(text)) for number, text in pairs]
        return {"record": [json.dumps(record) for record in self._answering.records(lines)]}


def answered_on_ray(
    lines: Sequence[BatchLine], make: Callable[[], Answering], *, replicas: int, accelerators: bool
) -> Iterator[Record]:
    """The record of each line, as blocks end; on the cluster of ``RAY_ADDRESS``, or else on this machine.

    Args:
        make: loads what answers, on the machine of a replica.
        replicas: engines; they share the processors of the cluster.
        accelerators: each replica has a GPU, where the cluster has any.
    """
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    there = ray.cluster_resources()
    gpus = 1 if accelerators and there.get("GPU") else 0
    cpus = max(1, int(there.get("CPU", 1)) // replicas)
    size = max(1, min(_LONGEST, -(-len(lines) // (_BLOCKS * replicas))))
    rows = [{"number": line.number, "text": line.text} for line in lines]
    data = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size))
    pool = ray.data.ActorPoolStrategy(size=replicas)
    made = data.map_batches(
        Replica, fn_constructor_args=(make,), batch_size=size, compute=pool, num_cpus=cpus, num_gpus=gpus
    )
    for row in made.iter_rows():
        yield json.loads(row["record"])
