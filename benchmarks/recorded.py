"""Draft distributions along known texts, recorded once: many policies can then be replayed on them in seconds.

From every position of a text a drafter scores the most probable nodes of each layer; its distributions are kept in
memory and, for the next run, in a file. ``RecordedSource`` gives them to the growth loop again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save
from torch import Tensor

from draftree.artifacts import write_whole
from draftree.bench.suites import choose, load_suite
from draftree.config import MAX_NODES, Budget
from draftree.drafters.base import DraftSource, Grown, Scorer, UnscoredNode
from draftree.drafters.draft_model import candidates_of_top
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.provenance import provenance
from draftree.drafters.registry import load_drafter
from draftree.errors import ConfigError
from draftree.models.huggingface.hf_loading import load_huggingface
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.model_files import DEFAULT_MODEL
from draftree.policies.base import NO_CANDIDATES, Candidates
from draftree.policies.best_paths import Eagle2Tree
from draftree.request import Outcome, Request
from draftree.scores import Top
from draftree.text.encoding import encode, user
from draftree.train.responses import replayed, respond
from draftree.tree import ROOT

BEAM, DEPTH = 16, 10
"""Nodes of a layer that are scored, and layers, by default."""
Tokens = tuple[int, ...]
_COLUMNS = ("counts", "above", "last", "tokens", "logprobs", "entropies")


@dataclass(slots=True)
class Drafts:
    """The F draft distributions behind one position of a text.

    Attributes:
        numbers: tokens from the root down -> the distribution's number.
        tokens, logprobs: [F, K] most probable candidates.
        entropies: [F] nats.
    """

    numbers: dict[Tokens, int]
    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


@dataclass(slots=True)
class KnownText:
    """A prompt, the target's greedy answer, and the draft distributions behind each of its tokens but the last two.

    Attributes:
        prompt, text: token ids.
        drafts: [len(text) - 2] behind each token.
    """

    prompt: list[int]
    text: list[int]
    drafts: list[Drafts] = field(default_factory=list)


class _Recorder(Scorer):
    """A scorer that keeps what another one returns.

    Attributes:
        above, last: of each distribution, the number of its parent's and the token between them.
        found: what follows, of each.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._numbers: dict[int, int] = {}
        self.above: list[int] = []
        self.last: list[int] = []
        self.found: list[Candidates] = []

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        found = self._scorer.score(nodes, width)
        for _, node, parent, token in nodes:
            self.above.append(self._numbers.get(parent, ROOT))
            self.last.append(token)
            self._numbers[node] = len(self.last) - 1
        self.found += found
        return found


class _RecordingSource(DraftSource):
    """A source whose scorers are recorded."""

    def __init__(self, source: DraftSource) -> None:
        self._source, self.name = source, source.name
        self.recorder: _Recorder | None = None

    def open(self, request: Request) -> None:
        self._source.open(request)

    def fit(self, request: Request, budget: Budget) -> Budget:
        return self._source.fit(request, budget)

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        self.recorder = _Recorder(self._source.scorer(requests, coupled))
        return self.recorder

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        self._source.settle(requests, grown)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._source.observe(outcomes)

    def close(self, request: Request) -> None:
        self._source.close(request)


def record(
    target: HFModel,
    source: DraftSource,
    prompts: Sequence[list[int]],
    max_tokens: int,
    file: Path | None = None,
    size: tuple[int, int] = (BEAM, DEPTH),
) -> Iterator[KnownText]:
    """Decode prompts greedily and record what ``source`` drafts along the answers; or read it from ``file``.

    Args:
        target, source, prompts, max_tokens: what is decoded.
        file: to read, or to write.
        size: how many nodes of each layer are scored, and how many layers.
    """
    beam, depth = size
    if file is not None and file.is_file():
        yield from _read(file)
        return
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    recording = _RecordingSource(source)
    drafter = TreeDrafter(Eagle2Tree(beam, depth), recording)
    columns: dict[str, list[Tensor]] = {name: [] for name in (*_COLUMNS, "prompts", "lengths", "ids")}
    drawn = respond(
        target,
        prompts,
        range(len(prompts)),
        rows=1,
        max_tokens=max_tokens,
        seed=0,
        temperature=0.0,
        states=lambda row: None,  # kept ones are rounded: passes make them again
    )
    for response in drawn:
        if response.gained < 3:
            continue
        ids, positions = response.tokens.tolist(), []
        prompt, text = ids[: response.prompt_length], ids[response.prompt_length :]
        with replayed(drafter, response, 0, target) as replay, torch.inference_mode():
            while len(replay.left) > 1:
                tree = replay.propose(MAX_NODES, min(depth, len(replay.left) - 1))
                assert recording.recorder is not None  # noqa: S101 - propose has begun one
                positions.append(_columns(recording.recorder, beam))
                replay.advance(tree, [], 1)
        for name in _COLUMNS:
            columns[name] += [position[name] for position in positions]
        columns["prompts"].append(torch.tensor([len(prompt)]))
        columns["lengths"].append(torch.tensor([len(text)]))
        columns["ids"].append(torch.tensor([*prompt, *text]))
        yield KnownText(prompt, text, [_drafts(position) for position in positions])
    if file is not None:
        write_whole(file, save({name: torch.cat(parts) for name, parts in columns.items()}))


