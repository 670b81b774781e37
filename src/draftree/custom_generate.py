"""The engine as transformers' ``custom_generate`` callable: a drop-in for ``model.generate``.

    model.generate(**inputs, max_new_tokens=200, custom_generate=draftree.custom_generate(drafter="lookup"))

``generate`` prepares processors (temperature and the like among them) and stopping criteria; this module gives them to
the engine, row by row without its padding, and pads the answers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .config import Criterion, Processor, SamplingParams
from .draft.grow import GrowthPolicy
from .draft.load import load_drafter
from .draft.methods import DEFAULT_METHOD, DEFAULT_NODES, find_policy
from .engine import Engine
from .errors import ConfigError
from .models.hf import HFModel


def generate_with(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    attention_mask: Tensor | None = None,
    drafter: str = "lookup",
    method: str | GrowthPolicy = DEFAULT_METHOD,
    settings: Mapping[str, float | str] | None = None,
    nodes: int = DEFAULT_NODES,
    seed: int | None = None,
    **unused: Any,
) -> Tensor:
    """What ``model.generate(..., custom_generate=draftree.generate_with)`` calls.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, attention_mask: from ``generate``.
        drafter, method, settings, nodes: as in ``load_engine``.
        seed: of sampled generation; None draws a fresh one for each sequence.
        unused: model inputs that the engine makes itself (positions, cache).

    Returns:
        [B, length] int64: ``input_ids`` and the generated tokens, padded on the right.

    Raises:
        ConfigError: beams or dictionary output were asked for.
    """
    for what, value, plain in (
        ("num_beams", generation_config.num_beams or 1, 1),
        ("return_dict_in_generate", bool(generation_config.return_dict_in_generate), False),
    ):
        if value != plain:
            raise ConfigError(f"{what} is {value}: draftree's custom_generate supports {plain} only")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    attention = model.config._attn_implementation
    try:
        target = HFModel(model)
        engine = Engine(target, load_drafter(drafter, target, find_policy(method, settings)), nodes=nodes)
        prompts = [row[seen.bool()].tolist() for row, seen in zip(input_ids, mask, strict=True)]
        params = [
            _params(row[~seen.bool()], prompt, logits_processor, stopping_criteria, generation_config, seed)
            for row, seen, prompt in zip(input_ids, mask, prompts, strict=True)
        ]
        outputs = [g.token_ids for g in engine.generate(prompts, params)]
    finally:
        model.set_attn_implementation(attention)
    pad = generation_config.pad_token_id
    if isinstance(pad, Tensor):
        pad = int(pad)
    width = max(len(o) for o in outputs)
    new = torch.tensor([o + [pad if pad is not None else 0] * (width - len(o)) for o in outputs])
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def custom_generate(
    *,
    drafter: str = "lookup",
    method: str | GrowthPolicy = DEFAULT_METHOD,
    settings: Mapping[str, float | str] | None = None,
    nodes: int = DEFAULT_NODES,
    seed: int | None = None,
) -> Callable[..., Tensor]:
    """``generate_with`` with these choices made (its arguments of the same names)."""
    return partial(generate_with, drafter=drafter, method=method, settings=settings, nodes=nodes, seed=seed)


def _params(
    padding: Tensor,
    prompt: list[int],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    seed: int | None,
) -> SamplingParams:
    """One row's settings. Processors and criteria count the padding in, as they do in ``generate``."""

    def process(processor: Processor) -> Processor:
        return lambda ids, logits: processor(torch.cat([padding[None].to(ids.device), ids], dim=1), logits)

    def stop(criterion: Criterion) -> Criterion:
        return lambda ids, scores: criterion(torch.cat([padding[None].to(ids.device), ids], dim=1), scores)

    return SamplingParams(
        max_tokens=config.max_length - len(padding) - len(prompt),
        temperature=1.0 if config.do_sample else 0.0,
        seed=seed,
        ignore_eos=True,  # the criteria know
        processors=tuple(process(p) for p in processors),
        criteria=tuple(stop(c) for c in criteria),
    )
