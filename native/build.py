"""Build the native engine: the C files of this folder make one library, beside the module that loads it.

    python native/build.py            for this machine, into src/draftree/models/native
    python native/build.py --needs    print what must be installed first, if anything
    python native/build.py --targets  print the systems that wheels are made for

The compiler is $CC or cc, or zig (the package ziglang) where there is none that knows our instruction sets; CC=zig
takes zig anyway. $CFLAGS are added. This is also the build hook of the wheel: with $DRAFTREE_TARGET, one of the
targets, zig makes it for that system.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
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
KERNELS = ("formats.c", "tiles.c", "cpu.c", "linear_*.c", "vector_*.c")
"""Files that work without a model."""
CHECK = (*KERNELS, "check/check_linear.c")
AGAIN = {"linear_avx2.c": (*_AVX2, "-mavxvnni", "-DAVX_VNNI")}
"""Files that are compiled a second time, with these flags."""

ZIG = "ziglang==0.17.1"
_WAY_OUT = f"install a C compiler (CC=NAME takes it), or build with zig: pip install {ZIG}, and set CC=zig"
ZIG_WHEELS = ("x86_64", "AMD64", "aarch64", "arm64", "ARM64")
WHEELS = {
    "x86_64-linux-gnu.2.17": "manylinux_2_17_x86_64",
    "aarch64-linux-gnu.2.17": "manylinux_2_17_aarch64",
    "x86_64-linux-musl": "musllinux_1_2_x86_64",
    "aarch64-linux-musl": "musllinux_1_2_aarch64",
    "aarch64-macos.11.0": "macosx_11_0_arm64",
    "x86_64-macos.11.0": "macosx_11_0_x86_64",
    "x86_64-windows-gnu": "win_amd64",
    "aarch64-windows-gnu": "win_arm64",
}
"""zig's target -> the platform of the wheel for it."""
_GLIBC = 17
"""Of glibc 2.x: the oldest that a wheel is made for, and what a library made by zig needs."""
_OF_EVERY_LINUX = {f"lib{name}" for name in ("c.so.6", "m.so.6", "pthread.so.0", "dl.so.2", "rt.so.1", "gcc_s.so.1")}
"""Libraries that a manylinux wheel may need (PEP 600)."""


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
    return Compiler((sys.executable, "-m", "ziglang", "cc", "-target", target), machine, system.partition(".")[0])


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
    library = f"-gnu.2.{_GLIBC}" if platform.libc_ver()[0] == "glibc" else "-musl"
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
        raise BuildError(f"no C compiler knows this machine's instruction sets: {_WAY_OUT}")
    name = {"macos": "libdraftree.dylib", "windows": "draftree.dll"}.get(compiler.system, "libdraftree.so")
    return link(folder / name, compiler, units(compiler), "-shared")


def link(output: Path, compiler: Compiler, sources: Sequence[Unit], *flags: str) -> Path:
    """Compile what has changed of ``sources`` and link all of them.

    Args:
        flags: of the linker; "-shared" makes a library.
    """
    position = () if compiler.system == "windows" else ("-fPIC",)
    common = (*FLAGS, *(("-g0",) if compiler.zig else ()), *position, *shlex.split(os.environ.get("CFLAGS", "")))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.h")))
    OBJECTS.mkdir(parents=True, exist_ok=True)

    def compile_unit(unit: Unit) -> str:
        command = [*compiler.command, *common, *unit.flags]
        what = "\0".join(word for word in command if not word.startswith("-W"))  # warnings change no code
        content = hashlib.sha256(what.encode() + unit.source.read_bytes() + headers).hexdigest()
        compiled = OBJECTS / f"{unit.source.stem}-{content[:16]}.o"
        if not compiled.exists():
            _make([*command, "-c", str(unit.source)], compiled)
        return str(compiled)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_unit, sources))
    if not compiled:
        raise BuildError(f"no C files in {SOURCES}")
    output.parent.mkdir(parents=True, exist_ok=True)
    whole = ("-Wl,-z,defs", "-lpthread", "-lm") if compiler.system == "linux" else ()  # others complain by themselves
    named = (f"-Wl,-install_name,@rpath/{output.name}",) if compiler.system == "macos" and "-shared" in flags else ()
    bare = ("-Wl,-s",) if compiler.zig else ()
    _make([*compiler.command, *flags, *compiled, *whole, *named, *bare], output)
    return output


def _make(command: Sequence[str], output: Path) -> None:
    """Run a compiler; its output appears whole: another process may be reading the one before."""
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        part = Path(folder, output.name)
        done = subprocess.run([*command, "-o", str(part)], check=False, capture_output=True, text=True)  # noqa: S603 - the user's compiler
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr or done.stdout}\n{_WAY_OUT}")
        part.replace(output)


def needs() -> list[str]:
    """Requirements of a build on this machine."""
    zig = os.environ.get("DRAFTREE_TARGET") or find_compiler() is None
    return [ZIG] if zig and platform.machine() in ZIG_WHEELS else []


def wheel_platform(library: Path) -> str:
    """The platform of the wheel with a library for this machine; on Linux by the glibc and the libraries that it needs.

    Raises:
        BuildError: no index takes such a wheel.
    """
    own = next((each for each in platform_tags() if not each.startswith("linux")), None)
    if own is None:
        raise BuildError(f"no index takes a wheel for a Linux of neither glibc nor musl: {_WAY_OUT}")
    if not own.startswith("manylinux"):
        return own
    content = library.read_bytes()
    needed = {name.decode() for name in re.findall(rb"\0(lib[\w+-]+\.so[.\d]*)(?=\0)", content)}
    if others := sorted(needed - _OF_EVERY_LINUX - {library.name}):
        what = f"no index takes a wheel whose {library.name} needs {', '.join(others)}"
        raise BuildError(f"{what}: leave them out of CFLAGS, or set CC=zig")
    glibc = max([_GLIBC, *map(int, re.findall(rb"\0GLIBC_2\.(\d+)", content))])
    return f"manylinux_2_{glibc}_{own.split('_', 3)[3]}"


class NativeBuildHook(BuildHookInterface[Any]):
    """Puts the library into the wheel, which is one for a single platform; without a library there is none."""

    def dependencies(self) -> list[str]:
        return needs()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = os.environ.get("DRAFTREE_TARGET")
        try:
            if target:
                library, tag = build_for(target), WHEELS[target]
                build_data["force_include"][str(library)] = f"draftree/models/native/{library.name}"
            else:
                library = build()
                tag = wheel_platform(library)
                build_data["artifacts"].append(f"/{library.relative_to(ROOT).as_posix()}")
        except BuildError as error:
            self.app.abort(f"draftree's native engine cannot be built: {error}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"


def build_for(target: str) -> Path:
    """Make the library for zig's ``target``.

    Raises:
        BuildError: it is none of ``WHEELS``, or zig fails.
    """
    if target not in WHEELS:
        raise BuildError(f"DRAFTREE_TARGET is {target!r}: choose from {', '.join(WHEELS)}")
    return build(OBJECTS / target, _zig(target))


def main(arguments: Sequence[str]) -> None:
    if arguments == ["--needs"]:
        sys.stdout.write("".join(f"{each}\n" for each in needs()))
    elif arguments == ["--targets"]:
        sys.stdout.write("".join(f"{each}\n" for each in WHEELS))
    elif arguments:
        sys.exit(f"unknown arguments {shlex.join(arguments)}\n\n{__doc__}")
    else:
        sys.stdout.write(f"{build().relative_to(ROOT)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as failure:
        sys.exit(str(failure))
