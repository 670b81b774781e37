"""How many threads share a pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree.models.cpu_threads import default_threads


def _system(root: Path, siblings: list[str], files: dict[str, str]) -> Path:
    for cpu, text in enumerate(siblings):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{text}\n"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpus", "siblings", "files", "threads"),
    [
        ({0, 1, 2, 3}, ["0", "1", "2", "3"], {}, 4),
        ({0, 1, 2, 3}, ["0,2", "1,3", "0,2", "1,3"], {}, 2),  # two threads a core
        ({0, 2}, ["0,2", "1,3", "0,2", "1,3"], {}, 2),  # both threads of the only core
        ({1, 3, 0}, ["0,2", "1,3", "0,2", "1,3"], {}, 2),
        ({0, 1, 2}, [], {}, 3),  # a system that does not tell
        ({0, 1, 2, 3}, [], {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "200000 100000\n"}, 2),
        ({0, 1, 2, 3}, [], {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "350000 100000\n"}, 3),
        ({0, 1, 2, 3}, [], {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({0, 1, 2, 3}, [], {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        (
            {0, 1, 2, 3},
            [],
            {"proc/self/cgroup": "4:cpu:/c\n0::/a\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"},  # version 1 too
            1,
        ),
    ],
)
def test_threads_are_the_cores_that_the_process_may_use(
    cpus: set[int],
    siblings: list[str],
    files: dict[str, str],
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cpus, raising=False)
    assert default_threads(_system(tmp_path, siblings, dict(files))) == threads
