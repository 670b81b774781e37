"""Options made from the fields of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from draftree.beams.forest import BeamParams
from draftree.cli.main import app
from draftree.cli.options import ComputeOptions, TraceOptions, flag_of, with_options
from draftree.config import SamplingParams, option
from draftree.engine.speculation import SpeculationParams
from draftree.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    width: int = option("Of it.", 3)
    names: tuple[str, ...] = option("Of all.", (), name="--name")
    early: bool | str = option("When.", False, choices={"yes": True, "never": "never"})
    quiet: bool = option("Say little.", False)
    inner: int = 7


def called(*arguments: str, optional: bool = False) -> Any:
    found: list[Shape | None] = []

    def always(*, shape: Shape) -> None:
        found.append(shape)

    def perhaps(*, shape: Shape | None) -> None:
        found.append(shape)

    single = typer.Typer()
    single.command()(with_options(perhaps if optional else always))
    result = CliRunner().invoke(single, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


def test_a_dataclass_is_filled_from_its_options() -> None:
    assert called() == Shape()
    given = called("--width", "5", "--name", "a", "--name", "b", "--early", "never", "--quiet")
    assert given == Shape(5, ("a", "b"), "never", True)


def test_an_optional_dataclass_is_made_where_its_first_option_is_given() -> None:
    assert called(optional=True) is None
    assert called("--width", "4", optional=True) == Shape(4)
    with pytest.raises(ConfigError, match="--quiet .* goes with --width"):
        called("--quiet", optional=True)


def test_a_value_that_is_no_choice_is_named() -> None:
    with pytest.raises(ConfigError, match="--early often: .*yes, never"):
        called("--early", "often")


def test_generate_has_every_option_of_its_dataclasses() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"]).output
    for kind in (SpeculationParams, SamplingParams, TraceOptions, BeamParams, ComputeOptions):
        assert all(f"  {flag_of(f)} " in shown for f in fields(kind) if "help" in f.metadata)
