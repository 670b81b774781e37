"""Decoding with beams, drafted or not: draft a forest by the source's candidates, verify it, go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from ..config import Budget, SamplingParams, typed
from ..drafters.base import DraftSource, UnscoredNode
from ..drafters.draft_model import ModelSource
from ..drafters.registry import is_model, load_source
from ..drafters.spec import AUTO, DEFAULT_DRAFTER, NONE, SELF, DrafterSpec
from ..engine.input_processor import check_params, each_params, limit_of, text_stream, with_token_rules
from ..engine.step import count_depths
from ..errors import ConfigError, NoTreesError
from ..models.base import LanguageModel, prefill_scored
from ..models.loading import ModelOptions, load
from ..models.model_files import DEFAULT_MODEL
from ..papers.dsbd import beam_distribution
from ..policies.base import Candidates, DraftDistribution, descending
from ..request import Stats
from ..text.encoding import Prompt, encode
from ..tree import ROOT
from .forest import BeamNode, BeamParams, BeamRequest, TreeRow, check_memory, feed
from .layers import BeamDraws, DraftForest, DraftLayer, sample, search, target_distributions


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One of the best sequences.

    Attributes:
        text: generated text, as it follows the prompt's; without that of the end-of-sequence token.
        token_ids: generated tokens, end-of-sequence included.
        score: ``logprob`` over len(token_ids) ** length_penalty.
        logprob: cumulative log-probability (nats) of the tokens under the target's distribution, processors included,
            at temperature 1 and unwarped.
        finish_reason: "eos" or "length".
    """

    text: str
    token_ids: list[int]
    score: float
    logprob: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamGeneration:
    """What became of one prompt.

    Attributes:
        hypotheses: the n best beams, best first; sampled ones may coincide, and a dynamic width may end with fewer.
        seed: the seed that reproduces them.
        stats: what was measured; ``tokens`` counts layers of beams, and ``mal`` those gained per target pass.
        peak_slots: most tokens that the target's cache held of this prompt and its beams.
        accepted_widths: of sampled beams: how many drafted ones were accepted, in each layer that was verified.
    """

    hypotheses: list[Hypothesis]
    seed: int
    stats: Stats
    peak_slots: int
    accepted_widths: list[int]


_ONE_SEQUENCE = "drafts one sequence, not beams: use a draft model or none"


