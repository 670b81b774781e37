"""Rival systems as contestants: transformers' own decoding; llama-cpp-python and flashspec where they are installed.

They run the checkpoint as transformers has it, on the same threads, with the same target and drafter.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SamplingParams
from ..errors import ConfigError, UnknownNameError
from ..text.tokenizer import Tokenizer
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
        package: what has to be installed; None: nothing beyond transformers.
    """

    summary: str
    drafts_by_model: bool = False
    has_beams: bool = False
    package: str | None = None


PEERS = {
    "hf-generate": Peer("transformers' generate, AR decoding"),
    "hf-prompt-lookup": Peer(f"transformers' generate with prompt lookup of {LOOKUP_TOKENS} tokens"),
    "hf-assisted": Peer("transformers' assisted generation with the draft model", drafts_by_model=True),
    "hf-beam-search": Peer("transformers' beam search, or beam sampling above temperature 0", has_beams=True),
    "llama-cpp": Peer("llama-cpp-python's Llama, AR decoding of a GGUF file", package="llama_cpp"),
    "llama-cpp-prompt-lookup": Peer(
        f"llama-cpp-python's Llama with its prompt lookup of {LOOKUP_TOKENS} tokens", package="llama_cpp"
    ),
    "flashspec": Peer("flashspec's engine with its n-gram drafter", package="flashspec"),
}


def find_peer(name: str) -> Peer:
    """A peer that can run.

    Raises:
        UnknownNameError: there is none of that name.
        ConfigError: it is not installed.
    """
    if name not in PEERS:
        raise UnknownNameError(f"no peer {name!r}: choose from {', '.join(f'peer:{p}' for p in PEERS)}")
    peer = PEERS[name]
    if peer.package and importlib.util.find_spec(peer.package) is None:
        package = peer.package.replace("llama_cpp", "llama-cpp-python")
        raise ConfigError(f"peer:{name} is not installed: pip install {package}, or leave it out")
    return peer


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


class LlamaCppPeer:
    """llama-cpp-python's ``Llama`` on the file, with as many threads as torch has."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None, *, context: int, lookup: bool) -> None:
        package: Any = importlib.import_module("llama_cpp")
        options: dict[str, Any] = {}
        if lookup:  # without logits_all it fails on prompts of more than one batch
            speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
            draft = speculative.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
            options = {"draft_model": draft, "logits_all": True}
        threads = {"n_threads": torch.get_num_threads(), "n_threads_batch": torch.get_num_threads()}
        self._llama = package.Llama(str(path), n_ctx=context, verbose=False, **threads, **options)
        self._is_end: Callable[[int], bool] = lambda token: package.llama_vocab_is_eog(self._vocab, token)
        self._vocab = package.llama_model_get_vocab(self._llama.model)
        self._tokenizer = tokenizer

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt; its passes are not known."""
        self._llama.reset()
        self._llama.set_seed(params.seed or 0)
        most = params.max_tokens or self._llama.n_ctx() - len(prompt)
        out, first = list[int](), 0.0
        began = time.perf_counter()
        tokens = self._llama.generate(prompt, temp=params.temperature, top_k=0, top_p=1.0, min_p=0.0)
        while len(out) < most and not (out and self._is_end(out[-1])):
            out.append(int(next(tokens)))
            first = first or time.perf_counter()
        parts = Parts(time.perf_counter() - began, prefill=first - began)
        return Turn(len(prompt), out, _text(self._tokenizer, out), None, parts, None)


class FlashspecPeer:
    """flashspec's engine with its n-gram drafter."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None, name: str) -> None:
        logging.getLogger("flashspec").setLevel(logging.ERROR)  # it warns at every start that one drafter is one
        self._flashspec: Any = importlib.import_module("flashspec")
        parts: Any = importlib.import_module("flashspec.engine")
        self._model, self._tokenizer = model, tokenizer
        self._target = parts.TargetModel(name, model.device, model.dtype, model=model)
        self._drafter = importlib.import_module("flashspec.engine.ngram").NgramDrafter()
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self._engines: dict[tuple[float, int | None], Any] = {}

    def decode(self, prompt: list[int], params: SamplingParams) -> Turn:
        """Answer one prompt; the times of its prefill and its passes are unknown."""
        engine = self._engine(params)
        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        result = engine.generate(ids, max_new_tokens=params.max_tokens, eos_token_ids=self._eos)
        out: list[int] = [t for t in result.output_ids[0].tolist() if t >= 0]
        seconds = time.perf_counter() - began
        return Turn(len(prompt), out, _text(self._tokenizer, out), None, Parts(seconds), None)

    def _engine(self, params: SamplingParams) -> Any:
        """Temperature and seed are fixed in an engine."""
        key = params.temperature, params.seed
        if key not in self._engines:
            fs = self._flashspec
            config = fs.FlashSpecConfig(
                device=str(self._model.device),
                sampling=fs.SamplingConfig(temperature=params.temperature, seed=params.seed),
                bandit=fs.BanditConfig(n_arms=1),
            )
            self._engines[key] = fs.SpeculativeEngine(config, [self._drafter], self._target)
        return self._engines[key]


def _text(tokenizer: Tokenizer | None, ids: list[int]) -> str:
    return "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=True))
