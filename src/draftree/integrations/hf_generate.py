"""The engine as transformers' ``custom_generate`` callable: a drop-in for ``model.generate``.

    model.generate(**inputs, max_new_tokens=200, custom_generate=draftree.custom_generate())

``generate`` prepares processors (temperature and the like among them) and stopping criteria; this module gives them to
the engine, row by row without padding, and pads the results. transformers gives neither ``streamer`` nor ``tokenizer``
to such a callable: to stream, use ``draftree.Engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..config import Processor, SamplingParams
from ..drafters.registry import is_model
from ..engine.engine import Engine
from ..engine.speculation import SpeculationParams
from ..errors import ConfigError
from ..models.huggingface.hf_model import HFModel
from ..models.loading import load

_OF_ONE_TEXT = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that keep what they have seen of a text: each call of one adds a token to it."""


def generate_with(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    speculation: SpeculationParams | None = None,
    seed: int | None = None,
    **model_inputs: Any,
) -> Tensor:
    """What ``model.generate(..., custom_generate=draftree.generate_with)`` calls.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: from ``generate``.
        speculation: how it is drafted for and verified; a model's name as drafter loads it at every call, so better
            give a loaded one. The default one by default.
        seed: of sampled generation, plus the row's number; None draws a fresh one for each row. torch's global seed
            plays no part.
        model_inputs: from ``generate``: of these only ``attention_mask`` is read, to find the padding; the engine makes
            positions and cache itself. (A parameter named like a model input would be taken out of ``generate``'s.)

    Returns:
        [B, length] int64: ``input_ids`` and the generated tokens, padded on the right.

    Raises:
        ConfigError: beams or dictionary output are wanted, there are inputs beside ids, a processor keeps what it has
            seen of a text but there are several, or the verification does not fit the trees.
    """
    if (generation_config.num_beams or 1) > 1 or generation_config.return_dict_in_generate:
        raise ConfigError(
            "draftree's custom_generate knows no num_beams and no return_dict_in_generate: leave them out"
        )
    further_inputs = model_inputs.keys() - {"attention_mask", "position_ids", "cache_position"}
    if given := next((name for name in sorted(further_inputs) if isinstance(model_inputs[name], Tensor)), None):
        raise ConfigError(f"{given} are given: draftree's custom_generate reads input_ids alone: leave them out")
    keeping = next((type(p).__name__ for p in logits_processor if isinstance(p, _OF_ONE_TEXT)), None)
    if keeping and len(input_ids) > 1:
        raise ConfigError(f"{keeping} is for one text but the batch has {len(input_ids)}: give one prompt a call")
    mask = model_inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    attention, training = model.config._attn_implementation, model.training
    try:
        target = HFModel(model)
        engine = Engine(target, speculation or SpeculationParams())
        pairs = [*zip(input_ids, mask.bool(), strict=True)]
        prompts = [row[seen].tolist() for row, seen in pairs]
        end = generation_config.eos_token_id
        ends = frozenset(torch.as_tensor([] if end is None else end).reshape(-1).tolist())
        rows = [_PaddedRow(b, len(pairs), row[~seen], int(seen.sum()), ends) for b, (row, seen) in enumerate(pairs)]
        wanted, context = generation_config.max_length - input_ids.shape[1], target.capabilities.max_length
        params = [
            replace(
                row.params(logits_processor, stopping_criteria, generation_config, seed),
                max_tokens=max(1, min(wanted, context - len(prompt))),
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        outputs = [g.token_ids for g in engine.generate(prompts, params)]
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
    pad = generation_config.pad_token_id
    ids = [torch.tensor(o, dtype=torch.int64) for o in outputs]
    new = pad_sequence(ids, batch_first=True, padding_value=0 if pad is None else int(pad))
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def custom_generate(speculation: SpeculationParams | None = None, seed: int | None = None) -> Callable[..., Tensor]:
    """``generate_with`` with these choices made (its arguments of the same names); a draft model is loaded now.

    Raises:
        InputError: the draft model cannot be loaded.
    """
    speculation = speculation or SpeculationParams()
    if is_model(speculation.spec):
        speculation = replace(speculation, drafter=load(str(speculation.drafter)))
    return partial(generate_with, speculation=speculation, seed=seed)


def as_processor(processor: LogitsProcessor | LogitsProcessorList, device: torch.device | str = "cpu") -> Processor:
    """A logits processor of transformers as ``SamplingParams.processors`` takes them.

    One that keeps what it has seen of a text is right for one request, which has no beams.

    Args:
        device: of the tensors that it is given.
    """
    alone = _PaddedRow(0, 1, torch.empty(0, dtype=torch.int64, device=device))
    return partial(alone.process, processor)


@dataclass(frozen=True, slots=True)
class _PaddedRow:
    """A row's place in the batch that ``generate`` prepared its processors and criteria for.

    Some of them count the padding in, some hold one value for each row. So each is called with the row padded as it
    came and repeated over the batch; the row's own result counts. A function of prefixes is asked about the row alone.

    Attributes:
        row: its number.
        batch: rows.
        padding: [P] int64, the ids in front of its prompt.
        prompt: tokens of its prompt.
        ends: tokens that end its text; a draft may go on behind one, where ``generate`` asks no processor.
    """

    row: int
    batch: int
    padding: Tensor
    prompt: int = 0
    ends: frozenset[int] = frozenset()

    def params(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        seed: int | None,
    ) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if config.do_sample else 0.0,
            seed=None if seed is None else seed + self.row,
            ignore_eos=True,  # the criteria end it there, and at the length
            processors=tuple(map(self._processor, processors)),
            criteria=tuple(partial(self.stop, c) for c in criteria),
        )

    def _processor(self, processor: LogitsProcessor) -> Processor:
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed, alone = processor._prefix_allowed_tokens_fn, copy(processor)
            alone._prefix_allowed_tokens_fn = lambda _, text: allowed(self.row, text)
            return partial(replace(self, row=0, batch=1).process, alone)
        return partial(self.process, processor)

    def process(
        self, processor: LogitsProcessor | LogitsProcessorList, ids: NDArray[np.int64], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        if not self.ends.isdisjoint(ids[self.prompt :].tolist()):
            return logits
        rows = torch.from_numpy(logits).to(self.padding.device).repeat(self.batch, 1)
        processed: Tensor = processor(self._ids(ids), rows)  # type: ignore[arg-type]
        return processed[self.row].cpu().numpy()

    def stop(self, criterion: StoppingCriteria, ids: NDArray[np.int64]) -> bool:
        done: Any = criterion(self._ids(ids), None)
        return bool(torch.as_tensor(done).expand(self.batch)[self.row])

    def _ids(self, ids: NDArray[np.int64]) -> Tensor:
        text = torch.from_numpy(ids).to(self.padding.device)
        return torch.cat([self.padding, text]).expand(self.batch, -1)
