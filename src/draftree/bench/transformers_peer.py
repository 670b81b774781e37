"""transformers' own decoding as a contestant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SamplingParams
from ..drafters.provenance import short_name
from ..drafters.spec import NONE
from ..models.huggingface.hf_loading import load_stock
from ..models.huggingface.inspection import fingerprint
from ..policies.base import Provenance
from ..text.encoding import Tokenizer
from .results import Parts, Turn


def load_peer(name: str, *, dtype: str | None, device: str | None) -> tuple[PreTrainedModel, Tokenizer | None]:
    """A checkpoint by transformers, whose generation config says how text ends and nothing else.

    Its own may penalise repetition or truncate the distribution, and ``generate`` falls back on it.
    """
    model, tokenizer = load_stock(name, dtype=dtype, device=device)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{end: getattr(model.generation_config, end) for end in ends})
    return model, tokenizer


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Meanwhile torch computes on so many threads; it has one number for all models."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _identity(model: PreTrainedModel | None) -> tuple[str, str]:
    """Name and fingerprint."""
    return (NONE, "") if model is None else (short_name(str(model.name_or_path)), fingerprint(model.parameters()))


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
    """transformers' ``generate`` with these options; with beams the time of the first token is unknown.

    Args:
        threads: that share a pass on a CPU; None: torch's own number of them.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer | None, *, threads: int | None, **options: Any
    ) -> None:
        self._model, self._tokenizer, self._threads, self._options = model, tokenizer, threads, options
        self._generate: Callable[..., Tensor] = cast(Any, model).generate

    @property
    def made_of(self) -> Provenance:
        """As of a ``Contestant``."""
        target, drafter = map(_identity, (self._model, self._options.get("assistant_model")))
        return Provenance(target[0], drafter[0], target[1], drafter[1])

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt; passes of the target are counted, the prefill's too."""
        return self.decode_together([prompt], params)[0]

    def decode_together(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Turn]:
        """Answer prompts in one batch, the shorter ones filled up on the left; seconds are those of the batch."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling: dict[str, Any] = {"do_sample": params.temperature > 0}
        if params.temperature:
            sampling |= {name: getattr(params, name) for name in ("temperature", "top_k", "top_p")}
        first, passes, beams = _FirstTokens(), 0, "num_beams" in self._options
        streaming = {} if beams else {"streamer": first}

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        handle = self._model.register_forward_hook(count)
        with (
            torch_threads(self._threads or torch.get_num_threads()),
            torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []),
        ):
            torch.manual_seed(params.seed or 0)
            began = time.perf_counter()
            output = self._generate(
                ids,
                attention_mask=mask.to(ids.device),
                max_new_tokens=params.max_tokens,
                **streaming,
                **sampling,
                **self._options,
            )
            made = output[:, longest:].tolist()
            ended = time.perf_counter()
        handle.remove()
        parts = Parts(ended - began, prefill=first.at - began if first.calls > 1 else None)
        answers = [self._ended(answer) for answer in made]
        counts: dict[str, Any] = {"layers": passes} if beams else {"first": first.count // len(prompts)}
        return [
            Turn(len(prompt), answer, self._text(answer), None, parts, passes, **counts)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _ended(self, ids: list[int]) -> list[int]:
        """An answer up to the token that ends it: in a batch others go on."""
        ends = self._model.generation_config.eos_token_id
        known = set(ends if isinstance(ends, list) else [ends])
        return ids[: next((i + 1 for i, token in enumerate(ids) if token in known), len(ids))]

    def _text(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(ids, skip_special_tokens=True))