class BeamEngine:
    """Decodes prompts with beams, drafted or not.

    Drafts change no result: searched beams are those of beam search, sampled ones follow beam sampling's
    distribution.

    Attributes:
        target: the model whose beams are given.
        source: what drafts; None: nothing does.

    Raises:
        ConfigError: the source drafts one sequence.
        NoTreesError: the target's rows cannot branch, as beams do.
    """

    @typed
    def __init__(self, target: LanguageModel, source: DraftSource | None = None) -> None:
        if source is not None and not isinstance(source, ModelSource):
            raise ConfigError(f"drafter {source.name} {_ONE_SEQUENCE}")
        if reason := target.capabilities.no_trees:
            raise NoTreesError(target.capabilities.name, "decode beams", reason, "leave the beams out")
        self.target = target
        self.source: ModelSource | None = source
        self.tokenizer = target.tokenizer
        if source is not None:
            source.prepare(target)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        beams: BeamParams | None = None,
    ) -> list[BeamGeneration]:
        """Decode a batch to its end: one target pass a step for all prompts whose beams still run.

        Args:
            prompts: texts (taken as they are), conversations or token ids.
            params: for all prompts, or one each: temperature 0 searches beams, any other samples them; searched to the
                end of the context by default.
            beams: how many there are, and how they are drafted.

        Raises:
            InputError: a prompt or a setting does not fit; found before anything is decoded.
        """
        params_of = each_params(prompts, params)
        beams = BeamParams() if beams is None else beams
        for one in params_of:
            self._check(one, beams)
        requests = [
            self._request(encode(self.tokenizer, p), one, beams) for p, one in zip(prompts, params_of, strict=True)
        ]
        check_memory(self.target, requests)
        with ExitStack() as closing:  # what fails to close, keeps no other from it
            for request in requests:
                closing.callback(self.close, request)
                self.open(request)
            while running := [r for r in requests if not r.done]:
                self.step(running)
                for request in running:
                    if request.done:
                        self.close(request)
        return [self._generation(request) for request in requests]

    def _check(self, params: SamplingParams, beams: BeamParams) -> None:
        check_params(params)
        if not isinstance(beams, BeamParams):
            raise ConfigError(f"beams are {beams!r}: give BeamParams")
        beams.check(params)

    def _request(self, ids: list[int], params: SamplingParams, beams: BeamParams) -> BeamRequest:
        limit = limit_of(self.target, ids, params)
        params = with_token_rules(params, self.target.capabilities)
        return BeamRequest(ids, params, beams, limit, self.target.capabilities.eos_ids)

    def open(self, request: BeamRequest) -> None:
        """Prefill a prompt and find its first layer of beams."""
        began = time.perf_counter()
        beams = request.beams
        drafts = beams.nodes if self.source else 0
        self.target.reserve(1, len(request.ids) + (request.params.max_tokens or 0) + beams.width + drafts)
        row, scores = prefill_scored(self.target, request.ids)
        request.tree = TreeRow(row, request.ends[0], scores.logits([0])[0])
        request.trunk.row = row
        if self.source is not None:
            self.source.open(request.trunk)
        self._advance(request, DraftForest(), self._draws(request))
        request.stats.seconds.prefill = time.perf_counter() - began

    def step(self, requests: Sequence[BeamRequest]) -> None:
        """Draft, verify and go on once with each of these open requests, together."""
        clock = [time.perf_counter()]
        passes = self.source.passes if self.source else 0
        draws = [self._draws(request) for request in requests]
        forests = grow(self.source, requests, draws)
        clock.append(time.perf_counter())
        feed(self.target, [request.tree for request in requests])
        clock.append(time.perf_counter())
        for request, forest, request_draws in zip(requests, forests, draws, strict=True):
            tree = request.tree
            request.peak_slots = max(request.peak_slots, tree.row.length + len(tree.numbers))
            self._advance(request, forest, request_draws)
        clock.append(time.perf_counter())
        draft, verify, other = (b - a for a, b in pairwise(clock))
        for request in requests:
            stats = request.stats
            stats.steps += 1
            stats.draft_passes += (self.source.passes if self.source else 0) - passes
            stats.seconds.draft += draft
            stats.seconds.verify += verify
            stats.seconds.other += other

    def close(self, request: BeamRequest) -> None:
        """Free what a request holds in the models. Twice is harmless."""
        row, request.trunk.row = request.trunk.row, None
        if row is not None:
            del request.tree  # it holds logits
            self.target.close(row)
            if self.source is not None:
                self.source.close(request.trunk)

    def _draws(self, request: BeamRequest) -> BeamDraws:
        return BeamDraws(request.seed, len(request.ids) + request.length - 1)

    def _advance(self, request: BeamRequest, forest: DraftForest, draws: BeamDraws) -> None:
        """As many layers as the target has seen the beams of, and one more; then only the beams that go on are kept."""
        tree, params, stats, depth = request.tree, request.params, request.stats, 0
        count_depths(stats.drafted, sorted([node.length - request.length for node in forest.nodes.values()]))
        stats.drafted_layers += sum(bool(layer.drafts) for layer in forest.layers)
        while True:
            logits = np.stack([tree.logits[node] for node in request.ends])
            logprobs = target_distributions(logits, params, request.draws, [node.tokens for node in request.ends])
            if params.temperature:
                sample(request, logprobs, forest, depth, draws)
            else:
                search(request, logprobs, forest)
            stats.tokens += 1
            if request.done:
                return
            if not all(node in tree.logits for node in request.ends):
                break
            depth += 1
            count_depths(stats.accepted, [depth] * len(request.ends))
        if request.beams.single_cache:
            # of one length, the beam of lowest perplexity is the most probable one
            request.running = {max(request.ends, key=lambda node: node.score): 1}
        numbers, committed = tree.keep(self.target, request.ends)
        request.trunk.ids += [node.token for node in committed]
        if self.source is not None:
            self.source.prune(request.trunk, numbers, len(committed))

    def _generation(self, request: BeamRequest) -> BeamGeneration:
        hypotheses = list[Hypothesis]()
        for node in request.finished[: request.beams.returned]:
            ids, why = node.tokens, request.ended(node) or "length"
            text = self._text(request, ids[:-1] if why == "eos" else ids)
            hypotheses.append(Hypothesis(text, ids, request.rank(node), logprob=node.score, finish_reason=why))
        return BeamGeneration(hypotheses, request.seed, request.stats, request.peak_slots, request.accepted_widths)

    def _text(self, request: BeamRequest, tokens: list[int]) -> str:
        """Of tokens that follow the prompt's."""
        return "".join(text_stream(self.tokenizer, request.params, request.ids).push([*tokens, None], last=True))


