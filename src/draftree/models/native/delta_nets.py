"""Gated delta nets, the recurrent layers of a GGUF file: which they are, and their numbers."""

from __future__ import annotations

from gguf.constants import Keys

from ..gguf.metadata import damaged
from .header_reader import HeaderReader, unsupported

TAPS = 4
"""Tokens of their convolutions, as C knows them alone."""
RECORDED_END = 64
"""Nodes at the end of a long chain that keep records, as C has it."""
_LARGEST_HEAD = 256


def is_recurrent(file: HeaderReader, layer: int) -> bool:
    return file.has(f"blk.{layer}.ssm_a")


def delta_net(file: HeaderReader, layers: int) -> dict[str, int]:
    """The numbers of a model's gated delta nets, none where it has no such layers; C checks the others."""
    if not any(is_recurrent(file, layer) for layer in range(layers)):
        return {}
    if (taps := file.number(Keys.SSM.CONV_KERNEL)) != TAPS:
        raise unsupported(file.header, f"convolutions of {taps} tokens")
    key_heads, value_heads = file.number(Keys.SSM.GROUP_COUNT), file.number(Keys.SSM.TIME_STEP_RANK)
    values, key_size = file.number(Keys.SSM.INNER_SIZE), file.number(Keys.SSM.STATE_SIZE)
    if values % value_heads or value_heads % key_heads:
        raise damaged(file.header.path, f"it has {key_heads} and {value_heads} recurrent heads for {values} numbers")
    for size in (key_size, values // value_heads):
        if size % 16 or size > _LARGEST_HEAD:
            raise unsupported(file.header, f"recurrent heads of {size} dimensions")
    return {
        "delta_key_heads": key_heads,
        "delta_value_heads": value_heads,
        "delta_key_size": key_size,
        "delta_value_size": values // value_heads,
    }
