"""What runs inside the sandbox's process: sets the limits, then the program. Started by ``sandbox``, never imported.

python -I -S -B jail.py FOLDER MARK SECONDS MEMORY FILE_SIZE
"""

import builtins
import os
import resource
import sys
from typing import Any

folder, mark = os.path.realpath(sys.argv[1]), sys.argv[2]
seconds, memory, file_size = map(int, sys.argv[3:])

REFUSED = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "pty.",
    "socket.",
    "ctypes.",
    "os.chmod",
    "os.chown",
    "os.chroot",
    "os.chflags",
    "os.setxattr",
    "os.removexattr",
    "signal.",
    "fcntl.",
    "syslog.",
    "resource.",
    "sys.addaudithook",
    "sqlite3.",
    "cpython.",
)
MODULES = {"ctypes", "_ctypes", "_dbm", "_gdbm"}
"""They reach files and memory without telling the hook."""
MOVES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.utime")
UNTOLD = ("mkfifo", "mknod")
"""Calls that make files and tell no hook."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_realpath, _isdir, _fspath, _fsdecode, _sep = os.path.realpath, os.path.isdir, os.fspath, os.fsdecode, os.sep
_str, _int, _isinstance, _PATHS = str, int, isinstance, (str, bytes, os.PathLike)


def _inside(path: Any) -> bool:
    if _isinstance(path, _int):
        return True
    return (_realpath(_fsdecode(_fspath(path))) + _sep).startswith(folder + _sep)


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what reaches outside."""
    if event == "open":
        path, mode, flags = arguments
        writes = bool(flags & WRITES) if _isinstance(flags, _int) else _isinstance(mode, _str) and mode != "r"
        if (writes or _isdir(path)) and not _inside(path):  # what a folder is opened for, the hook is not told
            raise PermissionError(f"no writing outside the sandbox: {path!r}")
    elif event.startswith(MOVES):
        if not all(_inside(a) for a in arguments if _isinstance(a, _PATHS)):
            raise PermissionError(f"no changes outside the sandbox: {event}")
    elif event.startswith(REFUSED) or (event == "import" and arguments[0] in MODULES):
        raise PermissionError(f"refused in the sandbox: {event}")


resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.setrecursionlimit(2000)
with open("program.py", encoding="utf-8") as file:
    program = compile(file.read(), "program.py", "exec")
sys.argv[:] = ["program.py"]
for name in UNTOLD:
    for module in (os, sys.modules[os.name]):
        if hasattr(module, name):
            delattr(module, name)
sys.addaudithook(guard)
try:
    exec(program, {"__name__": "program", "__builtins__": builtins})  # noqa: S102 - that is what a jail is for
except BaseException as error:  # noqa: BLE001 - whatever it is, the program has failed
    sys.stdout.write(f"\n{type(error).__name__}: {error}\n"[:400])
    sys.stdout.flush()
    os._exit(1)
sys.stdout.write(f"\n{mark}\n")
sys.stdout.flush()
os._exit(0)
