"""The sandbox that code of models runs in. Where there is none, the same tests see that nothing runs."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.quality import sandbox
from benchmarks.quality.sandbox import Limits, Verdict, require_sandbox, run_python
from benchmarks.quality.scores import scorer
from draftree.errors import ConfigError


def _works() -> bool:
    try:
        require_sandbox()
    except ConfigError:
        return False
    return True


WORKS = _works()
MODES = pytest.mark.parametrize("unsafe", [False, True], ids=["sandbox", "unsafe"])


def judge(program: str, check: str = "", *, unsafe: bool = False, limits: Limits | None = None) -> Verdict:
    """The verdict; where there is no sandbox, that of a program that was not run."""
    if unsafe or WORKS:
        return run_python(program, check, unsafe=unsafe, limits=limits)
    with pytest.raises(ConfigError):
        run_python(program, check, limits=limits)
    return Verdict(False, "not run")


def running(token: str) -> bool:
    """Whether a process with this word in its command runs, be it soon to end."""
    for _ in range(200):
        if not any(token.encode() in _command(p) for p in Path("/proc").glob("[0-9]*/cmdline")):
            return False
        time.sleep(0.05)
    return True


def _command(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@MODES
def test_a_program_passes_when_its_check_runs_to_the_end(unsafe: bool) -> None:
    runs = unsafe or WORKS
    assert judge("x = 1", "assert x == 1", unsafe=unsafe).passed == runs
    assert judge("import math, re, json, collections, typing, heapq, random, sqlite3", unsafe=unsafe).passed == runs
    assert judge("open('own', 'w').write('x')\nassert open('own').read() == 'x'", unsafe=unsafe).passed == runs
    assert judge("def f(): return 1\nif __name__ == '__main__': f(int(input()))", unsafe=unsafe).passed == runs
    assert judge("import os\nassert not {*os.environ} - {'PWD', 'LC_CTYPE'}", unsafe=unsafe).passed == runs


WRONG = "\ndef f(): return 2\n"
ALL_WORDS = """
import os, sys
def shout():
    frame = sys._getframe()
    words = list(sys.orig_argv)
    while frame := frame.f_back:
        words += frame.f_locals.values()
    for word in map(str, words):
        for fd in range(32):
            try:
                os.write(fd, word.encode() + b'\\n')
            except OSError:
                pass
    return 2
"""


@pytest.mark.parametrize(
    "program",
    [
        "def f(:",
        "import os\nos._exit(0)",
        "import os\ndef f(): os._exit(0)",
        "import os\nclass Error(BaseException):\n    __str__ = lambda self: os._exit(0)\ndef f(): raise Error",
        "import sys\nsys.exit(0)",
        "def f(): raise SystemExit(0)",
        "import atexit, os\natexit.register(os._exit, 0)" + WRONG,
        "print('passed', 'ok', 0, sep='\\n', flush=True)" + WRONG,
        "import builtins\nbuiltins.AssertionError = type('Error', (BaseException,), {})" + WRONG,
        "import builtins\nbuiltins.abs = lambda x: 1" + WRONG,
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None" + WRONG,
        "import builtins\nvars(builtins).clear()" + WRONG,
        "__builtins__ = {'abs': lambda x: 1}" + WRONG,
        "import os\nos.write = os._exit = lambda *_: None" + WRONG,
        "import __main__\n__main__.BUILTINS = {}\n__main__.run = lambda *_: None" + WRONG,
        "import __main__, os\nos.write(1, __main__.mark.encode())\nos._exit(0)",
        "import sys\nsys.settrace(lambda *_: None)\nsys.modules.clear()" + WRONG,
        "import os\nos.closerange(0, 32)" + WRONG,
        "import sys\nsys.stdin.close()\nsys.stdout.close()" + WRONG,
        ALL_WORDS + "shout()" + WRONG,
        ALL_WORDS + "f = shout",
    ],
)
def test_nothing_but_the_end_of_the_check_passes(program: str) -> None:
    """The word that proved a pass lay in ``__main__``, and the process printed it among the program's own lines."""
    assert not run_python(program, "assert abs(f()) == 1", unsafe=True).passed


