"""Build the native engine: the C files of this folder make one library, beside the module that loads it.

    python native/build.py            for this machine, into src/draftree/models/native
    python native/build.py --cross    for others, with zig, into build/native: whether it compiles and links there
    python native/build.py --needs    print what must be installed first, if anything

The compiler is $CC or cc, or zig (the package ziglang) where there is none that knows our instruction sets. $CFLAGS are
added. This is also the build hook of the wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "native"
INSTALLED = ROOT / "src" / "draftree" / "models" / "native"
OBJECTS = ROOT / "build" / "native"

FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra")

_AVX2 = ("-mavx2", "-mf16c", "-mfma")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))
_NEON, _ZIG_NEON = ("-march=armv8.2-a+dotprod+fp16",), ("-mcpu=generic+v8_2a+dotprod+fullfp16",)
TIERS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx2": _AVX2, "avx512": _AVX512},
    "aarch64": {"neon": _NEON},
}
"""Machine -> instruction set -> its flags, for files whose names end so, such as linear_avx2.c."""
KERNELS = ("formats.c", "cpu.c", "linear_*.c", "vector_*.c")
"""Files that work without a model."""
CHECK = (*KERNELS, "check/check_linear.c")
AGAIN = {"linear_avx2.c": (*_AVX2, "-mavxvnni", "-DAVX_VNNI")}
"""Files that are compiled a second time, with these flags."""

ZIG = "ziglang==0.17.1"
ZIG_WHEELS = ("x86_64", "AMD64", "aarch64", "arm64", "ARM64")
CROSS = ("aarch64-linux-gnu.2.17", "aarch64-macos", "x86_64-windows-gnu", "x86_64-linux-musl")
_GLIBC = "2.17"
"""That a library made by zig needs."""


class BuildError(Exception):
    """The library could not be built."""


class Compiler(NamedTuple):
    """What compiles, and for which machine ("x86_64") and system ("linux", "macos" or "windows")."""

    command: tuple[str, ...]
    machine: str
    system: str

    @property
    def zig(self) -> bool:
        return "ziglang" in self.command


class Unit(NamedTuple):
    """A C file, and the flags of its instruction set."""

    source: Path
    flags: tuple[str, ...]


def _zig(target: str) -> Compiler:
    """For zig's ``target``; without one it would compile for the very CPU that it runs on."""
    machine, system, *_ = target.split("-")
    return Compiler((sys.executable, "-m", "ziglang", "cc", "-target", target), machine, system)


def find_compiler() -> Compiler | None:
    """The C compiler for this machine; None: there is none that knows its instruction sets."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, "linux")
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) and _works(found := Compiler(tuple(command), machine, system)):
        return found
    if importlib.util.find_spec("ziglang") is None:
        return None
    library = f"-gnu.{_GLIBC}" if platform.libc_ver()[0] == "glibc" else "-musl"
    return _zig(f"{machine}-{system}{ {'linux': library, 'windows': '-gnu'}.get(system, '') }")


_PROBE = "#include <math.h>\n#include <stdatomic.h>\n#include <stdlib.h>\nint probe(void) { return 0; }\n"


def _works(compiler: Compiler) -> bool:
    """Whether it has headers, and flags for every instruction set: old compilers lack some."""
    flags = [flag for each in TIERS.get(compiler.machine, {}).values() for flag in each]
    flags += ["-mavxvnni"] if compiler.machine == "x86_64" else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(_PROBE)
        command = [*compiler.command, "-std=c11", *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0  # noqa: S603 - the user's compiler


def units(compiler: Compiler, *patterns: str) -> list[Unit]:
    """C files to compile for the compiler's machine; by default the library's."""
    tiers = TIERS.get(compiler.machine, {})
    elsewhere = {tier for each in TIERS.values() for tier in each} - tiers.keys()
    found: list[Unit] = []
    for source in sorted(source for pattern in patterns or ("*.c",) for source in SOURCES.glob(pattern)):
        tier = source.stem.rpartition("_")[2]
        if tier not in elsewhere:
            flags = tiers.get(tier, ())
            found.append(Unit(source, _ZIG_NEON if flags == _NEON and compiler.zig else flags))
            if source.name in AGAIN:
                found.append(Unit(source, AGAIN[source.name]))
    return found


def build(folder: Path = INSTALLED, compiler: Compiler | None = None) -> Path:
    """Make the library in ``folder``.

    Args:
        compiler: by default the one for this machine.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError(f"no C compiler: install one, or pip install {ZIG}")
    name = {"macos": "libdraftree.dylib", "windows": "draftree.dll"}.get(compiler.system, "libdraftree.so")
    return link(folder / name, compiler, units(compiler), "-shared")


