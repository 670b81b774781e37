"""Exactness of systems: what is varied, what each process decodes with it, and the table of what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import exactness, rival_process
from benchmarks.exactness import FILE, HEADER, LOOKUPS, PLAIN, main, tables, variants
from benchmarks.rival_jobs import DRAFTS, read
from draftree.bench.run import encode_turns
from draftree.models.loading import load
from draftree.models.native.binding import tiers

from .. import tiny_gguf
from ..tiny import save_tiny
from .test_rivals import TEXTS, interpreter, job

SETS = ["avx2", "base"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights="Q8_0"))


def factors(name: str, *, draft: bool = True, threads: int = 2, sets: list[str] = SETS) -> list[tuple[Any, ...]]:
    made = variants(name, draft, threads, sets)
    return [(each.rival, each.labels["factor"], dict(each.changes)) for each in made]


def test_one_thing_changes_at_a_time() -> None:
    found = factors("llama.cpp")
    assert found[:2] == [("llama.cpp", PLAIN, {}), ("llama.cpp", "again", {})]
    assert [changes for rival, _, changes in found if rival == "llama.cpp" + DRAFTS] == [
        {"drafted": width} for width in (2, 4, 8)
    ]
    assert [changes for rival, _, changes in found if rival == "llama.cpp-ngram-map-k"] == [
        {"drafted": width} for width in (2, 4, 8)
    ]
    assert [changes for *_, changes in found[8:]] == [{"requests": 4}, {"requests": 16}, {"threads": 1}]
    assert len({factor for _, factor, _ in found}) == len(found) == 11


def test_a_factor_is_there_where_a_system_or_a_machine_has_it() -> None:
    changed = {name: [changes for *_, changes in factors(name)] for name in LOOKUPS}
    assert [changes["tier"] for changes in changed["draftree"] if "tier" in changes] == SETS
    assert [changes["tier"] for changes in changed["transformers"] if "tier" in changes] == ["avx2"]
    assert not [
        name for name in ("draftree+llama.cpp", "llama.cpp", "openvino", "vllm") if "avx2" in str(changed[name])
    ]
    assert not [each for each in factors("transformers", sets=["base"]) if "tier" in each[2]]
    assert not [each for each in factors("vllm", threads=1) if "threads" in each[2]]
    assert not [each for each in factors("openvino", draft=False) if each[0].endswith(DRAFTS)]
    assert factors("draftree+llama.cpp")[0][0] == "draftree+llama.cpp-ar"


ALIKE = [
    ("draftree", "-prompt-lookup", {"drafted": 4}),
    ("draftree", DRAFTS, {"drafted": 2}),
    ("draftree", "-ar", {"requests": 3}),
    ("draftree+llama.cpp", DRAFTS, {"drafted": 4}),
    ("draftree+llama.cpp", "-ar", {"requests": 3}),
    ("llama.cpp", "-ngram-map-k", {"drafted": 4}),
    ("llama.cpp", DRAFTS, {"drafted": 8}),
    ("llama.cpp", "", {"requests": 3}),
]


@pytest.mark.parametrize(("name", "way", "changes"), ALIKE)
def test_what_is_varied_leaves_the_text_of_an_exact_file(
    name: str, way: str, changes: dict[str, Any], gguf: str
) -> None:
    """Of Q8_0, which llama.cpp computes alike for any number of tokens."""
    target = load(gguf, threads=1)
    prompts = {text: encode_turns(target, [text]) for text in TEXTS}
    own = job(name + way, gguf, prompts, gguf if way == DRAFTS else "")
    texts = []
    for each in (job(f"{name}-ar" if "draftree" in name else name, gguf, prompts), replace(own, **changes)):
        _, decode = rival_process.SYSTEMS[name](each)
        answers = decode([*prompts.values()] if each.requests > 1 else [*prompts.values()][:1], 12)
        texts.append([(answer.text, answer.ids) for answer in answers])
    assert len(texts[1]) == changes.get("requests", 1)
    assert texts[1][0] == texts[0][0] and texts[0][0][1]


def test_every_instruction_set_is_the_one_that_is_named(gguf: str) -> None:
    for tier in tiers():
        known, _ = rival_process.draftree(replace(job("draftree-ar", gguf, {"p": [5]}), tier=tier))
        assert known.endswith(f", {tier}")


@pytest.mark.parametrize("way", ["-prompt-lookup", DRAFTS])
def test_transformers_drafts_so_many_tokens(way: str, model: str, tmp_path: Path) -> None:
    """A copy of the target drafts: the first pass gains all drafted tokens and one more."""
    copy, prompt = str(save_tiny(tmp_path / "copy")) if way == DRAFTS else "", [7, 8, 9, 7, 8]
    given = replace(job(f"transformers{way}", model, {"p": prompt}, copy), drafted=4)
    plain, drafted = (rival_process.transformers(each)[1] for each in (job("transformers", model, {}), given))
    ((one,), (other,)) = (decode([prompt], 20) for decode in (plain, drafted))
    assert one.ids == other.ids and len(one.ids) > 5
    if copy:
        assert len(other.ids) - other.decode_tokens == 1 + 4


def test_transformers_batches_are_filled_up_on_the_left(model: str) -> None:
    _, decode = rival_process.transformers(job("transformers", model, {"p": [7]}))
    prompts = [[7, 8, 9, 7, 8], [3, 4], [11] * 9]
    together, alone = decode(prompts, 10), [decode([ids], 10)[0] for ids in prompts]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


WIDE = """
import json, sys
job = json.load(sys.stdin)
for prompt in job["prompts"]:
    other = job["drafted"] == 8 and prompt != "1" or job["requests"] == 16 and prompt == "0"
    ids = [3, 4, 5] if not other else [3, 9] if prompt == "0" else [3, 4, 5, 6]
    row = {**job["row"], "version": "9", "prompt": prompt, "ids": ids, "seconds": 2, "decode_tokens": 1}
    print(json.dumps({**row, "decode_seconds": 1, "text": " ".join(map(str, ids))}), file=open(job["out"], "a"))
