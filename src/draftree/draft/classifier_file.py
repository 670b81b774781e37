"""A classifier as a small JSON file: its numbers, the models that it was trained for, on what, and how good it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..artifacts import user_path, write_whole
from ..errors import ConfigError, UnknownNameError
from ..typed import typed
from .classifier import Classifier, Provenance

FORMAT = "draftree classifier"
VERSION = 2
SHIPPED = Path(__file__).parent.parent / "classifiers"
"""Folder of the classifiers that come with the package."""
DEFAULT = "smollm2-head"
"""The one for SmolLM2-135M-Instruct and its head."""
DEFAULT_WIDTH = "smollm2-head-width"
"""Of entropy and rank, for the same pair."""
_LARGEST = 1 << 20
"""Bytes: a file of ours has some thousand."""


@dataclass(frozen=True, slots=True)
class ClassifierFile:
    """What a classifier file says.

    Attributes:
        classifier: the net.
        made_for: the models whose drafts it learned from.
        trained_on: data and recipe, for people.
        held_out: figures on prompts kept apart, for people.
    """

    classifier: Classifier
    made_for: Provenance
    trained_on: dict[str, Any]
    held_out: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the file, one line a field and one line a hidden unit.

        Raises:
            RunError: it cannot be written.
        """
        net = self.classifier
        units = ",\n".join(f"    {json.dumps(row)}" for row in net.hidden)
        fields = {
            "format": json.dumps(FORMAT),
            "version": json.dumps(VERSION),
            **{key: json.dumps(value) for key, value in asdict(self.made_for).items()},
            "features": json.dumps(net.features),
            "given_parent": json.dumps(net.given_parent),
            "hidden": f"[\n{units}\n  ]",
            "bias": json.dumps(net.bias),
            "output": json.dumps(net.output),
            "threshold": json.dumps(net.threshold),
            "trained_on": json.dumps(self.trained_on),
            "held_out": json.dumps(self.held_out),
        }
        write_whole(path, "{\n" + ",\n".join(f'  "{key}": {value}' for key, value in fields.items()) + "\n}\n")


@typed
def read_classifier(name: str) -> ClassifierFile:
    """Read a classifier file, or one that comes with the package, by its name.

    Raises:
        UnknownNameError: there is no such file.
        ConfigError: it cannot be read, or is no classifier file of this version.
    """
    shipped = {path.stem: path for path in SHIPPED.glob("*.json")}
    path = shipped.get(name) or user_path(name)
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"classifier file {name} is larger than {_LARGEST} bytes: {_WAY_OUT}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(shipped))
        raise UnknownNameError(
            f"no classifier {name!r}: make one with 'draftree train classifier', or choose from {names}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read classifier file {name}: {error.strerror}: {_WAY_OUT}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"classifier file {name} is not JSON: {_WAY_OUT}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{name} is JSON but no classifier file: {_WAY_OUT}")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"classifier file {name} has version {content.get('version')}, not {VERSION}: make it again with "
            "'draftree train classifier'"
        )
    try:
        return ClassifierFile(
            classifier=Classifier(
                features=tuple(map(_text, content["features"])),
                hidden=tuple(map(_numbers, content["hidden"])),
                bias=_numbers(content["bias"]),
                output=_numbers(content["output"]),
                threshold=_numbers([content["threshold"]])[0],
                given_parent=_truth(content["given_parent"]),
            ),
            made_for=Provenance(**{column.name: _text(content[column.name]) for column in fields(Provenance)}),
            trained_on=_mapping(content["trained_on"]),
            held_out=_mapping(content["held_out"]),
        )
    except KeyError as error:
        raise ConfigError(f"classifier file {name} has no {error}: {_WAY_OUT}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"classifier file {name} is corrupt: {error}: {_WAY_OUT}") from None


_WAY_OUT = "give a file that 'draftree train classifier' wrote"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise TypeError("its weights are no numbers")
    return tuple(map(float, values))


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no description")
    return value
