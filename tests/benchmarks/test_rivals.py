"""Rivals: what their processes write, what a command decodes again, and the table."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import rival_process
from benchmarks.rival_jobs import read
from benchmarks.rival_process import Clock, Job
from benchmarks.rivals import FILE, HEADER, main, table
from draftree.bench.run import encode_turns
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.models.loading import load

from .. import tiny_gguf

ROW = {"model": "tiny", "suite": "own", "max_tokens": 8, "draft": "", "round": 0}
TEXTS = [f"{word} the water the water" for word in ("in", "on", "under")]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0"))


def job(rival: str, target: str, prompts: dict[str, list[int]], draft: str = "") -> Job:
    return Job(rival, target, draft, 1, 8, [tiny_gguf.END], prompts, [5], {**ROW, "rival": rival}, "")


@pytest.mark.parametrize("rival", ["draftree-ar", "draftree-auto", "draftree-draft-model"])
def test_ours_decode_what_the_engine_decodes(rival: str, gguf: str) -> None:
    model = load(gguf, threads=1)
    ids = encode_turns(model, TEXTS[:1])
    (answer,) = Engine(model).generate([ids], SamplingParams(max_tokens=8))
    _, decode = rival_process.draftree(job(rival, gguf, {"p": ids}, gguf if "model" in rival else ""))
    (found,) = decode([ids], 8)
    assert (found.text, found.ids) == (answer.text, answer.token_ids)
    assert found.decode_tokens == len(found.ids) - 1
    assert 0 < found.decode_seconds < found.seconds


@pytest.mark.parametrize("rival", ["llama.cpp", "llama.cpp-ngram-simple", "llama.cpp-draft-model"])
def test_llama_cpp_counts_no_token_of_the_prompts_time(rival: str, gguf: str) -> None:
    ids = encode_turns(load(gguf, threads=1), TEXTS[:1])
    _, decode = rival_process.llama(job(rival, gguf, {"p": ids}, gguf if "model" in rival else ""))
    (one,), (more,) = decode([ids], 1), decode([ids], 8)
    assert (len(one.ids), one.decode_tokens) == (1, 0) and one.decode_seconds < one.seconds / 10
    assert more.decode_tokens == len(more.ids) - 1 > 0 and more.ids[:1] == one.ids
    assert 0 < more.decode_seconds < more.seconds
    assert more.text.startswith(one.text)


def test_the_first_tokens_are_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is accepted in the pass that reads the prompt makes several."""
    now = iter([10.0, 13.0, 17.0])
    monkeypatch.setattr(rival_process, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = Clock()
    clock.came(3)
    clock.came(2)
    answer = clock.answer([7, 8, 9, 7, 8], "x")
    assert (answer.seconds, answer.decode_tokens, answer.decode_seconds) == (7.0, 2, 4.0)


@pytest.mark.parametrize(("requests", "groups"), [(1, [[[7]], [[8, 9]], [[3]]]), (2, [[[7], [8, 9]], [[3]]])])
def test_a_process_writes_all_but_the_warm_up(
    requests: int, groups: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts, calls = {"a": [7], "b": [8, 9], "c": [3]}, list[Any]()
    given = replace(job("vllm", "", prompts), out=str(tmp_path / FILE), requests=requests)

    def decode(prompts: list[list[int]], most: int) -> list[rival_process.Answer]:
        calls.append((prompts, most))
        return [rival_process.Answer(ids, 2.0, 1, 1.0, "text") for ids in prompts]

    monkeypatch.setattr(rival_process, "SYSTEMS", {"vllm": lambda job: ("1.2", decode)})
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(given))))
    rival_process.main()
    assert calls == [([[5]], 16), *((together, 8) for together in groups)]
    rows = read(tmp_path / FILE)
    assert [(row["prompt"], row["ids"], row["version"]) for row in rows] == [
        ("a", [7], "1.2"),
        ("b", [8, 9], "1.2"),
        ("c", [3], "1.2"),
    ]
    assert {row["rival"] for row in rows} == {"vllm"}


def interpreter(folder: Path, program: str) -> str:
    """Runs a program in place of the process that it is given."""
    (folder / "program.py").write_text(program)
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nexec {shlex.join([sys.executable, str(folder / 'program.py')])}\n")
    script.chmod(0o755)
    return str(script)


