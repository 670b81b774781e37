"""A calibrated tree as a small JSON file: the models that it was made for, what was measured, and its nodes."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts import parse_json, user_path, write_whole
from ..errors import ConfigError, UnknownNameError
from .static import Pair, Ranks, RankTree

FORMAT = "draftree static tree"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the target's next token was the drafter's candidate of each rank.

    Attributes:
        trials: [D] nodes at depth d, the root's depth 0 first, whose next token was looked for.
        accepted: [D][R] how many of them had it at that rank.
    """

    trials: tuple[int, ...]
    accepted: tuple[tuple[int, ...], ...]

    @property
    def acceptance(self) -> Tensor:
        """[D, R] float64: share of the trials; 0 where there were none."""
        trials = torch.tensor(self.trials, dtype=torch.float64).clamp(min=1)
        return torch.tensor(self.accepted, dtype=torch.float64) / trials[:, None]

    @classmethod
    def parse(cls, trials: Any, accepted: Any) -> Counts:
        """Counts as they come out of JSON.

        Raises:
            ValueError: they are none.
        """
        counts = cls(tuple(trials), tuple(tuple(row) for row in accepted))
        whole = all(isinstance(n, int) and n >= 0 for row in (counts.trials, *counts.accepted) for n in row)
        fit = all(sum(row) <= n for n, row in zip(counts.trials, counts.accepted, strict=True))
        if not (whole and fit and len({len(row) for row in counts.accepted}) == 1):
            raise ValueError("the counts do not fit each other")
        return counts


@dataclass(frozen=True, slots=True)
class TreeFile:
    """What a tree file says.

    Attributes:
        made_for: the models that were measured.
        temperature: that the target decoded at.
        prompts: how many it decoded.
        counts: acceptance by depth and rank.
        expected_acceptance_length: E(A) of the tree, root counted as 1.
        tree: its nodes in the order in which smaller budgets take them.
    """

    made_for: Pair
    temperature: float
    prompts: int
    counts: Counts
    expected_acceptance_length: float
    tree: tuple[Ranks, ...]

    @property
    def policy(self) -> RankTree:
        """The tree as a growth policy for these models alone."""
        return RankTree(self.tree, self.made_for)

    def save(self, path: Path) -> None:
        """Write the file, one line a field and one line a depth.

        Raises:
            RunError: it cannot be written.
        """
        depths = ",\n".join(f"    {json.dumps(row)}" for row in self.counts.accepted)
        fields = {
            "format": json.dumps(FORMAT),
            "version": json.dumps(VERSION),
            "target": json.dumps(self.made_for.target),
            "drafter": json.dumps(self.made_for.drafter),
            "temperature": json.dumps(self.temperature),
            "prompts": json.dumps(self.prompts),
            "trials": json.dumps(self.counts.trials),
            "accepted": f"[\n{depths}\n  ]",
            "expected_acceptance_length": json.dumps(self.expected_acceptance_length),
            "tree": json.dumps(self.tree),
        }
        write_whole(path, "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in fields.items()) + "\n}\n")


def read_tree(name: str) -> TreeFile:
    """Read a tree file.

    Raises:
        UnknownNameError: there is no such file.
        ConfigError: it cannot be read, or is no tree file of this version.
    """
    path = user_path(name)
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UnknownNameError(f"no tree file {name!r}: make one with 'draftree calibrate'") from None
    except OSError as error:
        raise ConfigError(f"cannot read tree file {name}: {error.strerror}: {_WAY_OUT}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tree file {name} is not JSON ({error}): {_WAY_OUT}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{name} is JSON but no tree file: {_WAY_OUT}")
    if content.get("version") != VERSION:
        raise ConfigError(f"tree file {name} has version {content.get('version')}, not {VERSION}: {_WAY_OUT}")
    try:
        found = TreeFile(
            made_for=Pair(_text(content["target"]), _text(content["drafter"])),
            temperature=float(_number(content["temperature"])),
            prompts=operator.index(content["prompts"]),
            counts=Counts.parse(content["trials"], content["accepted"]),
            expected_acceptance_length=float(_number(content["expected_acceptance_length"])),
            tree=_paths(content["tree"]),
        )
        _ = found.policy  # raises where the nodes make no tree
    except KeyError as error:
        raise ConfigError(f"tree file {name} has no {error}: {_WAY_OUT}") from None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"tree file {name} is corrupt: {error}: {_WAY_OUT}") from None
    return found


_WAY_OUT = "give a file that 'draftree calibrate' wrote"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _number(value: Any) -> int | float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    return value  # type: ignore[no-any-return]


def _paths(value: Sequence[Sequence[int]]) -> tuple[Ranks, ...]:
    return tuple(tuple(path) for path in value)
