"""The native engine's library: what it exports, and what is installed where it cannot be built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from native import build
from tests.conftest import build_wheel

ROOT = Path(__file__).parents[3]


def test_it_exports_the_functions_of_its_header_alone(tmp_path: Path) -> None:
    library = build.build(tmp_path)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)  # noqa: S603, S607 - binutils
    declared = re.findall(r"\b(draftree_\w+)\(", (ROOT / "native" / "draftree.h").read_text())
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == set(declared)


def test_the_wheel_has_the_library_and_is_for_this_platform_alone(wheel: Path) -> None:
    assert re.search(r"-py3-none-(?!any)\w+\.whl", wheel.name)
    assert "draftree/models/native/libdraftree.so" in ZipFile(wheel).namelist()


def test_without_a_compiler_the_wheel_is_for_every_platform_and_has_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert build.find_compiler() is None and build.needs() == [build.ZIG]
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")  # it is not found
    wheel = build_wheel(tmp_path, CC=str(tmp_path / "none"), PYTHONPATH=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if "libdraftree" in name]


def test_a_compiler_without_our_instruction_sets_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2015 knows AVX2 but not AVX-512 VNNI; it would fail in the middle of the build."""
    old = tmp_path / "old-cc"
    old.write_text('#!/bin/sh\ncase "$*" in *vnni*) exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert build.find_compiler() is None


def test_zig_is_pinned_as_the_build_requires_it() -> None:
    assert build.ZIG in (ROOT / "constraints.txt").read_text().splitlines()
