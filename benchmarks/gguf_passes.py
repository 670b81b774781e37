"""What types of keys and values, and repacked weights, do to passes of llama.cpp.

    python -m benchmarks.gguf_passes [--target FILE] [--contexts 100,900] [--sizes 1,2,4,8,16,32]

For each variant: milliseconds of passes over so many tokens (25% quantiles of 7), seconds of reading the text before
them, how many of 64 tokens have one-token decoding's logits to the last bit when they are read in a pass, and the KL
divergence of these logits from the first variant's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.errors import RunError
from draftree.models.llama.context import Context, Tokens, Weights
from draftree.models.llama.library import BF16, F16, Q8_0, open_library
from draftree.models.loading import DEFAULT_MODEL, gguf_path

VARIANTS = {
    "keys F16, values F16": (F16, F16, True),
    "keys Q8_0, values F16": (Q8_0, F16, True),
    "keys F16, values BF16": (F16, BF16, True),
    "keys Q8_0, values F16, not repacked": (Q8_0, F16, False),
}
TOKENS = 64


def read(context: Context, ids: Sequence[int], start: int, sequence: int, last: bool = False) -> Tensor:
    """[w, V] logits of a chain from a position on."""
    wanted = [not last] * (len(ids) - 1) + [True]
    found = context.decode(Tokens(list(ids), list(range(start, start + len(ids))), [[sequence]] * len(ids), wanted))
    if found is None:
        raise RunError(f"a context of {context.cells} tokens is too small for {start + len(ids)}: use shorter contexts")
    return torch.from_numpy(found[0])


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--contexts", default="100,900")
    parser.add_argument("--sizes", default="1,2,4,8,16,32")
    args = parser.parse_args()
    path, sizes = gguf_path(args.target), [int(n) for n in args.sizes.split(",")]
    if path is None:
        parser.error(f"--target {args.target} is no GGUF file")
    library, text = open_library(), [(7919 * i + 1000) % 20000 for i in range(4096)]
    defaults, first = library.model_default_params, dict[int, Tensor]()
    for name, (keys, values, repacked) in VARIANTS.items():
        params = defaults()
        params.use_extra_bufts = repacked
        setattr(library, "model_default_params", lambda params=params: params)  # noqa: B010 - it has no such attribute
        weights = Weights(library, path)
        weights.types = keys, values
        for length in map(int, args.contexts.split(",")):
            context = Context(weights, 2048, torch.get_num_threads(), hidden=False)
            reading = timed(lambda: read(context, text[:length], 0, 0, last=True))  # noqa: B023
            context.copy(0, 1, 0, length)
            then = text[length : length + TOKENS]
            alone = torch.cat([read(context, [token], length + i, 0) for i, token in enumerate(then)])
            equal = sum(map(torch.equal, read(context, then, length, 1), alone))
            context.drop(0, length)
            context.drop(1, 0)
            times: dict[int, list[float]] = {size: [] for size in sizes}
            for _ in range(7):
                for size, found in times.items():
                    found.append(timed(lambda: read(context, then[:size], length, 0)))  # noqa: B023
                    context.drop(0, length)
            ours, theirs = alone.log_softmax(-1), first.setdefault(length, alone).log_softmax(-1)
            kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
            passes = ", ".join(f"{size}: {1e3 * float(np.quantile(found, 0.25)):.1f}" for size, found in times.items())
            print(
                f"{name}, behind {length}: read in {reading:.2f} s; ms {passes}; {equal} of {TOKENS} equal; KL {kl:.4f}"
            )


if __name__ == "__main__":
    main()
