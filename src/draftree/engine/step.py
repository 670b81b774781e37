"""One step for the requests that run together: draft, verify in one target pass, commit, append.

    begin -> [ draft -> extend -> verify -> commit -> append ] * -> close

Joins drafting and verification, which know nothing of each other. A request whose prompt is not read yet takes part
with the next tokens of it in place of a tree; when the last of them is read, its first token is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock

from ..config import MAX_NODES, Budget, SamplingParams, typed
from ..drafters.base import Drafter, NoDrafter
from ..errors import ConfigError, PromptError, RunError
from ..models.base import LanguageModel, Nodes, Row
from ..models.prefixes import PrefixCache
from ..policies.base import node_budget
from ..request import Logprobs, Outcome, Request, StepCost
from ..sampling.grammar import Grammars
from ..scores import Scores
from ..text.encoding import encode
from ..text.tokenizer import Prompt, Tokenizer
from ..tracing.trace import Observer, Setup
from ..tree import DraftTree
from ..verify.match import Verdict
from ..verify.schemes import DEFAULT_SCHEME, Scheme, find_scheme
from .limits import check_params, check_size, fitted, text_stream, with_token_rules
from .speculation import Speculation, SpeculationParams, Speculations

_RESERVED = 256
"""Most slots that are reserved for the drafted nodes of a request."""
_SCORED = 64
"""Most tokens of a prompt that a step reads where their log-probabilities are wanted: it computes all their logits."""


@dataclass(slots=True, eq=False)
class _Part:
    """What one request adds to the step's pass.

    Attributes:
        head: tokens that its row has not: of a prompt as many as are read now, else the last token alone.
        decodes: its prompt has been read.
        weight: what its tokens count beside those of other requests (``Budget.weight``).
        tree: drafted below the head.
        first: slot of the first of its tokens that are scored.
        verdict: on the tree; None: the head does not end with the request's last token.
        logprobs: of its tokens, where they were asked for.
        taken: tokens that the request took of the verdict.
    """

    request: Request
    speculation: Speculation
    row: Row
    head: list[int]
    decodes: bool
    weight: float = 1.0
    tree: DraftTree = field(default_factory=DraftTree.empty)
    first: int = 0
    verdict: Verdict | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    taken: int = 0

    @property
    def ends(self) -> bool:
        """The head ends with the request's last token: the next one is drawn."""
        return self.row.length + len(self.head) == len(self.request.ids)

    @property
    def scored(self) -> int | None:
        """How many log-probabilities are wanted beside those of the prompt that it reads; None: not even those."""
        return None if self.decodes else self.request.params.prompt_logprobs

    @property
    def nodes(self) -> Nodes:
        if self.scored is not None:
            return Nodes.chain(self.head)
        return Nodes.below(self.head, self.tree) if self.ends else Nodes.chain(self.head, 0)

    @property
    def root(self) -> int:
        """Slot of the tree's root, the last token of the head."""
        return self.first if self.scored is None else self.first + len(self.head) - 1

    def score(self, scores: Scores) -> None:
        """Find log-probabilities of the prompt's tokens, where they are wanted."""
        if self.scored is not None:
            at, ids = self.row.length, self.request.ids
            tokens = ids[at + 1 : at + 1 + len(self.head)]
            slots = range(self.first, self.first + len(tokens))
            self.request.prompt_logprobs[at:] = Logprobs.of(scores, slots, tokens, self.scored)

    def judge(self, verdict: Verdict, scores: Scores) -> None:
        """Take a verdict, and find log-probabilities of its tokens, where they are wanted."""
        self.verdict = verdict
        if (count := self.request.params.logprobs) is not None:
            visited = [self.root, *(self.root + 1 + node for node in verdict.path)]
            self.logprobs = Logprobs.of(scores, visited, verdict.tokens, count)

    def append(self) -> None:
        """Give the request its tokens; an exception of a stopping criterion ends it, and no other."""
        verdict, request, before = self.verdict or Verdict([], []), self.request, len(self.request.ids)
        try:
            request.append(verdict.tokens, len(verdict.path), self.logprobs)
        except Exception as error:  # noqa: BLE001 - a criterion raises what it likes
            request.fail(error)
        self.taken = len(request.ids) - before

    def outcome(self, cost: StepCost, scores: Scores) -> Outcome:
        """What became of the tree."""
        verdict = self.verdict or Verdict([], [])
        return Outcome(self.request, self.tree, verdict.path, verdict.tokens, self.taken, cost, scores, self.root)


