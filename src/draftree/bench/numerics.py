"""What do passes cost in each numerics, and what do cheaper ones change?

    python -m draftree.bench.numerics [--context 512] [--repeats 9] [--threads N]

Prints, for transformers' own layers and for each numerics, the median milliseconds of a pass over n tokens, passes of
all taking turns; their ratios; Python's share, which is what a pass behind 8 tokens takes (mean of n = 1 and 8) with as
many layers that are so narrow that arithmetic takes no time; passes of the head that ships for the target; and how far
next-token laws on a fixed text are from float32's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..models.base import LanguageModel, Nodes
from ..models.cpu.quantization import AUTO, DEFAULT_NUMERICS, DRAFTING, NUMERICS, STOCK, summary
from ..models.eagle_file import shipped_for, shipped_head
from ..models.eagle_model import HeadModel
from ..models.huggingface import HFModel
from ..models.load import DEFAULT_MODEL, load, load_stock
from ..text import encode
from ..tree import ROOT

SIZES = (1, 2, 4, 8, 16, 24, 32, 64)
TEXT = """\
The lighthouse stands on a rock a mile from the coast. Every evening at six the keeper climbs the two hundred stairs,
cleans the glass of the lamp with a soft cloth, fills the tank with oil, and lights the wick. When the lamp is burning,
she writes the hour and the weather in the log book. If there is fog, she starts the horn and counts one minute between
the blasts. Once a week a boat brings bread, letters and the newspaper.

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

A train leaves at 9:15 and arrives at 11:45. It travels 200 kilometres. How fast is it? The journey takes two and a
half hours, so that its mean speed is 200 / 2.5 = 80 kilometres per hour. Light takes eight minutes and twenty seconds
from the sun to the earth, which is about 150 million kilometres. Water boils at 100 degrees Celsius at sea level, and
at less on a mountain, where the air is thinner. The capital of Australia is Canberra; its largest city is Sydney.
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m draftree.bench.numerics", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = {STOCK: HFModel(*load_stock(args.target), name=args.target)}
    models |= {numerics: load(args.target, numerics=numerics) for numerics in NUMERICS if numerics != AUTO}
    models[DRAFTING] = models[DEFAULT_NUMERICS].in_numerics(DRAFTING)
    _print_times(models, args.context, args.repeats)
    _print_agreement(models)


def _print_times(models: dict[str, HFModel], context: int, repeats: int) -> None:
    narrow = {numerics: _narrow(model, numerics) for numerics, model in models.items()}
    every: dict[str, LanguageModel] = {**models, **_heads(models)}
    own, python = pass_seconds(every, context, SIZES, repeats), pass_seconds(narrow, 8, (1, 8), 3 * repeats)
    some = models[STOCK].capabilities
    print(
        f"{some.name}, context {context}, {torch.get_num_threads()} threads, median of {repeats}: milliseconds a pass"
    )
    print(f"{'tokens':11}{''.join(f'{n:7}' for n in SIZES)}   8 / 1  16 / 1  python  layers")
    for name, times in own.items():
        ratios = "".join(f"{times[n] / times[1]:8.2f}" for n in (8, 16))
        shown = "".join(f"{1e3 * times[n]:7.1f}" for n in SIZES)
        line = f"{name:11}{shown}{ratios}"
        if name in models:
            line += f"{1e3 * statistics.mean(python[name].values()):8.1f}  {summary(models[name].model)}"
        print(line, flush=True)


def _heads(models: dict[str, HFModel]) -> dict[str, HeadModel]:
    """The head that ships for the target, if there is one, in each of the numerics that it can have."""
    if shipped_for(models[STOCK]) is None:
        return {}
    heads = [shipped_head(models[numerics]) for numerics in (STOCK, DEFAULT_NUMERICS, "int8")]
    return {f"head {head.capabilities.numerics}": head for head in heads}


def pass_seconds(
    models: Mapping[str, LanguageModel], context: int, sizes: tuple[int, ...], repeats: int
) -> dict[str, dict[int, float]]:
    """Median seconds of passes behind a context, by model and tokens; all take turns, and the first round warms up."""
    rows = {name: m.open([i % m.capabilities.vocab_size for i in range(context)]) for name, m in models.items()}
    seen: dict[tuple[str, int], list[float]] = {(name, n): [] for name in models for n in sizes}
    for _ in range(repeats + 1):
        for n in sizes:
            for name, model in models.items():
                tokens = [(5 * i + 3) % model.capabilities.vocab_size for i in range(n)]
                nodes = Nodes(torch.tensor(tokens), torch.full((n,), ROOT))  # a head is asked about no chain at once
                began = time.perf_counter()
                model.extend([rows[name]], [nodes])
                seen[name, n].append(time.perf_counter() - began)
                model.commit(rows[name], [])
    for name, model in models.items():
        model.close(rows[name])
    return {name: {n: statistics.median(seen[name, n][1:]) for n in sizes} for name in models}


def _narrow(model: HFModel, numerics: str) -> HFModel:
    """As many layers of the same kind, so narrow that only what is around the arithmetic takes time."""
    config = deepcopy(model.model.config)
    heads = config.num_attention_heads
    config.update({"head_dim": 2, "hidden_size": 2 * heads, "intermediate_size": 16, "vocab_size": 64})
    config._attn_implementation = "sdpa"
    narrow: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return HFModel(narrow, name="narrow", numerics=None if numerics == STOCK else numerics, self_test=False)


@torch.inference_mode()
def _print_agreement(models: dict[str, HFModel]) -> None:
    print(f"\n{'':8}same next token  KL from {STOCK}, nats  perplexity of the text")
    laws = {numerics: _laws(model) for numerics, model in models.items()}
    reference, _ = laws[STOCK]
    for numerics, (law, ids) in laws.items():
        same = float((law.argmax(-1) == reference.argmax(-1)).double().mean())
        divergence = float((reference.exp() * (reference - law)).sum(-1).mean())
        perplexity = float((-law[:-1].gather(1, ids[1:, None])).mean().exp())
        print(f"{numerics:8}{same:15.1%}{divergence:21.5f}{perplexity:24.2f}")


def _laws(model: HFModel) -> tuple[Tensor, Tensor]:
    """[n, V] log-probs of the token after each of a fixed text, and its [n] ids."""
    ids = torch.tensor(encode(model.tokenizer, TEXT))
    row = model.open(ids[:1].tolist())
    logits = model.extend([row], [Nodes.chain(ids[1:].tolist())])[0]
    law = torch.cat([row.logits[None], logits]).double().log_softmax(-1)
    model.close(row)
    return law, ids


if __name__ == "__main__":
    main()
