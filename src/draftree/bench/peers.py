"""transformers' own decoding as contestants: on the same threads, with the same target and drafter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SamplingParams
from ..errors import UnknownNameError
from ..text.encoding import Tokenizer
from .results import Parts, Turn

LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes (the value of its documentation's example)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rival.

    Attributes:
        summary: what it does.
        drafts_by_model: it needs a draft model.
        has_beams: it takes the settings of beams.
    """

    summary: str
    drafts_by_model: bool = False
    has_beams: bool = False


PEERS = {
    "hf-generate": Peer("transformers' generate, AR decoding"),
    "hf-prompt-lookup": Peer(f"transformers' generate with prompt lookup of {LOOKUP_TOKENS} tokens"),
    "hf-assisted": Peer("transformers' assisted generation with the draft model", drafts_by_model=True),
    "hf-beam-search": Peer("transformers' beam search, or beam sampling above temperature 0", has_beams=True),
}


def find_peer(name: str) -> Peer:
    """The peer of this name.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if name not in PEERS:
        raise UnknownNameError(f"no peer {name!r}: choose from {', '.join(f'peer:{p}' for p in PEERS)}")
    return PEERS[name]


def bare(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a generation config that says how text ends and nothing else.

    A checkpoint's own may penalise repetition or truncate the distribution, and ``generate`` falls back on it.
    """
    given = model.generation_config
    if given is not None:
        model.generation_config = GenerationConfig(
            bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id
        )
    return model


class _FirstTokens(BaseStreamer):
    """Notes when the first tokens come, and how many; the first call gives the prompt."""

    def __init__(self) -> None:
        self.calls, self.at, self.count = 0, 0.0, 1

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at, self.count = time.perf_counter(), value.numel()

    def end(self) -> None: ...


class TransformersPeer:
    """transformers' ``generate`` with these options; with beams the time of the first token is unknown."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, **options: Any) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._generate: Callable[..., Tensor] = cast(Any, model).generate

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt; passes of the target are counted, the prefill's too."""
        ids = torch.tensor([prompt], device=self._model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if params.temperature:
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        first, passes = _FirstTokens(), 0
        streaming = {} if "num_beams" in self._options else {"streamer": first}

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        handle = self._model.register_forward_hook(count)
        with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            torch.manual_seed(params.seed or 0)
            began = time.perf_counter()
            made = self._generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                **streaming,
                **sampling,
                **self._options,
            )
            out = made[0, len(prompt) :].tolist()
            ended = time.perf_counter()
        handle.remove()
        parts = Parts(ended - began, prefill=first.at - began if first.calls > 1 else None)
        return Turn(len(prompt), out, _text(self._tokenizer, out), None, parts, passes, first=first.count)


def _text(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=True))
