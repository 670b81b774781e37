"""Builds that end the process at a read or write outside of its memory, and at undefined behaviour."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native import build

CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all")
"""A null pointer, and an object that is left, end the process by AddressSanitizer alone."""
FLAGS = (*CHECKS, "-O1", "-g1", "-fno-omit-frame-pointer", "--param=asan-instrumentation-with-call-threshold=0")
"""Calls instead of inlined checks compile in two thirds of the time."""


def compiler_and_runtime() -> tuple[build.Compiler, str]:
    """The compiler, and the library that a process loads first if it loads such a build; skips where there is none."""
    compiler = build.find_compiler()
    command = [] if compiler is None or compiler.zig else [*compiler.command, "-print-file-name=libasan.so"]
    runtime = command and subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    if compiler is None or not runtime or not Path(runtime).is_absolute():
        pytest.skip("no C compiler with AddressSanitizer")
    return compiler, runtime


def link(output: Path, *flags: str, files: tuple[str, ...] = ()) -> Path:
    """``build.link`` with all checks. AVX-VNNI has none of its own: its file is AVX2's, with another dot product."""
    compiler, _ = compiler_and_runtime()
    units = build.units(compiler, *files)
    plain = [unit for unit in units if "-DAVX_VNNI" in unit.flags]
    checked = [unit._replace(flags=(*unit.flags, *FLAGS, "-Werror")) for unit in units if unit not in plain]
    return build.link(output, compiler, [*plain, *checked], *CHECKS, *flags)