ANSWERS = """
import json, os, sys
job = json.load(sys.stdin)
known = {**{name: job[name] for name in ("target", "prompts", "ends")}, "path": os.environ.get("PYTHONPATH")}
for prompt, ids in list(job["prompts"].items())[:2]:
    row = {**job["row"], "version": json.dumps(known), "prompt": prompt, "ids": [3], "seconds": 2}
    print(json.dumps({**row, "decode_tokens": 2, "decode_seconds": 1, "text": "x"}), file=open(job["out"], "a"))
if len(job["prompts"]) > 2:
    sys.exit("begun\\nerror: Broken: no memory")
"""


def test_a_command_goes_on_where_it_was_stopped(
    gguf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies behind two of three prompts, and its reason stands in the table until the rest is there."""
    monkeypatch.setenv("PYTHONPATH", "ours")
    suite = tmp_path / "own.jsonl"
    suite.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    command = [str(tmp_path / "out"), "--target", gguf, "--suite", str(suite), "--max-tokens", "8"]
    command += ["--rivals", "openvino,vllm", "--openvino", interpreter(tmp_path, ANSWERS)]
    main(command)
    first, _, failed, other = read(tmp_path / "out" / FILE)
    known, target = json.loads(first["version"]), load(gguf, threads=1)
    prompts = {str(i): encode_turns(target, [text]) for i, text in enumerate(TEXTS)}
    assert known == {"target": gguf, "prompts": prompts, "ends": sorted(target.capabilities.eos_ids), "path": None}
    assert failed["error"] == "Broken: no memory" and other["rival"] == "vllm" and "--vllm" in other["error"]
    assert "Broken: no memory" in capsys.readouterr().out
    main(command)
    rows = [row for row in read(tmp_path / "out" / FILE) if row["rival"] == "openvino" and "error" not in row]
    assert [row["prompt"] for row in rows] == ["0", "1", "2"]
    assert "Broken" not in capsys.readouterr().out


def answer(rival: str, prompt: str, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    own = {"rival": rival, "version": "1", "prompt": prompt, "ids": [1] * (tokens + 1), "seconds": 9.0, "text": prompt}
    return {**ROW, **own, "decode_tokens": tokens, "decode_seconds": seconds, **more}


def test_the_table_pairs_prompts() -> None:
    """By hand. An answer of one token has no rate, and one that nobody else has no ratio."""
    rows = [
        answer("vllm-draft-model", "a", 8, 1.0, draft="small"),
        answer("llama.cpp", "a", 8, 2.0),
        answer("llama.cpp", "b", 8, 2.0),
        answer("llama.cpp", "c", 0, 0.0),
        answer("llama.cpp-ngram-mod", "a", 8, 0.5, round=0),
        answer("llama.cpp-ngram-mod", "a", 8, 1.5, round=1),
        answer("llama.cpp-ngram-mod", "b", 8, 1.0, text="other"),
        answer("llama.cpp-ngram-mod", "d", 8, 1.0),
        answer("draftree-ar", "a", 4, 0.5),
        answer("transformers-draft-model", "a", 0, 0.1, draft="small"),
        {**ROW, "rival": "openvino", "error": "no such architecture"},
    ]
    cells = {row[2]: dict(zip(HEADER, row, strict=True)) for row in table(rows)}
    assert [*cells][:2] == ["draftree-ar", "llama.cpp"] and [*cells][-2:] == ["openvino", "vllm-draft-model"]
    assert not cells["transformers-draft-model"]["tokens/s"]
    assert cells["llama.cpp"]["tokens/s"] == "4.0" and cells["llama.cpp"]["over llama.cpp"] == "1.00 [1.00, 1.00]"
    assert cells["llama.cpp-ngram-mod"]["over llama.cpp"] == "2.00 [2.00, 2.00]"
    assert cells["llama.cpp-ngram-mod"]["over AR"] == "1.00 [1.00, 1.00]"
    assert cells["llama.cpp-ngram-mod"]["text as plain"] == "2 of 3"
    assert cells["llama.cpp-ngram-mod"]["suite"] == "own, 3 x 8"
    assert cells["vllm-draft-model"]["version"] == "1, draft small" and not cells["vllm-draft-model"]["text as plain"]
    assert cells["openvino"]["note"] == "no such architecture" and not cells["openvino"]["tokens/s"]
    assert len(table([*rows, answer("llama.cpp", "a", 8, 1.0, suite="second")])) == len(cells) + 1
