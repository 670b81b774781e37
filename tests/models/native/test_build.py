"""The native engine's library: what it exports, and what is installed where it cannot be built."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from native import build

ROOT = Path(__file__).parents[3]


def test_it_exports_the_functions_of_its_header_alone(tmp_path: Path) -> None:
    library = build.build(tmp_path)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)  # noqa: S603, S607 - binutils
    declared = re.findall(r"\b(draftree_\w+)\(", (ROOT / "native" / "draftree.h").read_text())
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == set(declared)


def _wheel(folder: Path, compiler: str) -> Path:
    script = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run(  # noqa: S603 - our own build
        [sys.executable, "-c", script, folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, "CC": compiler},
    )
    return next(folder.glob("*.whl"))


def test_the_wheel_has_the_library_and_is_for_this_platform_alone(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "cc")
    assert re.search(r"-py3-none-(?!any)\w+\.whl", wheel.name)
    assert "draftree/models/native/libdraftree.so" in ZipFile(wheel).namelist()


def test_without_a_compiler_the_wheel_is_for_every_platform_and_has_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert build.find_compiler() is None and build.needs() == [build.ZIG]
    wheel = _wheel(tmp_path, str(tmp_path / "none"))
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