if job["threads"] == 1:
    sys.exit("error: Broken: no threads")
"""


def test_a_system_that_changes_its_text_with_the_width_is_counted(
    gguf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "default_threads", lambda: 2)
    suite, out = tmp_path / "own.jsonl", tmp_path / "out"
    suite.write_text("".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(TEXTS)))
    command = [str(out), "--target", gguf, "--draft", gguf, "--suite", str(suite), "--systems", "vllm"]
    command += ["--vllm", interpreter(tmp_path, WIDE)]
    monkeypatch.setattr("benchmarks.rival_jobs.Measurement._form", lambda *_, **__: gguf)
    main(command)
    printed = capsys.readouterr().out
    main([str(out), "--report"])
    assert capsys.readouterr().out == printed
    (cells,) = tables(read(out / FILE)).values()
    found = {row[2]: row[3:] for row in cells}
    assert found.pop("1 thread") == ["0 of 3", "", "Broken: no threads"]
    assert found.pop("n-grams, 8 tokens") == ["2 of 3", "2 (2)", ""]
    assert found.pop("draft model, 8 tokens (tiny)") == ["2 of 3", "2 (2)", ""]
    assert found.pop("16 requests") == ["1 of 3", "2 (2)", ""]
    assert len(found) == 6 and {tuple(row) for row in found.values()} == {("0 of 3", "", "")}


def line(rival: str, factor: str, prompt: str, ids: list[int], **more: Any) -> dict[str, Any]:
    row = {"model": "tiny", "suite": "own", "max_tokens": 8, "rival": rival, "draft": "", "factor": factor}
    return {**row, "version": "1", "prompt": prompt, "ids": ids, "text": " ".join(map(str, ids)), **more}


def test_the_table_compares_a_system_with_its_own_plain_decoding() -> None:
    """By hand. A text that is another one's beginning differs behind its end; ids that spell one text do not."""
    rows = [
        line("llama.cpp", PLAIN, "a", [1, 2, 3]),
        line("llama.cpp", PLAIN, "b", [1, 2, 3]),
        line("llama.cpp", PLAIN, "c", [1, 2, 3]),
        line("draftree-ar", PLAIN, "a", [7, 7]),
        line("draftree-ar", "again", "a", [7, 7]),
        line("llama.cpp-ngram-map-k", "n-grams, 2 tokens", "a", [1, 2, 3, 4]),
        line("llama.cpp-ngram-map-k", "n-grams, 2 tokens", "b", [2]),
        line("llama.cpp-ngram-map-k", "n-grams, 2 tokens", "c", [1, 23], text="1 2 3"),
        line("llama.cpp-ngram-map-k", "n-grams, 2 tokens", "d", [5]),
        {**line("llama.cpp", "1 thread", "", []), "error": "no memory"},
        line("llama.cpp", "again", "a", [9], max_tokens=4),
    ]
    del rows[-2]["prompt"], rows[-2]["ids"]
    found = tables(rows)
    assert [*found] == ["tiny, own, 8 tokens", "tiny, own, 4 tokens"]
    cells = [dict(zip(HEADER, row, strict=True)) for row in found["tiny, own, 8 tokens"]]
    assert [(row["system"], row["factor"]) for row in cells] == [
        ("draftree", "again"),
        ("llama.cpp", "n-grams, 2 tokens"),
        ("llama.cpp", "1 thread"),
    ]
    assert [row["other texts"] for row in cells] == ["0 of 1", "2 of 3", ""]
    assert [row["first other token"] for row in cells] == ["", "1 (1)", ""] and cells[2]["note"] == "no memory"
    assert found["tiny, own, 4 tokens"][0][3:] == ["", "", ""]
