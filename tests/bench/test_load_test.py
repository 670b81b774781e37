"""``draftree bench-serve``: what guidellm is given, and the table of reports that it really wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftree.bench.load_test import load_table, read_report
from draftree.cli.main import run
from draftree.errors import ConfigError, RunError

Captured = pytest.CaptureFixture[str]
REPORTS = Path(__file__).parent / "reports"
TREES, AR = REPORTS / "guidellm-trees.json", REPORTS / "guidellm-ar.json"
"""Of 4 prompts at concurrency 1 and 2 to SmolLM2 on llama.cpp, two cores, guidellm 0.8.1; only figures are left."""
STAND_IN = f"""#!{sys.executable}
import json, os, shutil, sys
scenario = json.loads(open(sys.argv[sys.argv.index("--config") + 1]).read())
spec = scenario["spec"]
(output,) = spec["outputs"]
with open(os.environ["SEEN"], "a") as seen:
    prompts = open(spec["data"][0]["path"]).read()
    seen.write(json.dumps(dict(scenario, prompts=prompts)) + "\\n")
if spec["backend"]["target"] == "http://broken":
    sys.exit("first line\\nno connection")
without = spec["backend"]["extras"]["body"].get("draftree") == {{"drafter": "none"}}
shutil.copy({str(AR)!r} if without else {str(TREES)!r}, output["path"])
"""
"""Of guidellm: notes what it is given, and leaves a recorded report."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "guidellm"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("DRAFTREE_API_KEY", "secret")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return program


def _words(program: Path, *more: str, url: str = "http://here:1/v1/") -> list[str]:
    folder = program.parent
    words = ["bench-serve", url, "--suite", str(folder / "prompts.jsonl"), "--out", str(folder / "out")]
    return [*words, "--guidellm", str(program), "--concurrency", "1,2", "--max-tokens", "24", *more]


def _seen(program: Path) -> list[Any]:
    return [json.loads(line) for line in (program.parent / "seen").read_text().splitlines()]


def test_a_server_is_measured_as_it_is_and_without_drafts(stand_in: Path, capsys: Captured) -> None:
    assert run(_words(stand_in)) == 0
    table = capsys.readouterr().out
    trees, ar = _seen(stand_in)
    body = {"max_completion_tokens": 24, "temperature": 0.0, "seed": 11}
    for seen, expected in ((trees, body), (ar, body | {"draftree": {"drafter": "none"}})):
        backend = seen["spec"]["backend"]
        assert backend["extras"]["body"] == expected
        assert (backend["target"], backend["api_key"]) == ("http://here:1", "secret")
        assert seen["benchmarks"] == [{"profile.streams": 1}, {"profile.streams": 2}]
        assert seen["spec"]["constraints"] == [{"kind": "max_requests", "count": 2}]
        assert [json.loads(line)["prompt"] for line in seen["prompts"].splitlines()] == ["one", "two"]
    assert table.strip() == load_table({"draftree": read_report(TREES), "AR": read_report(AR)})
    out = stand_in.parent / "out"
    assert not any("secret" in path.read_text() for path in out.iterdir())

    assert run(_words(stand_in)) == 0  # reports that are there are read
    assert capsys.readouterr().out == table and len(_seen(stand_in)) == 2
    assert run(_words(stand_in, "--seed", "12")) == 2
    assert "reports of another command" in capsys.readouterr().err


def test_a_server_is_compared_with_another(stand_in: Path, capsys: Captured) -> None:
    assert run(_words(stand_in, "--against", "http://there:2")) == 0
    own, other = (seen["spec"]["backend"] for seen in _seen(stand_in))
    assert own["target"] == "http://here:1" and other["target"] == "http://there:2"
    assert own["extras"] == other["extras"] and "draftree" not in own["extras"]["body"]
    assert "over http://there:2" in capsys.readouterr().out


def test_the_table_has_what_guidellm_measured() -> None:
    reports = [json.loads(path.read_text())["benchmarks"] for path in (TREES, AR)]
    _, _, *lines = load_table({"trees": read_report(TREES), "AR": read_report(AR)}).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[1]) for row in rows] == [("trees", "1"), ("AR", "1"), ("trees", "2"), ("AR", "2")]
    for at in range(2):
        both = [report[at]["metrics"] for report in reports]
        means = [figures["output_tokens_per_second"]["successful"]["mean"] for figures in both]
        for row, figures, mean in zip(rows[2 * at :], both, means, strict=False):
            assert row[2:5] == ["4", "0", f"{mean:.1f}"]
            for cell, name in zip(row[5:7], ("time_to_first_token_ms", "inter_token_latency_ms"), strict=True):
                percentiles = figures[name]["successful"]["percentiles"]
                assert cell == f"{percentiles['p50']:.0f}, {percentiles['p95']:.0f}"
        assert [rows[2 * at][7], rows[2 * at + 1][7]] == [f"{means[0] / means[1]:.2f}", ""]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--concurrency", "1,zero"], 2, "--concurrency is '1,zero': use whole numbers from 1"),
        (["--concurrency", "0"], 2, "--concurrency is '0': use whole numbers from 1"),
        (["--guidellm", "no-such-program"], 2, "no program 'no-such-program'"),
        (["--against", "http://broken"], 1, "guidellm failed at http://broken: no connection"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    stand_in: Path, words: list[str], code: int, message: str, capsys: Captured
) -> None:
    assert run(_words(stand_in, *words)) == code
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_missing_program_is_named_before_anything_is_written(stand_in: Path, capsys: Captured) -> None:
    """A folder with settings alone made the next command, with other settings, complain about the folder."""
    assert run(_words(stand_in, "--guidellm", "no-such-program")) == 2
    assert not (stand_in.parent / "out").exists()
    assert run(_words(stand_in)) == 0
    assert run(_words(stand_in, "--guidellm", "no-such-program")) == 0  # nothing is left to measure


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_report(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text('{"benchmarks": [{"config": {}}]}')
    with pytest.raises(ConfigError, match="no report that guidellm"):
        read_report(tmp_path / "other.json")
    report = json.loads(AR.read_text())
    report["benchmarks"][1]["metrics"]["request_totals"] = {"successful": 0, "errored": 4, "incomplete": 0}
    (tmp_path / "failed.json").write_text(json.dumps(report))
    with pytest.raises(RunError, match="concurrency 2"):
        read_report(tmp_path / "failed.json")
