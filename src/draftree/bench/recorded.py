"""Draft laws along known texts, asked for once: many policies can then be held against the same texts in seconds.

From every position of a text a drafter is asked about the most probable nodes of each layer; what it says is
kept, in memory and, for the next run, in a file. ``RecordedSource`` says it again in the growth loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import pad

from ..artifacts import write_whole
from ..config import MAX_NODES, Budget, SamplingParams
from ..drafters.base import NoDrafter, TreeDrafter
from ..drafters.distributions import Drawing, Drawn
from ..drafters.source import Grown, Scorer, Source
from ..engine import Engine
from ..errors import ConfigError
from ..models.base import LanguageModel
from ..models.huggingface import HFModel
from ..outcome import Outcome
from ..policies.base import Candidates
from ..policies.best_paths import Eagle2Tree
from ..request import Request
from ..train.rank_acceptance import decoded
from ..train.replay import Replay
from ..tree import ROOT

BEAM, DEPTH = 16, 10
"""Nodes of a layer that are asked about, and layers, unless others are wanted."""
Tokens = tuple[int, ...]
_COLUMNS = ("counts", "above", "last", "tokens", "logprobs", "entropies")


@dataclass(slots=True)
class Laws:
    """What a drafter says from one position of a text.

    Attributes:
        places: tokens from the root down -> the law's number.
        tokens, logprobs: [F, K] of the laws.
        entropies: [F] nats.
    """

    places: dict[Tokens, int]
    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


@dataclass(slots=True)
class KnownText:
    """A prompt, the target's greedy answer, and the draft laws from each of its tokens but the last two.

    Attributes:
        prompt, text: token ids.
        laws: [len(text) - 2] from the position behind each token.
    """

    prompt: list[int]
    text: list[int]
    laws: list[Laws] = field(default_factory=list)


class _Recorder:
    """A scorer that keeps what another one says.

    Attributes:
        above, last: of each law, the number of the law above it and the token between them.
        said: layer by layer.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._numbers: dict[int, int] = {}
        self.above: list[int] = []
        self.last: list[int] = []
        self.said: list[Candidates] = []

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """See ``Scorer``."""
        return self._keep([(ROOT, ROOT, 0)], self._scorer.score_roots(rows, width))

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked = list(zip(nodes.tolist(), parents.tolist(), tokens.tolist(), strict=True))
        return self._keep(asked, self._scorer.score(rows, nodes, parents, tokens, width))

    def _keep(self, asked: list[tuple[int, int, int]], found: Candidates) -> Candidates:
        for node, parent, token in asked:
            self.above.append(self._numbers.get(parent, ROOT))
            self.last.append(token)
            self._numbers[node] = len(self.last) - 1
        self.said.append(found)
        return found

    def draw(self, counts: Tensor) -> Drawn:
        """See ``Scorer``."""
        return self._scorer.draw(counts)


