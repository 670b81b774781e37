"""Builds that end the process at a read or write outside of its memory, and at undefined behaviour.

Where the compiler has no AddressSanitizer (zig), they are plain builds: the same tests then see crashes alone.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from native import build

_UNCHECKED = "-fno-sanitize=null,object-size,pointer-overflow"
"""A null pointer, an object that is left and a pointer that wraps end the process by AddressSanitizer alone: where they
are used. Checks of each sum of pointers would take a third of the time to compile."""
_CHECKS = ("-fsanitize=address,undefined", _UNCHECKED, "-fno-sanitize-recover=all")
_FLAGS = (*_CHECKS, "-O1", "-g1", "-fno-omit-frame-pointer", "--param=asan-instrumentation-with-call-threshold=0")
"""Calls instead of inlined checks compile in two thirds of the time."""


def _compiler() -> build.Compiler:
    compiler = build.find_compiler()
    assert compiler is not None, "there is no C compiler: make setup installs zig where there is none"
    return compiler


def runtime() -> str:
    """The library that a process loads first if it loads such a build; "": none."""
    compiler = _compiler()
    if compiler.zig:
        return ""
    command = [*compiler.command, "-print-file-name=libasan.so"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    return found if Path(found).is_absolute() else ""


def link(output: Path, *flags: str, files: tuple[str, ...] = ()) -> Path:
    """``build.link`` with all checks. AVX-VNNI has none of its own: its file is AVX2's, with another dot product."""
    compiler = _compiler()
    compiling, linking = (_FLAGS, _CHECKS) if runtime() else ((), ())
    units = build.units(compiler, *files)
    plain = [unit for unit in units if "-DAVX_VNNI" in unit.flags]
    checked = [unit._replace(flags=(*unit.flags, *compiling, "-Werror")) for unit in units if unit not in plain]
    return build.link(output, compiler, [*plain, *checked], *linking, *flags)