@MODES
@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("while True: pass", Limits(seconds=1, clock=600)),
        ("import time\ntime.sleep(10000)", Limits(clock=1)),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", Limits(memory=1 << 28)),
        ("import os\nwhile True: os.write(3, b'x')", Limits()),
        ("import sys\nfor _ in range(100): print('x' * 1000)\nsys.exit()", Limits()),
        ("open('own', 'wb').write(bytes(1 << 21))", Limits()),
        ("files = [open('/dev/null') for _ in range(100)]", Limits()),
    ],
)
def test_a_program_that_takes_too_much_does_not_pass(program: str, limits: Limits, unsafe: bool) -> None:
    assert not judge(program, unsafe=unsafe, limits=limits).passed


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd')",
        "open({file!r})",
        "open({own!r})",
        "import os; os.listdir({folder!r})",
        "import os; os.stat('/bin/sh')",
        "import os; os.kill({process}, 0)",
        "import socket; socket.create_connection(('127.0.0.1', {port}))",
        "open({kept!r}, 'a')",
        "open({outside!r}, 'w')",
        "import os; os.remove({kept!r})",
        "import os; os.mkdir({outside!r})",
        "import os; os.symlink({folder!r}, 'link'); open('link/outside', 'w')",
        "import ctypes; assert ctypes.CDLL(None).creat({outside!r}.encode(), 511) >= 0",
    ],
)
def test_nothing_outside_is_reached(program: str, tmp_path: Path, server: int) -> None:
    """All was readable, and an audit hook guarded the rest. Without the sandbox all of this works."""
    kept, outside = tmp_path / "kept", tmp_path / "outside"
    kept.write_text("kept")
    places = {"file": __file__, "own": sandbox.__file__, "folder": str(tmp_path), "process": os.getpid()}
    program = program.format(kept=str(kept), outside=str(outside), port=server, **places)
    assert not judge(program).passed
    assert kept.read_text() == "kept" and not outside.exists()
    assert run_python(program, unsafe=True).passed


def test_its_world_is_python_and_libraries() -> None:
    """Home, the working folder and the rest of the file system are not there."""
    python = sandbox.interpreter()
    libraries = [str(p / n) for p in (Path("/"), Path("/usr"), python.parent.parent) for n in ("lib", "lib64")]
    program = f"""
import os
seen = set()
for folder, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(folder, f) not in {libraries}]
    seen |= {{os.path.join(folder, f) for f in files}}
"""
    assert judge(program, f"assert seen == {{'/dev/null', {str(python)!r}}}, seen").passed == WORKS


CHILD = """
import subprocess, sys
sleeps = [sys.executable, '-I', '-c', 'import time; time.sleep(600)', {token!r}]
child = subprocess.Popen(sleeps, start_new_session={new})
"""


def test_a_child_does_not_outlive_the_sandbox() -> None:
    """A child that had left the process group ran on after a pass."""
    token = secrets.token_hex(16)
    program = CHILD.format(token=token, new=True)
    assert judge(program, "assert child.poll() is None", limits=Limits(processes=64)).passed == WORKS
    assert not running(token)
    assert not judge(program + "child.wait()", limits=Limits(clock=1, processes=64)).passed
    assert not running(token)


def test_processes_and_threads_are_limited() -> None:
    for program in ("import os\nos.fork()", "import threading\nthreading.Thread(target=print).start()"):
        assert not judge(program).passed
    bomb = """
import os, time
children = []
try:
    while len(children) < 100:
        children.append(os.fork() or time.sleep(600))
except BlockingIOError:
    pass
"""
    assert judge(bomb, "assert len(children) < 8", limits=Limits(processes=8)).passed == WORKS


@pytest.fixture
def fresh() -> Iterator[None]:
    """The sandbox is tried anew."""
    sandbox.lack.cache_clear()
    yield
    sandbox.lack.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("broken", [False, True])
def test_without_bubblewrap_nothing_runs(broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        run_python("")
    assert {"bubblewrap", "--unsafe"} <= {word.strip(",:") for word in str(refused.value).split()}
    assert ("No permissions" in str(refused.value)) == broken
    for suite in ("humaneval", "mbpp"):
        with pytest.raises(ConfigError):
            scorer(suite, Path())
    assert scorer("gsm8k", Path()) is not None and scorer("spider", Path()) is not None
    assert run_python("", unsafe=True).passed