def link(output: Path, compiler: Compiler, sources: Sequence[Unit], *flags: str) -> Path:
    """Compile what has changed of ``sources`` and link all of them.

    Args:
        flags: of the linker; "-shared" makes a library.
    """
    position = () if compiler.system == "windows" else ("-fPIC",)
    common = (*FLAGS, *position, *shlex.split(os.environ.get("CFLAGS", "")))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.h")))
    OBJECTS.mkdir(parents=True, exist_ok=True)

    def compile_unit(unit: Unit) -> str:
        command = [*compiler.command, *common, *unit.flags, "-c", str(unit.source)]
        what = "\0".join(word for word in command if not word.startswith("-W"))  # warnings change no code
        content = hashlib.sha256(what.encode() + unit.source.read_bytes() + headers).hexdigest()
        compiled = OBJECTS / f"{unit.source.stem}-{content[:16]}.o"
        if not compiled.exists():
            _make(command, compiled)
        return str(compiled)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_unit, sources))
    if not compiled:
        raise BuildError(f"no C files in {SOURCES}")
    output.parent.mkdir(parents=True, exist_ok=True)
    whole = ("-Wl,-z,defs", "-lpthread", "-lm") if compiler.system == "linux" else ()  # others complain by themselves
    _make([*compiler.command, *flags, *compiled, *whole], output)
    return output


def _make(command: Sequence[str], output: Path) -> None:
    """Run a compiler; its output appears whole: another process may be reading the one before."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        part = Path(folder, output.name)
        done = subprocess.run([*command, "-o", str(part)], check=False, capture_output=True, text=True)  # noqa: S603 - the user's compiler
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr or done.stdout}")
        part.replace(output)


def needs() -> list[str]:
    """Requirements of a build on this machine."""
    return [] if find_compiler() or platform.machine() not in ZIG_WHEELS else [ZIG]


class NativeBuildHook(BuildHookInterface[Any]):
    """Puts the library into the wheel, which is one for this platform then; without a library it is one for all."""

    def dependencies(self) -> list[str]:
        return needs()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = find_compiler()
        try:
            library = build(compiler=compiler)
        except BuildError as error:
            self.app.display_warning(f"draftree is installed without its native engine: {error}")
            return
        oldest = compiler is not None and compiler.command[-1].endswith(_GLIBC)
        manylinux = f"manylinux_{_GLIBC.replace('.', '_')}_{platform.machine()}"
        build_data["artifacts"].append(f"/{library.relative_to(ROOT).as_posix()}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{manylinux if oldest else next(iter(platform_tags()))}"


def main(arguments: Sequence[str]) -> None:
    if arguments == ["--needs"]:
        sys.stdout.write("".join(f"{each}\n" for each in needs()))
    elif arguments == ["--cross"]:
        for target in CROSS:
            sys.stdout.write(f"{build(OBJECTS / target, _zig(target)).relative_to(ROOT)}\n")
    elif arguments:
        sys.exit(f"unknown arguments {shlex.join(arguments)}\n\n{__doc__}")
    else:
        sys.stdout.write(f"{build().relative_to(ROOT)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as failure:
        sys.exit(str(failure))
