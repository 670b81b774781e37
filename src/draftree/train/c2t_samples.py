"""Training samples of a classifier: nodes of full draft trees, each with whether the target accepted it.

The target's own responses are drafted again with trees that nothing has pruned (C2T: depth 11, 10 children of each of
a layer's 10 best nodes). With match verification the accepted path is the longest one that the text follows, so labels
are those of such decoding, and no target pass goes into a thousand drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from ..config import Checked, Count, option
from ..drafters.base import Drafter
from ..models.base import LanguageModel
from ..papers.c2t import FEATURES, features, of_tree
from ..policies.base import GrowthPolicy
from ..policies.best_paths import Eagle2Tree
from ..tree import DraftTree
from .responses import MAX_ROWS, DataRecipe, Response, replayed, respond, seed_of
from .shards import Shards

WIDTH, LEVELS = 10, 11
NODES = WIDTH + (LEVELS - 1) * WIDTH**2
"""Of a full tree; with its root 1011, as published."""


def full_trees() -> GrowthPolicy:
    """The trees that samples come from: within a budget of ``NODES`` nothing is pruned."""
    return Eagle2Tree(width=WIDTH, depth=LEVELS)


class Samples(NamedTuple):
    """M nodes.

    Attributes:
        features: [M, F] float32, all of ``FEATURES`` in their order.
        accepted: [M] bool, the node was on the accepted path.
        numbers: [M] int64, of the prompt.
    """

    features: Tensor
    accepted: Tensor
    numbers: Tensor

    def take(self, which: Tensor) -> Samples:
        return Samples(*(column[which] for column in self))

    def columns(self, names: Sequence[str]) -> Tensor:
        """[M, n] the features of these names."""
        known = list(FEATURES)
        return self.features[:, [known.index(name) for name in names]]

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        empty = cls(torch.zeros(0, len(FEATURES)), torch.zeros(0).bool(), torch.zeros(0).long())
        return cls(*(torch.cat(columns) for columns in zip(empty, *parts, strict=True)))

    def split(self, every: int) -> tuple[Samples, Samples]:
        """Those to learn from, and those of one prompt in ``every``, which are kept apart."""
        apart = self.numbers % every == every - 1
        return self.take(~apart), self.take(apart)


def samples_of(tree: DraftTree, path: Sequence[int], number: int) -> Samples:
    """All nodes of a full tree of which the target accepted ``path``."""
    accepted = torch.zeros(len(tree), dtype=torch.bool)
    accepted[list(path)] = True
    given = torch.from_numpy(features(of_tree(tree), tuple(FEATURES)))
    return Samples(given, accepted, torch.full((len(tree),), number))


def thinned(samples: Samples, share: float, generator: torch.Generator) -> Samples:
    """All accepted nodes, and each other one with probability ``share``."""
    drawn = torch.rand(len(samples.accepted), generator=generator) < share
    return samples.take(samples.accepted | drawn)


@torch.inference_mode()
def samples_along(drafter: Drafter, response: Response, seed: int, share: float, target: LanguageModel) -> Samples:
    """Samples from decoding a response again with full trees.

    Args:
        drafter: grows ``full_trees``.
        response: the target's, drawn with ``seed``.
        share: of nodes that were not accepted to keep.
    """
    generator = torch.Generator().manual_seed(seed_of(response.number, seed))
    parts: list[Samples] = []
    with replayed(drafter, response, seed, target) as replay:
        while replay.left:
            tree, path = replay.step(NODES)
            parts.append(thinned(samples_of(tree, path, response.number), share, generator))
    return Samples.joined(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecipe(DataRecipe):
    """How samples are drawn; equal ones may be added to one another.

    Attributes:
        drafter: its name.
        target_weights, drafter_weights: fingerprints.
        negatives: share of the nodes that were not accepted to keep.
    """

    drafter: str
    target_weights: str
    drafter_weights: str
    negatives: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions(Checked):
    """How many samples are drawn, and of what."""

    samples: Count = option("Nodes of draft trees to learn from, if there are prompts enough.", 600_000, metavar="N")
    negatives: Annotated[float, Interval(gt=0, le=1)] = option(
        "Share of the nodes that the target does not accept to keep; the score makes up for it.", 0.1, metavar="R"
    )
    max_tokens: Annotated[int, Ge(2)] = option("Most tokens of a response.", 96, metavar="N")
    rows: Annotated[int, Interval(ge=1, le=MAX_ROWS)] = option("Responses that are drawn together.", 16, metavar="N")
    apart: Annotated[int, Interval(ge=2, lt=2**63)] = option(
        "One prompt in N is kept apart, to choose among epochs and for the figures.", 20, metavar="N"
    )
    data: str | None = option("Folder of the samples, for several fits; else FILE.samples.", metavar="DIR")


class SampleStore:
    """Samples in a folder: a file for each prompt.

    Attributes:
        counts: prompt -> samples of it that are there.

    Raises:
        ConfigError: the folder has samples of another recipe.
        ModelFileError: a file cannot be read.
    """

    def __init__(self, folder: Path, recipe: SampleRecipe) -> None:
        self.recipe = recipe
        self._shards = Shards(folder, "samples", {**asdict(recipe), "features": list(FEATURES)})
        self._shards.check("remove the folder")
        self.counts = {n: len(self._shards.read(file, "accepted")[0]) for n, file in self._shards.files.items()}

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def add(self, number: int, samples: Samples) -> None:
        """Write the samples of a prompt.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        self._shards.write(number, samples._asdict())
        self.counts[number] = len(samples.accepted)

    def first(self, most: int) -> list[int]:
        """The first prompts that have ``most`` samples together, in order; all prompts, where they have fewer."""
        numbers, count = list[int](), 0
        for number in sorted(self.counts):
            if count >= most:
                break
            numbers.append(number)
            count += self.counts[number]
        return numbers

    def samples(self, numbers: Iterable[int]) -> Samples:
        """Those of these prompts."""
        files = self._shards.files
        return Samples.joined([Samples(*self._shards.read(files[n], *Samples._fields)) for n in numbers])


def collect(
    store: SampleStore,
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    most: int,
    rows: int,
    progress: Callable[[int], None],
) -> None:
    """Draw samples until there are ``most``, or all prompts are done; interrupted, keeps what is finished.

    Args:
        drafter: grows ``full_trees``, and has been prepared.
        prompts: token ids of all prompts.
        rows: responses that the target gives together.
        progress: called with how many samples there are.
    """
    recipe = store.recipe

    def wanted() -> Iterator[int]:
        for number in range(len(prompts)):
            if store.count >= most:
                return
            if number not in store.counts:
                yield number

    drawn = respond(target, prompts, wanted(), rows=rows, max_tokens=recipe.max_tokens, seed=recipe.seed)
    with closing(drawn):
        for response in drawn:
            if store.count >= most:
                return
            samples = samples_along(drafter, response, recipe.seed, recipe.negatives, target)
            store.add(response.number, samples)
            progress(min(store.count, most))
