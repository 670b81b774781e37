"""What requests must fit: the model's context and vocabulary, and one another's number of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ..config import SamplingParams
from ..errors import ConfigError, ContextError
from ..models.base import LanguageModel, check_text
from ..text import Prompt


def each_params(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """The sampling params of each prompt of a batch.

    Raises:
        ConfigError: the prompts are no list, or there are not as many params.
    """
    if not isinstance(prompts, (list, tuple)) or any(isinstance(p, (int, Mapping)) for p in prompts):
        raise ConfigError("generate takes a list of prompts: put this one into a list, or use stream")
    if not isinstance(params, (list, tuple)):
        return [SamplingParams() if params is None else cast(SamplingParams, params)] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling params for {len(prompts)} prompts: give one for all, or one each")
    return list(params)


def fitted(target: LanguageModel, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """What is read of a prompt (``SamplingParams.truncate_prompt_tokens``), and most tokens to generate behind it.

    Raises:
        PromptError: the prompt is empty, or has other tokens than the model.
        ContextError: it does not fit the context, or ``max_tokens`` do not fit behind it.
        ConfigError: ``params`` are something else.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling params are {params!r}: give SamplingParams")
    can = target.capabilities
    if (last := params.truncate_prompt_tokens) is not None:
        ids = ids[-(max(1, can.max_length - (params.max_tokens or 1)) if last < 0 else last) :]
    left = can.max_length - len(ids)
    # Clients know such errors by these words, those of OpenAI's API.
    most = f"this model's maximum context length is {can.max_length} tokens ({can.name}, {can.max_length_reason})"
    if left < 1:
        raise ContextError(
            f"the prompt has {len(ids)} tokens but {most}, generated ones included: "
            f"shorten the prompt to {can.max_length - 1} or fewer"
        )
    check_text(can, ids)
    if params.max_tokens is not None and params.max_tokens > left:
        raise ContextError(
            f"max_tokens is {params.max_tokens} but {most} and the prompt has {len(ids)}: ask for at most {left}",
            "max_tokens",
        )
    return ids, params.max_tokens or left
