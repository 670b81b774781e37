"""Will the beams of a batch fit into memory? Predicted before anything is decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import ConfigError
from ..models.base import ForestModel
from .request import BeamRequest


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that nobody uses; None: the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):  # not a Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def check_room(target: ForestModel, requests: Sequence[BeamRequest]) -> None:
    """Make sure that a cache for these requests fits, should their beams share nothing but the prompt.

    Raises:
        ConfigError: it does not.
    """
    slot = getattr(target, "slot_bytes", None)
    free = free_bytes(target.capabilities.device)
    if slot is None or free is None or not requests:
        return
    beams, most = requests[0].beams, max(requests, key=lambda r: len(r.ids) + r.beams.width * r.limit)
    width = 1 if beams.single_cache else beams.width
    tokens = len(most.ids) + width * most.limit + beams.nodes
    need = len(requests) * tokens * slot
    if need > free:
        raise ConfigError(
            f"{width} beams of up to {most.limit} tokens after a prompt of {len(most.ids)} may take {need} bytes of "
            f"cache ({len(requests)} x {tokens} tokens of {slot} bytes) and {free} are free: use fewer beams or a "
            "lower max_tokens"
        )