def _columns(recorder: _Recorder, beam: int) -> dict[str, Tensor]:
    found = recorder.found

    def padded(column: Sequence[float], fill: float) -> list[float]:
        return [*column, *[fill] * (beam - len(column))]

    return {
        "counts": torch.tensor([len(recorder.last)]),
        "above": torch.tensor(recorder.above),
        "last": torch.tensor(recorder.last),
        "tokens": torch.tensor([padded(each.tokens, 0) for each in found], dtype=torch.int32),
        "logprobs": torch.tensor([padded(each.logprobs, float("-inf")) for each in found]),
        "entropies": torch.tensor([each.entropy for each in found]),
    }


def _drafts(position: dict[str, Tensor]) -> Drafts:
    paths: list[Tokens] = []
    for above, last in zip(position["above"].tolist(), position["last"].tolist(), strict=True):
        paths.append(() if above == ROOT else (*paths[above], last))
    numbers = {path: number for number, path in enumerate(paths)}
    return Drafts(numbers, position["tokens"], position["logprobs"], position["entropies"])


def _read(file: Path) -> Iterator[KnownText]:
    columns = load_file(file)
    ids = iter(columns["ids"].tolist())
    counts = columns["counts"].tolist()
    each = {name: columns[name].split(counts) for name in _COLUMNS[1:]}
    at = 0
    for prompt, length in zip(columns["prompts"].tolist(), columns["lengths"].tolist(), strict=True):
        known = KnownText([next(ids) for _ in range(prompt)], [next(ids) for _ in range(length)])
        for i in range(at, at + length - 2):
            known.drafts.append(_drafts({name: parts[i] for name, parts in each.items()}))
        at += length - 2
        yield known


class RecordedSource(DraftSource):
    """Drafts what was recorded along one text.

    Attributes:
        known: the text.
        scored, missing: nodes that it scored, and those of them that nothing was recorded for.
    """

    name = "recorded"

    def __init__(self, known: KnownText) -> None:
        self.known = known
        self.scored = 0
        self.missing = 0

    def scorer(self, requests: Sequence[Request], coupled: bool) -> Scorer:
        """One request at a time."""
        (request,) = requests
        return _RecordedScorer(self, len(request.ids) - len(self.known.prompt) - 1)

    def close(self, request: Request) -> None:
        pass


class _RecordedScorer(Scorer):
    """Finds the distributions of a position by the tokens from the root."""

    def __init__(self, source: RecordedSource, position: int) -> None:
        self._source, self._position = source, position
        self._paths: dict[int, Tokens] = {}

    def score(self, nodes: Sequence[UnscoredNode], width: int) -> list[Candidates]:
        """Nodes that were not recorded have no candidates."""
        drafts = self._source.known.drafts[self._position]
        for _, node, parent, token in nodes:
            self._paths[node] = () if node == ROOT else (*self._paths[parent], token)
        numbers = [drafts.numbers.get(self._paths[n.node], ROOT) for n in nodes]
        self._source.scored += len(numbers)
        self._source.missing += numbers.count(ROOT)
        top = (
            column.numpy()[numbers]
            for column in (drafts.tokens[:, :width], drafts.logprobs[:, :width], drafts.entropies)
        )
        pairs = zip(candidates_of_top(Top(*top)), numbers, strict=True)
        return [NO_CANDIDATES if number == ROOT else found for found, number in pairs]


@dataclass(slots=True)
class Recording:
    """A target, what drafts for it, and texts with the drafts along them, suite by suite."""

    target: HFModel
    source: DraftSource
    suites: dict[str, list[KnownText]]

    @property
    def texts(self) -> list[KnownText]:
        """Of all suites."""
        return [known for texts in self.suites.values() for known in texts]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which models, and which texts."""
    parser.add_argument("--target", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="head", help="one that does not learn as it drafts")
    parser.add_argument("--suites", default="spec-bench,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=13, help="prompts of each suite, from its categories in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--beam", type=int, default=BEAM, help="nodes of each layer that are recorded")
    parser.add_argument("--layers", type=int, default=DEPTH, help="layers of them: more than any method drafts")
    parser.add_argument("--cache", type=Path, help="folder for recorded drafts, for several runs")


def recorded(args: argparse.Namespace) -> Recording:
    """Record what ``add_options`` names.

    Raises:
        InputError: there is no such model or suite, the drafter learns or drafts nothing, or a size is below 1.
    """
    for name in ("beam", "layers"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}: use at least 1")
    items = {suite: choose(load_suite(suite), limit=args.limit) for suite in args.suites.split(",")}
    target = load_huggingface(args.target)
    if not isinstance(target, HFModel):
        raise ConfigError(f"{args.target} takes no draft trees: {target.capabilities.no_trees}")
    drafter = load_drafter(args.drafter, target, Eagle2Tree(args.beam, args.layers))
    if not isinstance(drafter, TreeDrafter) or drafter.learns:
        raise ConfigError(f"--drafter {args.drafter} learns, or drafts nothing: use a head, a model or lookup")
    made_for, suites = provenance(target, drafter.source, drafter.name), dict[str, list[KnownText]]()
    for suite, chosen in items.items():
        prompts = [encode(target.tokenizer, user(item.turns[0])) for item in chosen]
        made_of = json.dumps([asdict(made_for), args.max_tokens, args.beam, args.layers, prompts])
        digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
        file = args.cache and args.cache / f"{Path(args.drafter).name}-{Path(suite).stem}-{digest}.safetensors"
        found = record(target, drafter.source, prompts, args.max_tokens, file, (args.beam, args.layers))
        suites[suite] = list(track(found, f"recording {suite}", len(prompts), transient=True))
        print(f"{suite}: {len(suites[suite])} prompts, up to {args.max_tokens} tokens, drafter {args.drafter}")
    return Recording(target, drafter.source, suites)
