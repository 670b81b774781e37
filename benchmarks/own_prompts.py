"""What prompts of one's own kind are worth to a draft head, beside as many general ones.

    python -m benchmarks.own_prompts OUT --target MODEL [--prompts 300] [--held-out 32] [--steps 250]

A head is trained on each kind of prompt alone: sums (GSM8K's training part), Python functions (MBPP's), texts as JSON
of one shape (paragraphs of Dolly), and the general ones that come with draftree. Printed is the acceptance length of
each head's chains on the responses to other prompts of each kind. All heads have equally many responses and steps, and
are asked for the same tokens. OUT keeps the responses: the same command goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track

from draftree.bench.suites import data_folder
from draftree.bench.summary import markdown
from draftree.models.base import FINAL_STATE
from draftree.models.heads.own_heads import HeadRecord
from draftree.models.loading import load
from draftree.models.protocols import FeatureModel, feature_model
from draftree.train.eagle_fit import Fit, FitRecipe, Frozen, evaluate, fast_in_bf16
from draftree.train.eagle_training import draft_vocabulary
from draftree.train.head_architectures import ARCHITECTURES
from draftree.train.head_data import HeadData
from draftree.train.responses import PROMPTS, DataRecipe, Response, digest, encoded, read_prompts, shuffled

from .coder_prompts import MBPP_TRAINS, read
from .commands import command_parser, one_line_errors

_JSON = 'Give this text as JSON with the keys "title", "people", "places", "years" and "summary", and nothing else:\n\n'
_LONGEST_TEXT = 900
"""Characters."""
_MAX_TOKENS = 160
VOCABULARY = 8192


def _texts() -> Iterator[str]:
    """Prompts for JSON of one shape."""
    for row in read(data_folder() / "dolly15k" / "databricks-dolly-15k.jsonl"):
        if 200 <= len(row["context"]) <= _LONGEST_TEXT:
            yield _JSON + row["context"]


def kinds(count: int) -> dict[str, list[str]]:
    """So many prompts of each kind."""
    data = data_folder()
    tasks = (task for task in read(data / "mbpp" / "mbpp.jsonl") if task["task_id"] in MBPP_TRAINS)
    every = {
        "sums": (row["question"] for row in read(data / "gsm8k" / "train.jsonl")),
        "functions": (f"{task['text']} Your code should pass this test:\n\n{task['test_list'][0]}" for task in tasks),
        "JSON": _texts(),
        "general": iter(shuffled([read_prompts(str(PROMPTS))[0]], 0)),
    }
    return {kind: list(islice(prompts, count)) for kind, prompts in every.items()}


def responses(target: FeatureModel, prompts: list[str], folder: Path, held_out: int) -> list[list[Response]]:
    """Responses to learn from, and to the first prompts, which are kept apart."""
    ids, can = encoded(target, prompts, raw=False), target.capabilities
    name = can.fingerprint or can.name
    recipe = DataRecipe(target=name, prompts=digest(ids), max_tokens=_MAX_TOKENS, seed=0, dtype=can.dtype)
    data = HeadData(folder, recipe, ids, target.tracked)
    data.collect(target, tokens=10**9, seconds=1e9, rows=32, progress=lambda _: None, held_out=held_out)
    return [[r for r in part if r.gained > 1] for part in data.split(held_out)]


@one_line_errors(resumable=True)
def main() -> None:
    parser = command_parser("benchmarks.own_prompts", __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--steps", type=int, default=250)
    given = parser.parse_args()
    target, architecture = feature_model(load(given.target)), ARCHITECTURES["eagle"]
    target.track_features(architecture.features(target) | FINAL_STATE)
    found = {
        kind: responses(target, prompts, given.out / kind, given.held_out)
        for kind, prompts in kinds(given.prompts + given.held_out).items()
    }
    size = target.capabilities.vocab_size
    vocabulary = draft_vocabulary([r for learned, _ in found.values() for r in learned], size, VOCABULARY)
    weight, bias = target.output_rows(vocabulary)
    embeddings = target.embeddings(torch.arange(size)).float()
    frozen = Frozen(embeddings, vocabulary, weight.float(), None if bias is None else bias.float())
    recipe = FitRecipe(bf16=fast_in_bf16(target))
    rows = list[list[str]]()
    for kind, (learned, _) in found.items():
        network = architecture.begin(target, frozen, vocabulary, learned, 0, target.layer_sizes.feed_forward // 2)
        fit = Fit(recipe, network, frozen, learned, given.steps, "")
        for _ in track(fit.run(), f"training on {kind}", given.steps):
            pass
        rates = (evaluate(network, frozen, apart, recipe.batch) for _, apart in found.values())
        mal = [f"{HeadRecord(given.steps, given.held_out, rate).mal:.2f}" for rate in rates]
        rows.append([kind, str(sum(r.gained for r in learned)), *mal])
        print(json.dumps({"kind": kind, "responses": len(learned), "recipe": asdict(recipe), "mal": mal}), flush=True)
    print(markdown(["learned from", "tokens", *found], rows))


if __name__ == "__main__":
    main()