@dataclass(slots=True, kw_only=True)
class _Growing(DraftForest):
    """The forest of one request while it grows.

    Attributes:
        request: whose.
        draws: of the drafts; None: the most probable are taken.
        ends: the nodes whose children come next, and how often each of them was drawn.
        left: layers to go.
    """

    request: BeamRequest
    draws: BeamDraws | None
    ends: Mapping[BeamNode, int]
    left: int


def grow(
    source: ModelSource | None, requests: Sequence[BeamRequest], draws: Sequence[BeamDraws]
) -> Sequence[DraftForest]:
    """One forest for each request, of as many layers as it wants and its length and its source allow."""
    growing = []
    for request, request_draws in zip(requests, draws, strict=True):
        request.tree.begin(request.ends)
        left = layers_left(source, request) if source else 0
        random = request_draws if request.params.temperature else None
        growing.append(_Growing(request=request, draws=random, ends=request.running, left=left))
    if source is not None and (unfinished := [g for g in growing if g.left > 0]):
        _grow(source, unfinished)
    return growing


def layers_left(source: ModelSource, request: BeamRequest) -> int:
    """Layers to draft below the running beams: the last one before the limit is not drafted."""
    uncommitted = request.length - (len(request.trunk.ids) - len(request.ids))
    depth = uncommitted + min(request.beams.depth, request.limit - request.length - 1)
    return (source.fit(request.trunk, Budget(request.beams.nodes, depth)).depth or 0) - uncommitted


def _grow(source: ModelSource, growing: Sequence[_Growing]) -> None:
    scorer = source.scorer([g.request.trunk for g in growing], coupled=False)
    width = max(1 if g.draws else g.request.beams.drafted + len(g.request.eos_ids) for g in growing)
    while unfinished := [(b, g) for b, g in enumerate(growing) if g.left > 0 and g.ends]:
        new, until, sampled = list[UnscoredNode](), list[int](), list[tuple[int, int]]()
        for b, g in unfinished:
            nodes = [*g.ends] if g.layers else [*_unread(source, g), *g.ends]
            if not g.layers and not source.has_read(g.request.trunk, ROOT):
                new.append(UnscoredNode(b, ROOT, ROOT, g.request.trunk.ids[-1]))
            tree = g.request.tree
            new += [UnscoredNode(b, tree.numbers[node], tree.parent(node), node.token) for node in nodes]
            until.append(len(new))
            if g.draws:
                sampled += [(b, tree.numbers[node]) for node in g.ends]
        candidates = scorer.score(new, width)
        distributions = iter(scorer.distributions(sampled) if sampled else ())
        for (_, g), end in zip(unfinished, until, strict=True):
            if g.draws:
                _draw_layer(g, g.draws, [*islice(distributions, len(g.ends))])
            else:
                _choose_layer(g, candidates[end - len(g.ends) : end])


