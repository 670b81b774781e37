"""Ctrl-C and kills of real processes: one line and 130 at any moment, and nothing that was done is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..tiny import save_tiny
from ..tiny_gguf import write

COMMANDS = {
    "generate": "generate hello --target GGUF --max-tokens 100 --ignore-eos",
    "batch": "batch SOURCE OUT --target GGUF --method chain --drafter lookup --rows 2",
    "bench": "bench --suite SOURCE --out OUT --target GGUF --methods chain --drafters lookup --max-tokens 20",
    "bench-exact": "bench --check-exact --suite SOURCE --target GGUF --drafters lookup --max-tokens 20",
    "train": "train head --prompts SOURCE --out OUT MODEL",
    "methods": "methods",
}
TOKENS, LINES = 20, 16
SLOW = {"bench": 8.0, "bench-exact": 8.0, "train": 8.0}
"""Seconds that commands which load torch may take at most; others take one or two."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of transformers, and one that needs no torch."""
    folder = tmp_path_factory.mktemp("models")
    return {"MODEL": str(save_tiny(folder / "tiny")), "GGUF": str(write(folder / "tiny.gguf"))}


def _words(command: str, models: dict[str, str], folder: Path, out: str = "out") -> list[str]:
    source = folder / "source.jsonl"
    lines = [{"id": str(n), "prompt": f"a b a b {n}", "max_tokens": TOKENS} for n in range(LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = {**models, "SOURCE": str(source), "OUT": str(folder / out)}
    return [places.get(word, word) for word in command.split()]


def _started(script: str, words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-c", script, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603


def test_the_handler_is_there_before_anything_that_takes_time() -> None:
    script = (
        "import signal, sys; import draftree.__main__ as start; start.exit_on_interrupt();"
        "print(*{name.partition('.')[0] for name in sys.modules}); signal.raise_signal(signal.SIGINT)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)  # noqa: S603
    assert (done.returncode, done.stderr) == (130, "draftree: interrupted\n")
    assert not {"torch", "numpy", "transformers", "pydantic", "typer", "rich"} & set(done.stdout.split())


START = """
import sys
import draftree.__main__ as start
start.exit_on_interrupt()
print("started", flush=True)
start.main()
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_at_any_moment_is_one_line(command: str, models: dict[str, str], tmp_path: Path) -> None:
    """It was dozens of lines of traceback while modules were imported, and an abort where torch's threads ran.

    The interpreter's own start is not draftree's: moments count from where its first module is imported.
    """
    moment = random.Random(command).uniform(0.05, SLOW.get(command, 2.0))
    with _started(START, _words(COMMANDS[command], models, tmp_path), tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    if process.returncode != 0:  # else it was done before
        assert process.returncode == 130, (moment, complaint)
        lines = [line for line in complaint.splitlines() if not line.startswith(b"measuring passes of")]
        assert len(lines) == 1 and lines[0].startswith(b"draftree: interrupted"), (moment, complaint)


KILLED = r"""
import importlib, json, os, random, signal, sys, time
from pathlib import Path
from draftree.cli.main import COMMANDS, run
words, alone, name, kills = json.loads(sys.argv[1])
importlib.import_module("draftree.cli." + COMMANDS[words[0]][0])  # once for all the processes that are forked
file, moments = Path(name), random.Random(words[0])

def whole() -> bytes:
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]

for kill in range(kills + 1):
    before = whole()
    if not (child := os.fork()):
        os._exit(run(words))
    if kill < kills:
        more = moments.randrange(4) if kill else 2  # the first kill comes in the middle
        while more and whole().count(b"\n") < before.count(b"\n") + more:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.02 if more else 1.0))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert whole().startswith(before), "what was done is lost"
    print(json.dumps({"code": code, "lines": whole().count(b"\n")}))
sys.exit(run(alone))
"""


@pytest.mark.parametrize(("command", "file", "answers"), [("batch", "", LINES), ("bench", "results.jsonl", 2 * LINES)])
def test_killed_at_any_moment_it_goes_on_and_gives_each_answer_once(
    command: str, file: str, answers: int, models: dict[str, str], tmp_path: Path
) -> None:
    words, alone = (_words(COMMANDS[command], models, tmp_path, out) for out in ("out", "alone"))
    given = json.dumps([words, alone, str(tmp_path / "out" / file), 4])
    with _started(KILLED, [given], tmp_path) as process:
        printed, complaint = process.communicate()
    assert process.returncode == 0, complaint
    runs = [json.loads(line) for line in printed.splitlines() if line.startswith(b'{"code"')]
    assert len(runs) == 5 and runs[-1] == {"code": 0, "lines": answers}, runs
    assert any(0 < each["lines"] < answers for each in runs), "no kill came in the middle: take other moments"
    found, expected = (_answers(tmp_path / out / file) for out in ("out", "alone"))
    assert len(found) == len(dict(found)) == answers and dict(found) == dict(expected)


def _answers(file: Path) -> list[tuple[Any, Any]]:
    """Who asked, and the text of each record."""
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    if "response" in records[0]:
        return [(r["id"], r["response"]["body"]["choices"][0]["message"]["content"]) for r in records]
    return [((r["prompt"], r["method"]), r["turns"][0]["text"]) for r in records]
