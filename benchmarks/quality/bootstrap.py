"""What runs in the process of ``sandbox``: sets limits, then runs the parts that it is sent. Never imported.

python -I -S -B -c SOURCE SECONDS MEMORY FILE_SIZE PROCESSES USER

Standard input is a socket. A part is a line with its size in bytes, its source, and a line with a token; the token is
read, and sent back, only after the part has run to its end. A part that raises is answered by the exception.
"""

import builtins
import os
import resource
import sys
from types import ModuleType

BUILTINS = dict(vars(builtins))
globals()["__builtins__"] = BUILTINS  # of the function below: a program that replaces names in `builtins` misses it


def run(seconds: int, memory: int, file_size: int, processes: int, user: int) -> None:
    """Run the parts one after another in one namespace.

    Args:
        seconds, memory, file_size, processes: as in ``sandbox.Limits``.
        user: user and group to become; negative: stay.
    """
    write, leave, channel = os.write, os._exit, os.dup(0)
    parts = open(channel, "rb")
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        if hard == resource.RLIM_INFINITY or most < hard:  # a limit is never raised
            resource.setrlimit(what, (most, most))
    if user >= 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.dup2(1, 0)  # standard output is the null device
    os.dup2(1, 2)
    sys.setrecursionlimit(2000)
    sys.argv[:] = ["program.py"]
    program = ModuleType("program")
    sys.modules["__main__"] = sys.modules["program"] = program
    try:
        while size := parts.readline():
            source = parts.read(int(size)).decode()
            exec(compile(source, "program.py", "exec", dont_inherit=True), vars(program))  # noqa: S102 - its purpose
            vars(program)["__builtins__"] = BUILTINS  # the check gets the original ones
            write(channel, parts.readline())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the part has failed
        write(channel, f"{type(error).__name__}: {error}".encode(errors="replace")[:400] + b"\n")
        leave(1)
    leave(0)


run(*map(int, sys.argv[1:]))