@dataclass(slots=True, eq=False)
class _Group:
    """The parts of one drafter; what drafting for them took."""

    drafter: Drafter
    parts: list[_Part]
    seconds: float = 0.0
    passes: int = 0

    def draft(self, beside: int, reading: int | None, together: int | None) -> None:
        """Draft (``Drafter.propose`` for ``beside`` and ``reading``, ``Budget`` for ``together``)."""
        began, passes = time.perf_counter(), self.drafter.passes
        requests = [part.request for part in self.parts]
        # a path of depth d gains d + 1 tokens: no node is deeper than the tokens left, less the bonus token
        most = MAX_NODES if together is None else together
        budgets = [
            Budget(min(p.speculation.nodes, most), p.request.tokens_left - 1, p.weight, together) for p in self.parts
        ]
        trees = self.drafter.propose(requests, budgets, self.parts[0].speculation.scheme.drawing, beside, reading)
        for part, tree in zip(self.parts, trees, strict=True):
            part.tree = tree
        self.seconds, self.passes = time.perf_counter() - began, self.drafter.passes - passes


class Stepper:
    """Makes steps of requests; their output is the target's own, token for token, unless it was asked otherwise.

    Args:
        drafter: proposes trees for requests that choose no speculation of their own; None: AR decoding.
        nodes: node budget of one request's tree at one step; the policy's own by default.
        tokenizer: for text prompts and text output; the target's own by default, None for bare token ids.
        verification: a name of ``SCHEMES`` or a scheme.
        candidates: of verification match, one of ``CANDIDATES``; by default the scheme's own (coupled).
        observers: are notified in this order.
        prefixes: most rows of closed requests that are kept, for prompts that begin as they do.

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
        prefixes: int = 0,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer or getattr(target, "tokenizer", None)
        drafter, scheme = drafter or NoDrafter(), find_scheme(verification, candidates)
        self.speculation = Speculation(drafter, node_budget(drafter.policy, nodes), scheme)
        self.prefixes = PrefixCache(target, prefixes)
        self.observers = tuple(observers)
        self._made = Speculations(target, prefixes)
        self._made.prepared(self.speculation)
        self._learned: dict[int, float] = {}  # seconds that drafters took to learn from the last step, by id
        # transformers' tokenizers change in their first call; from then on threads may share them.
        self._start = self.tokenizer.encode("") if self.tokenizer is not None else []
        self._compiling = Lock()
        self._grammars: Grammars | None = None
        self.setup = Setup(target, drafter, self.speculation.nodes, scheme.name, scheme.candidates, self.tokenizer)
        for observer in self.observers:
            observer.begin(self.setup)

    def encode(self, prompt: Prompt, *, whole: bool = True, field: str = "prompt") -> list[int]:
        """Token ids of a prompt (``request``), which is to fit the context unless it is not ``whole``; on any thread.

        Raises:
            PromptError: there are none; ContextError: it cannot fit; of ``field``.
        """
        if whole:
            check_size(self.target, self.tokenizer, prompt, field)
        return encode(self.tokenizer, prompt, field)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for ``SamplingParams.constraint``; made when first asked for, by any thread.

        Raises:
            ConfigError: the model has no tokenizer, or none that says how tokens are spelled.
        """
        with self._compiling:
            if self._grammars is None:
                if self.tokenizer is None:
                    raise ConfigError("grammars are of text but the model has no tokenizer: load one with it")
                can = self.target.capabilities
                self._grammars = Grammars(self.tokenizer, can.vocab_size, can.eos_ids)
            return self._grammars

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | Speculation | None = None,
        prediction: str | Sequence[int] = (),
        observers: Sequence[Observer] = (),
    ) -> Request:
        """A request that fits the model; nothing is held for it yet.

        Args:
            prompt: text (taken as it is), a conversation or token ids.
            params: greedy to the end of the context by default.
            speculation: how it is drafted for and verified; None: as the engine does by default.
            prediction: a text that the answer probably repeats, such as the file to edit; drafter "lookup" drafts from
                it. The output is the same with any prediction.
            observers: are notified of this request alone.

        Raises:
            InputError: the prompt or a setting does not fit the model, or the drafter cannot be loaded for it.
        """
        params = SamplingParams() if params is None else params
        check_params(params)
        ids, limit = fitted(self.target, self.encode(prompt, whole=params.truncate_prompt_tokens is None), params)
        stream = text_stream(self.tokenizer, params, ids)
        params = with_token_rules(params, self.target.capabilities, self.spelled)
        eos_ids, made = self.target.capabilities.eos_ids, self._speculation(speculation)
        return Request(ids, params, limit, eos_ids, stream, made, self._predicted(prediction), observers)

    def _predicted(self, prediction: str | Sequence[int]) -> list[int]:
        if not len(prediction):
            return []
        field = "prediction"
        ids = self.spelled(prediction, field) if isinstance(prediction, str) else self.encode(prediction, field=field)
        if len(ids) > (most := self.target.capabilities.max_length):
            why = f"the prediction has {len(ids)} tokens but an answer at most {most}: shorten it"
            raise PromptError(why, "prediction")
        return ids

    def spelled(self, text: str, field: str = "text") -> list[int]:
        """Token ids of a text without the special tokens that begin a prompt; any thread may ask."""
        ids, begin = self.encode(text, field=field), len(self._start)
        return ids[begin:] if ids[:begin] == self._start else ids

    def _speculation(self, given: SpeculationParams | Speculation | None) -> Speculation:
        if given is None:
            return self.speculation
        if isinstance(given, SpeculationParams):
            return self._made.find(given)
        if isinstance(given, Speculation):
            return self._made.prepared(given)
        raise ConfigError(f"speculation is {given!r}: give SpeculationParams, a Speculation or None")

    def begin(self, request: Request) -> None:
        """Give a request its row in the target, with what is kept of its prompt; steps read the rest."""
        self.target.reserve(1, self.slots(request))
        scored = request.params.prompt_logprobs is not None
        request.row = self.target.open() if scored else self.prefixes.find(request.ids)
        request.stats.reused = request.row.length

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | Speculation | None = None,
    ) -> Request:
        """A request that has read its prompt and drawn its first token (``request`` for the arguments)."""
        request = self.request(prompt, params, speculation)
        self.begin(request)
        try:
            self.step([request])
        except BaseException:
            self.close(request)
            raise
        return request

    def step(
        self,
        requests: Sequence[Request],
        prompt_tokens: int | None = None,
        weights: Mapping[Request, float] | None = None,
        batch_nodes: int | None = None,
    ) -> list[Outcome]:
        """Draft, verify and commit once for each of these requests, together.

        Args:
            requests: begun, each once.
            prompt_tokens: most tokens of prompts that are read, the first requests' first; None: all.
            weights: what requests' tokens count (``Budget.weight``); None: all the same.
            batch_nodes: most drafted nodes of all of them; drafters divide it by how many requests they draft for.

        Returns:
            an outcome for each request whose prompt had been read before.

        Raises:
            ConfigError: a request is closed or finished, or there twice; or they are no list.
            RunError: a step of one failed after its commit.
        """
        began = time.perf_counter()
        parts = self._parts(requests, prompt_tokens, weights or {})
        if not parts:
            return []
        groups, left = _grouped_by_drafter([part for part in parts if part.decodes]), batch_nodes
        for number, group in enumerate(groups):
            others = sum(len(p.head) + len(p.tree) for p in parts if p not in group.parts)
            waiting = sum(len(g.parts) for g in groups[number:])
            group.draft(others, prompt_tokens, None if left is None else left * len(group.parts) // waiting)
            left = None if left is None else left - sum(len(part.tree) for part in group.parts)
        drafted = time.perf_counter()
        scores = self.target.extend([part.row for part in parts], [part.nodes for part in parts])
        for part, first in zip(parts, scores.starts, strict=False):
            part.first = first
            part.score(scores)
        opened = [part for part in parts if part.ends and not part.decodes]
        for part in opened:
            part.speculation.drafter.open(part.request)
        self._verify([part for part in parts if part.ends], scores)
        verified = time.perf_counter()
        for part in parts:
            n, path = len(part.head), part.verdict.path if part.verdict else []
            self.target.commit(part.row, [*range(n), *(n + node for node in path)])
            if part.verdict:
                part.append()
        ended = time.perf_counter()
        outcomes: dict[Request, Outcome] = {}
        for group in groups:
            learned = self._learned.get(id(group.drafter), 0.0)
            times = group.seconds, verified - drafted, ended - verified
            cost = StepCost(len(parts), *times, group.passes, learned)
            own = [part.outcome(cost, scores) for part in group.parts]
            self._observe(group.drafter, own)
            outcomes |= {outcome.request: outcome for outcome in own}
        for part in parts:
            if not part.decodes:
                part.request.stats.seconds.prefill += time.perf_counter() - began
        for part in opened:
            part.request.stats.tokens = part.taken
            for observer in (*self.observers, *part.request.observers):
                observer.opened(part.request)
        return [outcomes[request] for request in requests if request in outcomes]

    def _observe(self, drafter: Drafter, outcomes: Sequence[Outcome]) -> None:
        began = time.perf_counter()
        drafter.observe(outcomes)
        learned = self._learned[id(drafter)] = time.perf_counter() - began
        for outcome in outcomes:
            outcome.count(learned)
        for observer in self.observers:
            observer.stepped(outcomes, learned)
        for outcome in outcomes:
            for observer in outcome.request.observers:
                observer.stepped([outcome], learned)

    def _parts(
        self, requests: Sequence[Request], prompt_tokens: int | None, weights: Mapping[Request, float]
    ) -> list[_Part]:
        """What each request feeds, in the order of their rows.

        What a failed step has left behind is dropped.
        """
        if not isinstance(requests, (list, tuple)):
            raise ConfigError(f"step takes a list of requests: {requests!r} is none")
        rows = [_row(request) for request in requests]
        if len(set(rows)) < len(rows):
            raise ConfigError("a request is in this step twice: step each once")
        parts, left = list[_Part](), prompt_tokens
        for request, row in zip(requests, rows, strict=True):
            decodes, count = request.decodes, request.unread
            if count != 1 if decodes else count < 1:
                raise RunError("a step of this request failed half-way: open its prompt again")
            if len(row.parents):
                self.target.commit(row, [])
            if not decodes:
                most = count if request.params.prompt_logprobs is None else _SCORED
                count = min(count, most, count if left is None else left)
                left = None if left is None else left - count
            if count:
                head = request.ids[row.length : row.length + count]
                speculation, weight = request.speculation or self.speculation, weights.get(request, 1.0)
                parts.append(_Part(request, speculation, row, head, decodes, weight))
        return sorted(parts, key=lambda part: part.row.slot)

    def _verify(self, parts: Sequence[_Part], scores: Scores) -> None:
        """Find the verdicts, by one scheme after the other."""
        while parts:
            scheme = parts[0].speculation.scheme
            own = [part for part in parts if part.speculation.scheme == scheme]
            parts = [part for part in parts if part.speculation.scheme != scheme]
            roots, trees = [part.root for part in own], [part.tree for part in own]
            for part, verdict in zip(
                own, scheme.verify(scores, roots, trees, [part.request.draws for part in own]), strict=True
            ):
                part.judge(verdict, scores)

    def close(self, request: Request) -> None:
        """Free what a request holds in the models; its tokens and figures stay readable. Twice is harmless.

        All observers are notified, even where one of them fails.
        """
        if (row := request.row) is not None:
            with ExitStack() as closing:  # from the last to the first
                closing.callback(setattr, request, "row", None)  # last: it is done when its observers know
                for observer in reversed((*self.observers, *request.observers)):
                    closing.callback(observer.closed, request)
                closing.callback((request.speculation or self.speculation).drafter.close, request)
                self.prefixes.keep(request.ids, row)

    def slots(self, request: Request, *, most: bool = False) -> int:
        """Cache slots to reserve for a request, or all that it may come to need.

        Of a large node budget only a part: most trees stay far below it, and the cache grows for one that does not.
        """
        speculation = request.speculation or self.speculation
        tokens = request.limit if most else request.params.max_tokens or 0
        return request.prompt_length + tokens + 1 + min(speculation.nodes, _RESERVED)


def _grouped_by_drafter(parts: Sequence[_Part]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for part in parts:
        drafter = part.speculation.drafter
        groups.setdefault(id(drafter), _Group(drafter, [])).parts.append(part)
    return list(groups.values())


def _row(request: Request) -> Row:
    if not isinstance(request, Request):
        raise ConfigError(f"{request!r} is no request: give what open returned")
    if request.row is None or request.finish_reason is not None:
        raise ConfigError("a closed or finished request cannot go on: open its prompt again")
    return request.row