def _unread(source: ModelSource, g: _Growing) -> list[BeamNode]:
    """What the source has not read above the ends of the running beams."""
    trunk, tree = g.request.trunk, g.request.tree
    above = dict.fromkeys(node for end in g.ends for node in end.path(tree.base)[:-1])
    return [node for node in above if not source.has_read(trunk, tree.numbers[node])]


def _draw_layer(g: _Growing, draws: BeamDraws, distributions: Sequence[DraftDistribution]) -> None:
    """Draft a layer below ``g.ends``: W_S independent draws from q_beam."""
    parents, request = [*g.ends], g.request
    logprobs = np.stack([q.dense(request.tree.vocab_size) for q in distributions])
    cells = beam_distribution([node.score for node in parents], [*g.ends.values()], logprobs, request.params)
    drawn = draws.draft_cells(cells, request.beams.drafted, len(g.layers))
    _add_layer(g, cells, [_draft(g, parents[row], token, float(logprobs[row, token])) for row, token in drawn])


def _choose_layer(g: _Growing, candidates: Sequence[Candidates]) -> None:
    """Draft a layer below ``g.ends``: the W_S most probable of all continuations that do not end."""
    continuations = [
        (parent, token, logprob)
        for parent, (tokens, logprobs, *_) in zip(g.ends, candidates, strict=True)
        for token, logprob in zip(tokens, logprobs, strict=True)
        if token not in g.request.eos_ids
    ]
    best = descending([parent.score + logprob for parent, _, logprob in continuations])
    _add_layer(g, np.zeros(0), [_draft(g, *continuations[at]) for at in best[: g.request.beams.drafted]])


def _add_layer(g: _Growing, cells: NDArray[np.float64], drafts: list[BeamNode]) -> None:
    """Those that go on, and how often each was drawn, are the ends from now on."""
    g.layers.append(DraftLayer([*g.ends], cells, drafts))
    g.ends, g.left = Counter(node for node in drafts if g.request.ended(node) is None), g.left - 1


def _draft(g: _Growing, parent: BeamNode, token: int, logprob: float) -> BeamNode:
    node = g.child(parent, token, parent.score + logprob)
    g.request.tree.numbers.setdefault(node, len(g.request.tree.numbers))
    return node


@typed
def load_beam_engine(
    target: str = DEFAULT_MODEL,
    *,
    drafter: str | DrafterSpec | LanguageModel = DEFAULT_DRAFTER,
    **options: Unpack[ModelOptions],
) -> BeamEngine:
    """An engine for beams from names alone.

    Args:
        target, options: as ``draftree.load``.
        drafter: as ``load_beam_source``.

    Raises:
        InputError: a name is unknown or does not fit; what needs no model is checked before one is loaded.
    """
    spec = beam_drafter(drafter)
    model = load(target, **options)
    return BeamEngine(model, load_beam_source(spec, model))


def beam_drafter(name: str | DrafterSpec | LanguageModel) -> DrafterSpec:
    """Parse a drafter and check that it can draft beams; "auto" is none: what it stands for elsewhere drafts no beams.

    Raises:
        InputError: it cannot, or is not written as a drafter is.
    """
    spec = DrafterSpec.parse(name)
    if str(spec) == AUTO:
        return DrafterSpec.parse(NONE)
    if str(spec) not in (NONE, SELF) and not isinstance(spec.sources[0], LanguageModel) and not is_model(spec):
        raise ConfigError(f"drafter {spec} {_ONE_SEQUENCE}")
    return spec


@typed
def load_beam_source(name: str | DrafterSpec | LanguageModel, target: LanguageModel) -> DraftSource | None:
    """Make what drafts beams, by name; None drafts nothing.

    Args:
        name: as ``beam_drafter``, of the names that ``load_drafter`` takes: a model.
        target: the model that it drafts for.

    Raises:
        ConfigError: it cannot draft beams.
        UnknownNameError: there is no such drafter.
        NoTreesError, VocabularyError: the draft model cannot grow trees, or reads other token ids and no text.
    """
    spec = beam_drafter(name)
    return None if str(spec) == NONE else load_source(spec, target)