class _Recording(Source):
    """A source whose scorers are recorded."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.recorder: _Recorder | None = None

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def host(self) -> LanguageModel | None:
        """The source's."""
        return self._source.host

    def open(self, request: Request) -> None:
        """See ``Source``."""
        self._source.open(request)

    def fit(self, request: Request, budget: Budget) -> Budget:
        """See ``Source``."""
        return self._source.fit(request, budget)

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """See ``Source``."""
        self.recorder = _Recorder(self._source.begin(requests, drawing))
        return self.recorder

    def settle(self, requests: Sequence[Request], grown: Sequence[Grown]) -> None:
        """See ``Source``."""
        self._source.settle(requests, grown)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See ``Source``."""
        self._source.observe(outcomes)

    def close(self, request: Request) -> None:
        """See ``Source``."""
        self._source.close(request)


def record(
    target: HFModel,
    source: Source,
    prompts: Sequence[list[int]],
    max_tokens: int,
    file: Path | None = None,
    size: tuple[int, int] = (BEAM, DEPTH),
) -> Iterator[KnownText]:
    """Decode prompts greedily and record what ``source`` says along the answers; or read it from ``file``.

    Args:
        target, source, prompts, max_tokens: what is decoded.
        file: to read, or to write.
        size: how many nodes of each layer the source is asked about, and how many layers.
    """
    beam, depth = size
    if file is not None and file.is_file():
        yield from _read(file)
        return
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    plain, recording, params = Engine(target, NoDrafter()), _Recording(source), SamplingParams(max_tokens=max_tokens)
    drafter = TreeDrafter(Eagle2Tree(beam, depth), recording)
    columns: dict[str, list[Tensor]] = {name: [] for name in (*_COLUMNS, "prompts", "lengths", "ids")}
    for prompt in prompts:
        text, features = decoded(plain, prompt, params)
        if len(text) < 3:
            continue
        positions = []
        with Replay(drafter, prompt, text, params, features) as replay, torch.inference_mode():
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
        yield KnownText(prompt, text, [_laws(position) for position in positions])
    if file is not None:
        write_whole(file, save({name: torch.cat(parts) for name, parts in columns.items()}))


def _columns(recorder: _Recorder, beam: int) -> dict[str, Tensor]:
    said = recorder.said
    return {
        "counts": torch.tensor([len(recorder.last)]),
        "above": torch.tensor(recorder.above),
        "last": torch.tensor(recorder.last),
        "tokens": torch.cat([pad(s.tokens, (0, beam - s.tokens.shape[1])) for s in said]),
        "logprobs": torch.cat([pad(s.logprobs, (0, beam - s.logprobs.shape[1]), value=float("-inf")) for s in said]),
        "entropies": torch.cat([s.entropies for s in said]),
    }


def _laws(position: dict[str, Tensor]) -> Laws:
    paths: list[Tokens] = []
    for above, last in zip(position["above"].tolist(), position["last"].tolist(), strict=True):
        paths.append(() if above == ROOT else (*paths[above], last))
    places = {path: number for number, path in enumerate(paths)}
    return Laws(places, position["tokens"], position["logprobs"], position["entropies"])


def _read(file: Path) -> Iterator[KnownText]:
    columns = load_file(file)
    ids = iter(columns["ids"].tolist())
    counts = columns["counts"].tolist()
    each = {name: columns[name].split(counts) for name in _COLUMNS[1:]}
    at = 0
    for prompt, length in zip(columns["prompts"].tolist(), columns["lengths"].tolist(), strict=True):
        known = KnownText([next(ids) for _ in range(prompt)], [next(ids) for _ in range(length)])
        for i in range(at, at + length - 2):
            known.laws.append(_laws({name: parts[i] for name, parts in each.items()}))
        at += length - 2
        yield known


class RecordedSource(Source):
    """Says again what was recorded along one text.

    Attributes:
        known: the text.
        asked, missing: nodes that it was asked about, and those of them that nothing was recorded for.
        layers: how often it was asked.
    """

    def __init__(self, known: KnownText) -> None:
        self.known = known
        self.asked = 0
        self.missing = 0
        self.layers = 0

    @property
    def name(self) -> str:
        """What it is."""
        return "recorded"

    def begin(self, requests: Sequence[Request], drawing: Drawing) -> Scorer:
        """One request at a time."""
        (request,) = requests
        return _Said(self, len(request.ids) - len(self.known.prompt) - 1)

    def close(self, request: Request) -> None:
        """Nothing is kept."""


class _Said:
    """Reads the laws of a position by the tokens from the root."""

    def __init__(self, source: RecordedSource, position: int) -> None:
        self._source, self._position = source, position
        self._paths: dict[int, Tokens] = {ROOT: ()}

    def score_roots(self, rows: Sequence[int], width: int) -> Candidates:
        """See ``Scorer``."""
        return self._said([()], width)

    def score(self, rows: Tensor, nodes: Tensor, parents: Tensor, tokens: Tensor, width: int) -> Candidates:
        """See ``Scorer``."""
        asked = zip(nodes.tolist(), parents.tolist(), tokens.tolist(), strict=True)
        new = {node: (*self._paths[parent], token) for node, parent, token in asked}
        self._paths |= new
        return self._said(list(new.values()), width)

    def _said(self, paths: list[Tokens], width: int) -> Candidates:
        """What is not known is said to have no candidates."""
        laws = self._source.known.laws[self._position]
        places = [laws.places.get(path, ROOT) for path in paths]
        self._source.asked += len(places)
        self._source.layers += 1
        self._source.missing += places.count(ROOT)
        known = torch.tensor(places)
        logprobs = laws.logprobs[known, :width].masked_fill((known == ROOT)[:, None], float("-inf"))
        return Candidates(laws.tokens[known, :width], logprobs, laws.entropies[known])

    def draw(self, counts: Tensor) -> Drawn:
        """Never asked for: what was recorded is verified by match."""
        raise ConfigError("recorded laws do not draw children: use verification match")
