"""The loop: draft a tree, verify it in one target pass, commit the accepted path, stream.

    prefill -> [ propose -> extend -> verify -> commit -> append ] *

Joins drafting and verification, which know nothing of each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .config import Budget, SamplingParams, typed
from .drafters.base import Drafter, NoDrafter
from .errors import ConfigError, PromptError, RunError
from .models.base import LanguageModel, Nodes, Row, prefill
from .policies.base import node_budget
from .request import Chunk, Outcome, Request, Stats, StepClock
from .sampling import Draws, Successors, successors
from .text import Prompt, Tokenizer, encode, text_stream
from .tracing.trace import Observer, Setup
from .tree import DraftTree
from .verify.match import Verdict
from .verify.schemes import DEFAULT_SCHEME, Scheme, find_scheme

_RESERVED = 256
"""Most slots that are reserved for the drafted nodes of a request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request.

    Attributes:
        text: generated text, without the stop string that ended it.
        token_ids: generated tokens, the end-of-request token included.
        finish_reason: "eos", "stop", "length" or "criteria".
        seed: reproduces it.
        lossy: the verification was a lossy one: the tokens do not follow the target distribution.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    chunks: list[Chunk]
    stats: Stats
    lossy: bool = False


class Engine:
    """Decodes requests with draft trees; the output is the target's own, token for token, unless asked otherwise.

    Args:
        drafter: proposes trees; without one it is AR decoding.
        nodes: node budget of one request's tree at one step; the policy's own by default.
        tokenizer: for text prompts and text output; the target's own by default, None for bare token ids.
        verification: a name of ``SCHEMES`` or a scheme.
        candidates: of verification match, one of ``CANDIDATES``; by default the scheme's own (coupled).
        observers: are notified in this order.

    Raises:
        ConfigError: the node budget is out of range, or the verification cannot judge the drafter's trees.
        UnknownNameError: there is no such verification.
    """

    @typed
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        nodes: int | None = None,
        tokenizer: Tokenizer | None = None,
        verification: str | Scheme = DEFAULT_SCHEME,
        candidates: str | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.target = target
        self.drafter = drafter or NoDrafter()
        self.nodes = node_budget(self.drafter.policy, nodes)
        self.tokenizer = tokenizer or getattr(target, "tokenizer", None)
        self.verification = find_scheme(verification, candidates)
        if self.drafter.policy is not None:
            self.verification.check(self.drafter.policy, self.nodes, self.drafter.learns)
        self.drafter.prepare(target)
        self.observers = tuple(observers)
        self._learned = 0.0
        for observer in self.observers:
            scheme = self.verification
            observer.begin(Setup(target, self.drafter, self.nodes, scheme.name, scheme.candidates, self.tokenizer))

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Decode a batch to its end: one target pass a step for all requests that still run.

        Args:
            prompts: texts (taken as they are), conversations or token ids.
            params: for all prompts, or one each; greedy to the end of the context by default.

        Raises:
            InputError: a prompt or its settings do not fit the model; found before anything is decoded.
        """
        each = each_params(prompts, params)
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        self.target.reserve(len(requests), max(map(self._slots, requests), default=0))
        with ExitStack() as closing:  # what fails to close, keeps no other from it
            for request in requests:
                closing.callback(self.close, request)
                self._prefill(request)
            while running := [r for r in requests if r.finish_reason is None]:
                self.step(sorted(running, key=lambda r: _row(r).slot))  # storage order: no logits are copied
                for request in running:
                    if request.finish_reason is not None:
                        self.close(request)  # a finished row would ride along in every pass
        lossy = self.verification.lossy
        return [
            Generation(r.text, r.output_ids, r.finish_reason or "", r.seed, r.chunks, r.stats, lossy) for r in requests
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Decode one prompt, giving out tokens as they come (``generate`` for the arguments).

        Raises:
            InputError: at once, as ``generate``; the prefill waits until the first token is asked for.
        """
        return self._stream(self._request(prompt, params))

    def _stream(self, request: Request) -> Iterator[Chunk]:
        self._prefill(request)
        yield from self.follow(request)

    def follow(self, request: Request) -> Iterator[Chunk]:
        """Run an open request to its end, giving out its tokens as they come; leaving early closes it."""
        given = 0
        try:
            while True:
                yield from request.chunks[given:]
                given = len(request.chunks)
                if request.finish_reason is not None:
                    return
                self.step([request])
        finally:
            self.close(request)

    def open(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Prefill a request and draw its first token.

        Raises:
            InputError: the prompt or its settings do not fit the model.
        """
        request = self._request(prompt, params)
        self._prefill(request)
        return request

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """A request that fits the model; nothing is open for it yet."""
        params = SamplingParams() if params is None else params
        ids = encode(self.tokenizer, prompt)
        limit = token_limit(self.target, ids, params)
        stream = text_stream(self.tokenizer, params.stop, ids)
        return Request(ids, params, limit, self.target.capabilities.eos_ids, stream)

    @torch.inference_mode()
    def _prefill(self, request: Request) -> None:
        began = time.perf_counter()
        self.target.reserve(1, self._slots(request))
        request.row = prefill(self.target, request.ids)
        try:
            self.drafter.open(request)
            first = self._verify(request.row.logits[None, None], [DraftTree.empty()], [request])[0]
            request.append(first.tokens, accepted=0)
            request.stats.tokens = 1
            request.stats.seconds.prefill = time.perf_counter() - began
            for observer in self.observers:
                observer.opened(request)
        except BaseException:
            self.close(request)
            raise

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> list[Outcome]:
        """Draft, verify and commit once for each of these open requests, together.

        Raises:
            ConfigError: one is closed or finished, or there twice; or they are no list.
        """
        if not isinstance(requests, (list, tuple)):
            raise ConfigError(f"step takes a list of requests: {requests!r} is none")
        if not requests:
            return []
        rows = self._ready(requests)
        clock, passes = StepClock(), self.drafter.passes
        with clock.time("draft"):
            # a path of depth d gains d + 1 tokens: no node is deeper than the tokens left, less the bonus token
            budgets = [Budget(self.nodes, depth=request.tokens_left - 1) for request in requests]
            trees = self.drafter.propose(requests, budgets, self.verification.drawing)
        with clock.time("verify"):
            nodes = [Nodes.below(request.ids[-1:], tree) for request, tree in zip(requests, trees, strict=True)]
            logits = self.target.extend(rows, nodes)
            with clock.time("successors"):
                beside = successors(logits, self.drafter.successors) if self.drafter.successors else None
            verdicts = self._verify(logits, trees, requests, beside)
        with clock.time("other"):
            taken = []
            for request, row, verdict in zip(requests, rows, verdicts, strict=True):
                self.target.commit(row, [0, *(n + 1 for n in verdict.path)])
                taken.append(request.append(verdict.tokens, len(verdict.path)))
        cost = clock.cost(len(requests), self.drafter.passes - passes, self._learned)
        outcomes = [
            Outcome(request, tree, verdict.path, verdict.tokens, count, cost, _successors(verdict, tree))
            for request, tree, verdict, count in zip(requests, trees, verdicts, taken, strict=True)
        ]
        with clock.time("learn"):
            self.drafter.observe(outcomes)
        self._learned = clock.seconds["learn"]
        for outcome in outcomes:
            outcome.count(self._learned)
        for observer in self.observers:
            observer.stepped(outcomes, self._learned)
        return outcomes

    def _ready(self, requests: Sequence[Request]) -> list[Row]:
        """The rows of requests that can go on, without what a failed step has left behind.

        Raises:
            ConfigError: one is closed or finished, or there twice.
            RunError: a step of one failed after its commit.
        """
        rows = [_row(request) for request in requests]
        if len(set(rows)) < len(rows):
            raise ConfigError("a request is in this step twice: step each once")
        for request, row in zip(requests, rows, strict=True):
            if row.length != len(request.ids) - 1:
                raise RunError("a step of this request failed half-way: open its prompt again")
            if len(row.parents):
                self.target.commit(row, [])
        return rows

    def close(self, request: Request) -> None:
        """Free what a request holds in the models; its tokens and figures stay readable. Twice is harmless.

        All observers are notified, even where one of them fails.
        """
        row, request.row = request.row, None
        if row is not None:
            with ExitStack() as closing:  # from the last to the first
                for observer in reversed(self.observers):
                    closing.callback(observer.closed, request)
                closing.callback(self.drafter.close, request)
                self.target.close(row)

    def _verify(
        self, logits: Tensor, trees: Sequence[DraftTree], requests: Sequence[Request], beside: Tensor | None = None
    ) -> list[Verdict]:
        draws = Draws([r.params for r in requests], [r.seed for r in requests], [r.ids for r in requests])
        return self.verification.verify(logits, trees, draws, beside)

    def _slots(self, request: Request) -> int:
        """Cache slots to reserve for a request; a drafter on its row needs some for all that it may score.

        Of a large node budget only a part: most trees stay far below it, and the cache grows for one that does not.
        """
        policy = self.drafter.policy if self.drafter.host is not None else None
        drafted = 0 if policy is None else policy.pool(self.nodes)
        tokens = len(request.ids) + (request.params.max_tokens or 0) + 1
        return tokens + min(max(self.nodes, drafted), _RESERVED)


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


def token_limit(target: LanguageModel, ids: Sequence[int], params: SamplingParams) -> int:
    """Most tokens that may be generated behind a prompt.

    Raises:
        PromptError: the prompt is empty, has other tokens than the model, or does not fit the context.
        ConfigError: ``max_tokens`` does not fit behind it, or ``params`` are something else.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"sampling params are {params!r}: give SamplingParams")
    can = target.capabilities
    left = can.max_length - len(ids)
    if not ids:
        raise PromptError("the prompt is empty: give at least one token")
    if wrong := next((i for i in (min(ids), max(ids)) if not 0 <= i < can.vocab_size), None):
        raise PromptError(f"the prompt has token id {wrong} but those of {can.name} are 0 to {can.vocab_size - 1}")
    if left < 1:
        raise PromptError(
            f"the prompt has {len(ids)} tokens but {can.name} takes {can.max_length} ({can.max_length_reason}), "
            f"generated ones included: shorten the prompt to {can.max_length - 1} or fewer"
        )
    if params.max_tokens is not None and params.max_tokens > left:
        raise ConfigError(
            f"max_tokens is {params.max_tokens} but {can.name} takes {can.max_length} tokens and the prompt has "
            f"{len(ids)}: ask for at most {left}"
        )
    return params.max_tokens or left


def _row(request: Request) -> Row:
    if not isinstance(request, Request):
        raise ConfigError(f"{request!r} is no request: give what open returned")
    if request.row is None or request.finish_reason is not None:
        raise ConfigError("a closed or finished request cannot go on: open its prompt again")
    return request.row


def _successors(verdict: Verdict, tree: DraftTree) -> Successors | None:
    """Of the root and the tree's own nodes, without the padding of the pass."""
    return None if verdict.beside is None else Successors.unpack(verdict.beside[: 1 + len(tree)])
