"""Samples on disk, and how they get there: prompt by prompt, kept in shards, gone on with after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..artifacts import write_whole
from ..draft.base import Drafter
from ..errors import ConfigError, ModelFileError, RunError
from ..models.huggingface import HFModel
from ..policies.c2t import FEATURES
from .draw import respond
from .samples import Samples, check_finite, samples_along

SHARD = 1 << 15
"""Samples of a file."""
_BYTES = 4 * len(FEATURES) + 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecipe:
    """How samples are drawn; equal ones may be added to one another.

    Attributes:
        target, drafter: names.
        target_weights, drafter_weights: their fingerprints.
        prompts: digest of all prompts in order.
        max_tokens: most tokens of a response.
        negatives: share of the nodes that were not accepted to keep.
        seed: of the order of the prompts, of the responses and of the share.
        dtype: of the target.

    Raises:
        ConfigError: a value is out of range.
    """

    target: str
    target_weights: str
    drafter: str
    drafter_weights: str
    prompts: str
    max_tokens: int
    negatives: float
    seed: int
    dtype: str

    def __post_init__(self) -> None:
        check_recipe(self.max_tokens, self.negatives, self.seed)


def check_recipe(max_tokens: int, negatives: float, seed: int) -> None:
    """Make sure that samples can be drawn so.

    Raises:
        ConfigError: a value is out of range.
    """
    if max_tokens < 2:
        raise ConfigError(f"max_tokens is {max_tokens}: use at least 2, for one token to draft")
    if not 0 < negatives <= 1:
        raise ConfigError(f"negatives is {negatives}: keep a share of them above 0 and up to 1")
    if not 0 <= seed < 2**62:
        raise ConfigError(f"seed is {seed}: use a whole number from 0 to 2^62 - 1")


@dataclass(slots=True)
class SampleStore:
    """Samples in a folder: shards, each in one piece or not at all, and ``recipe.json``.

    Attributes:
        folder: where they are.
        recipe: how they are drawn.
        done: prompts whose samples are there.
        count: samples that are there.
        trees: that they are of.
    """

    folder: Path
    recipe: SampleRecipe
    done: set[int] = field(default_factory=set)
    count: int = 0
    trees: int = 0
    _shards: int = 0
    _waiting: list[Samples] = field(default_factory=list)
    _finished: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, recipe: SampleRecipe, *, force: bool = False) -> SampleStore:
        """What is in a folder; with ``force`` what is of another recipe is dropped.

        Raises:
            ConfigError: it is of another recipe.
            ModelFileError: a shard cannot be read.
        """
        store, path = cls(folder, recipe), folder / "recipe.json"
        shards = sorted(folder.glob("samples-*.safetensors"))
        try:
            same = json.loads(path.read_text(encoding="utf-8")) == asdict(recipe)
        except FileNotFoundError:
            same = not shards
        except (OSError, ValueError):
            same = False
        if not same and force:
            for shard in shards:
                shard.unlink()
            path.unlink(missing_ok=True)
            shards = []
        elif not same:
            raise ConfigError(
                f"{folder} holds samples of other models, prompts or settings: repeat that command to go on with them, "
                "or drop them with --force"
            )
        for shard in shards:
            columns = _read(shard)
            store.done.update(columns["prompts"].tolist())
            store.count += len(columns["accepted"])
            store.trees += int(columns["trees"].sum())
        store._shards = len(shards)
        return store

    def add(self, number: int, samples: Samples, trees: int) -> None:
        """Keep the samples of a prompt; they are on disk once their shard is full, or after ``flush``."""
        self._waiting.append(samples)
        self._finished.append((number, trees))
        self.done.add(number)
        self.count += len(samples.accepted)
        self.trees += trees
        if sum(len(s.accepted) for s in self._waiting) >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what is not on disk yet.

        Raises:
            RunError: the disk is full, or cannot be written.
        """
        if not self._finished:
            return
        samples, finished = Samples.joined(self._waiting), torch.tensor(self._finished)
        self._waiting, self._finished = [], []
        columns = samples._asdict() | {"prompts": finished[:, 0], "trees": finished[:, 1]}
        path = self.folder / f"samples-{self._shards:05d}.safetensors"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make folder {self.folder}: {error.strerror}: choose another place") from None
        if not self._shards:
            write_whole(self.folder / "recipe.json", json.dumps(asdict(self.recipe), indent=1) + "\n")
        write_whole(path, save({name: column.contiguous() for name, column in columns.items()}))
        self._shards += 1

    def samples(self) -> Samples:
        """All that is on disk, in the order of their prompts."""
        found = [_read(path) for path in sorted(self.folder.glob("samples-*.safetensors"))]
        every = Samples.joined([Samples(*(c[name] for name in Samples._fields)) for c in found])
        return every.take(every.numbers.argsort(stable=True))


def _read(path: Path) -> dict[str, Tensor]:
    try:
        columns = load_file(path)
        shapes = {name: tuple(columns[name].shape[1:]) for name in (*Samples._fields, "prompts", "trees")}
        if shapes.pop("features") != (len(FEATURES),) or set(shapes.values()) != {()}:
            raise ValueError("another format")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelFileError(f"cannot read {path}: {error}: remove it; its samples will be drawn again") from None
    return columns


def check_room(folder: Path, samples: int) -> None:
    """Make sure that the disk can hold so many samples.

    Raises:
        ConfigError: it cannot.
    """
    needed = samples * _BYTES
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    if needed > free:
        raise ConfigError(
            f"{samples} samples need {needed} bytes on disk and {folder.parent} has {free} free: "
            "ask for fewer --samples, or choose another folder with --data"
        )


def collect(
    store: SampleStore,
    target: HFModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    most: int,
    rows: int,
    tell: Callable[[int], None],
) -> None:
    """Draw samples until there are ``most``, or all prompts are done; interrupted, keeps what is finished.

    Args:
        drafter: grows ``full_trees``, and has been prepared.
        prompts: token ids of all prompts.
        rows: responses that the target gives together.
        tell: called with how many samples there are.

    Raises:
        RunError: a feature is not a number.
    """
    recipe, can, verifier = store.recipe, target.capabilities, target if drafter.successors else None

    def wanted() -> Iterator[int]:
        for number in range(len(prompts)):
            if store.count >= most:
                return
            if number not in store.done:
                yield number

    drawn = respond(target, prompts, wanted(), rows=rows, max_tokens=recipe.max_tokens, seed=recipe.seed)
    try:
        with closing(drawn) as responses:
            for response in responses:
                if store.count >= most:
                    return
                read = replace(response, features=response.features.to(can.device, can.dtype))
                samples, trees = samples_along(drafter, read, recipe.seed, recipe.negatives, verifier)
                check_finite(samples)
                store.add(response.number, samples, trees)
                tell(min(store.count, most))
    finally:
        store.flush()
