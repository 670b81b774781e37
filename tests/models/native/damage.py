"""Load damaged copies of GGUF files, one after the other: run by ``test_damage`` over a sanitized library.

python -m tests.models.native.damage FIRST LAST LIBRARY FILE...
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np

from draftree.errors import CacheError, InputError
from draftree.models.gguf.gguf_checks import check
from draftree.models.gguf.gguf_file import read
from draftree.models.native import binding
from draftree.models.native.architecture import describe

EXTREMES = (0, 1, 2, 31, 33, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)

KEYS = np.array([3, 2**63], np.uint64)
WARPINGS = [np.array([kind] * 2, binding.WARPING) for kind in ((0.8, 0, 1, 0), (1, 270, 1, 0), (2, 0, 0.9, 0.01))]


def damaged(data: bytes, header: int, random: np.random.Generator) -> bytes:
    """A copy with one kind of damage: bits, numbers, a piece that is lost or doubled, an early end, weights."""
    found = bytearray(data)
    kind = random.integers(8)
    at = int(random.integers(4, header))
    if kind == 0:
        for place in random.integers(4, header, random.integers(1, 4)):
            found[place] ^= 1 << random.integers(8)
    elif kind == 1:
        found[at : at + 4] = (EXTREMES[random.integers(len(EXTREMES))] & 0xFFFFFFFF).to_bytes(4, "little")
    elif kind == 2:
        found[at : at + 8] = EXTREMES[random.integers(len(EXTREMES))].to_bytes(8, "little")
    elif kind == 3:
        del found[at : at + int(random.integers(1, 64))]
    elif kind == 4:
        found[at:at] = found[at : at + int(random.integers(1, 64))]
    elif kind == 5:
        del found[int(random.integers(8, len(found))) :]
    else:  # weights: of half of the copies some are infinite or NaN, of the others numbers of any kind
        kept = 0xFF if kind == 6 else 0xF7  # one bit of exponents in float16 and float32
        for place in random.integers(header, len(data), 1000):
            found[place] = (0, 127, 255, int(random.integers(256)))[random.integers(4)] & kept
    return bytes(found)


def without_token_0(vocabulary: int) -> binding.CEdits:
    """A mask for two slots."""
    mask = np.full((vocabulary + 31) // 32, 2**32 - 1, np.uint32)
    mask[0] ^= np.uint32(1)
    edits = binding.CEdits()
    edits.set("mask_of", np.zeros(2, np.int32))
    edits.set("masks", mask)
    return edits


def main(path: Path, first: int, last: int) -> Counter[str]:
    """What became of the copies."""
    data = path.read_bytes()
    header = min(tensor.begin for tensor in check(path).tensors)
    outcomes: Counter[str] = Counter()
    tiers = binding.tiers()
    for seed in range(first, last):
        path.write_bytes(damaged(data, header, np.random.default_rng(seed)))
        try:
            header_of = (check, read)[seed % 2]  # weights that are no numbers reach C too
            model = binding.LoadedModel(describe(header_of(path)), 3, tiers[seed % len(tiers)])
            row = model.open()
            model.extend([row], [2], [0, 0], [-1, 0], np.ones(2, np.uint8))
            for _ in range(3):
                model.top([0, 1], 1, without_token_0(model.vocabulary))
            for given in WARPINGS:
                model.draw([0, 1], KEYS, given)
                model.top([0, 1], min(40, model.vocabulary), None, given, KEYS)
            model.commit(row, [0, 1])
            outcomes["ran"] += 1
        except (InputError, CacheError) as error:
            outcomes[type(error).__name__] += 1
    return outcomes


if __name__ == "__main__":
    binding.LIBRARY = Path(sys.argv[3])
    found = [main(Path(path), int(sys.argv[1]), int(sys.argv[2])) for path in sys.argv[4:]]
    sys.stdout.write(f"{dict(sum(found, Counter()))}\n")
