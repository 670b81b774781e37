"""Files without an end, for every option that names a file: a complaint in one line, before memory runs out."""

from __future__ import annotations

import gzip
import json
import resource
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.cli.main import run

from ..bench import runs
from ..tiny import save_tiny

_MOST = 2 << 30
"""Bytes that a command may take beside those that are taken; most lines take some MB."""

LINES = """
generate cat --target {zero}
generate cat --target {model_of_zeros}
generate cat --target {model} --drafter {zero}
generate cat --target {model} --drafter {model_of_zeros}
generate cat --target {model} --method sequoia --drafter self --set tree={zero}
generate cat --target {model} --method c2t --drafter self --set classifier={zero}
generate cat --target {model} --prediction {zero}
generate cat --target {model} --json-schema {zero}
generate - --target {model}
batch {zero} {out} --target {model}
batch {requests} {zero} --target {model}
batch {requests} /dev/full --target {model}
batch {requests} {zeros.jsonl} --target {model}
calibrate --prompts {text} --out {zeros.jsonl} --drafter self --target {model}
train classifier --prompts {text} --out {zeros.jsonl} --drafter self --target {model}
info {zero}
profile {zero}
report {zero}
report {run_of_zeros}
serve {model} --api-key-file {zero}
bench --suite {zero} --out {out} --methods chain --drafters self --target {model}
bench --suite {zeros.jsonl} --out {out} --methods chain --drafters self --target {model}
bench --suite {zeros.gz} --out {out} --methods chain --drafters self --target {model}
bench --suite {requests} --out {run_of_zeros} --methods chain --drafters self --target {model}
calibrate --prompts {zero} --out {out} --drafter self --target {model}
calibrate --prompts {zeros.jsonl} --out {out} --drafter self --target {model}
train head --prompts {zero} --out {out} --target {model}
train head --prompts {text} --out {out} --init {model_of_zeros} --target {model}
train classifier --prompts {zero} --out {out} --drafter self --target {model}
""".strip().splitlines()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("endless")
    save_tiny(place / "model")
    runs.full_run(place / "run_of_zeros")
    (place / "model_of_zeros").mkdir()
    replaced = [place / "model_of_zeros" / "config.json", place / "zeros.jsonl"]
    for path in [*replaced, *(place / "run_of_zeros").iterdir()]:
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")
    (place / "requests").write_text(json.dumps({"prompt": "the cat"}) + "\n")
    (place / "text").write_text("the cat\n")
    (place / "zeros.gz").write_bytes(gzip.compress(bytes(64 << 20), 1) * 48)
    return {f"{{{p.name}}}": str(p) for p in place.iterdir()} | {"{zero}": "/dev/zero", "{out}": str(place / "out")}


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("line", LINES)
def test_an_endless_file_is_a_complaint(
    line: str, places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert run(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert 1 <= len(printed.err.strip().splitlines()) <= 3 and "Traceback" not in printed.err
