"""What tests of beams share: tiny targets and drafters, and what transformers finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from draftree.drafters.draft_model import ModelSource
from draftree.models.huggingface.hf_model import HFModel

from ..pairs import relative
from ..tiny import VOCAB, tiny

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]


def source(name: str, target: HFModel, kind: str = "llama") -> ModelSource | None:
    """Drafts beams: "none", "self", "relative" or "stranger"."""
    if name == "none":
        return None
    if name == "self":
        return ModelSource(target.twin(), VOCAB)
    weights = relative(kind) if name == "relative" else tiny(kind, seed=5)
    return ModelSource(HFModel(weights, self_test=False), VOCAB)


class Found(NamedTuple):
    """A sequence of transformers' beam search and its score."""

    ids: list[int]
    score: float


def searched(model: HFModel, prompt: Sequence[int], **options: object) -> list[Found]:
    """What transformers' beam search adds to ``prompt``, best first, without padding."""
    ids = torch.tensor([list(prompt)])
    generate = cast(Any, model.model).generate
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=VOCAB + 7,  # no token of its own: what is cut off below was not generated
        **options,
    )
    rows = [[t for t in row if t not in (-1, VOCAB + 7)] for row in out.sequences[:, len(prompt) :].tolist()]
    return [Found(row, score) for row, score in zip(rows, out.sequences_scores.tolist(), strict=True)]
