"""The native engine's library: what it exports, and no wheel is made without it."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from native import build
from tests.conftest import build_distribution

ROOT = Path(__file__).parents[3]


def test_it_exports_the_functions_of_its_header_alone(tmp_path: Path) -> None:
    library = build.build(tmp_path)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)  # noqa: S603, S607 - binutils
    headers = "".join(path.read_text() for path in (ROOT / "native").glob("draftree*.h"))
    declared = re.findall(r"\b(draftree_\w+)\(", headers)
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == set(declared)


def test_the_wheel_has_the_library_and_is_for_the_glibc_that_it_needs(wheel: Path) -> None:
    """It once had the tag linux_x86_64, which no index takes."""
    assert "draftree/models/native/libdraftree.so" in ZipFile(wheel).namelist()
    command = ["objdump", "-T", str(build.INSTALLED / "libdraftree.so")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - binutils
    glibc = max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", listed.stdout))
    assert wheel.name == f"draftree-0.1.0-py3-none-manylinux_2_{max(17, glibc)}_{platform.machine()}.whl"


def test_a_library_that_needs_what_not_every_linux_has_is_not_packed(tmp_path: Path) -> None:
    """Such as the OpenMP of a compiler's flags."""
    source, library = tmp_path / "needs.c", tmp_path / "libdraftree.so"
    source.write_text("#include <math.h>\ndouble needs(double x) { return exp(x); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-lm"], check=True)  # noqa: S603, S607 - the compiler
    assert re.fullmatch(r"manylinux_2_\d\d_\w+", build.wheel_platform(library))
    library.write_bytes(library.read_bytes().replace(b"libm.so.6\0", b"libx.so.6\0"))
    with pytest.raises(build.BuildError, match=r"libx\.so\.6: .*CFLAGS, .*CC=zig"):
        build.wheel_platform(library)


def test_without_a_compiler_no_wheel_is_made_and_one_line_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert build.find_compiler() is None and build.needs() == [build.ZIG]
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")  # it is not found
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_distribution("wheel", tmp_path, CC=str(tmp_path / "none"), PYTHONPATH=str(tmp_path))
    (line,) = failed.value.stderr.splitlines()
    assert line.startswith("draftree's native engine cannot be built: ") and f"pip install {build.ZIG}" in line
    assert not list(tmp_path.glob("*.whl"))


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build_distribution("wheel", tmp_path, DRAFTREE_TARGET="vax-vms")
    assert "DRAFTREE_TARGET is 'vax-vms': choose from x86_64-linux-gnu.2.17, " in failed.value.stderr


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
