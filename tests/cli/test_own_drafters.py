"""Drafters and verification schemes of a user on the command line, as MODULE:NAME."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftree.bench.results import read_results
from draftree.cli.main import run
from draftree.drafters.spec import DrafterSpec, read_drafter

from .. import tiny_gguf
from .test_own_methods import with_modules

Captured = pytest.CaptureFixture[str]
MINE = """
import json
from dataclasses import dataclass
from pathlib import Path
import draftree

known = Path("known.json")

class Pairs(draftree.Scorer):
    def __init__(self, requests):
        self.requests = requests

    def score(self, nodes, width):
        found = []
        for b, node, parent, token in nodes:
            ids = [*self.requests[b].ids]
            last = ids[-1] if node < 0 else token
            ids += json.loads(known.read_text()) if known.exists() else []
            after = [y for x, y in zip(ids, ids[1:]) if x == last][-1:]
            found.append(draftree.Candidates(after, [-0.1] * len(after), 0.1))
        return found

class Mine(draftree.DraftSource):
    def __init__(self, target):
        self.vocab = target.capabilities.vocab_size

    def scorer(self, requests, coupled):
        assert all(0 <= token < self.vocab for request in requests for token in request.ids)
        return Pairs(requests)

@dataclass  # equal by value, and so without a hash
class Unready(Mine):
    name = "ready"

    def __init__(self):
        self.vocab = 10**6

ready = Unready()

@dataclass
class First(draftree.NodeByNode):
    lossy = True

    def decide(self, visit, draws):
        return visit.children[0]

first = First()
number = 4

def none(*target):
    return None

def ends(target):
    raise KeyError("x")
"""
NAME = "draftree_test_own"
MODULES = {NAME: MINE, "draftree_test_raises": "1 / 0"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return with_modules(MODULES, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("models") / "tiny.gguf", layers=1))


def generated(model: str, capsys: Captured, *words: str) -> dict[str, Any]:
    command = ["generate", "a b a b a b", "--target", model, "--max-tokens", "40", "--method", "chain", "--json"]
    assert run([*command, *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


OWN = f"{NAME}:Mine"
DRAFTERS = [OWN, f"lookup+{OWN}", f"{NAME}:ready", f"lookup+{NAME}:ready", f"{OWN}:method=chain:depth=2>self:pending=2"]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_drafter_of_ones_own_drafts_and_changes_no_text(
    drafter: str, temperature: str, model: str, folder: Path, capsys: Captured
) -> None:
    """It knows what comes."""
    words = ["--temperature", temperature, "--seed", "3"]
    alone = generated(model, capsys, *words, "--drafter", "none")
    (folder / "known.json").write_text(json.dumps(alone["token_ids"]))
    found = generated(model, capsys, *words, "--drafter", drafter)
    assert found["token_ids"] == alone["token_ids"]
    assert found["stats"]["mal"] > 2 > generated(model, capsys, *words, "--drafter", "lookup")["stats"]["mal"]


@pytest.mark.parametrize("scheme", ["First", "first"])
def test_a_scheme_of_ones_own_decides(scheme: str, model: str, capsys: Captured) -> None:
    """It accepts all that is drafted, which the control, match, does not."""
    words = ["--drafter", OWN, "--temperature", "1", "--seed", "3"]
    own = generated(model, capsys, *words, "--verify", f"{NAME}:{scheme}")
    control = generated(model, capsys, *words)
    assert (own["verification"], own["lossy"]) == (scheme.capitalize(), True)
    assert (control["verification"], control["lossy"]) == ("match", False)
    assert own["stats"]["mal"] > control["stats"]["mal"] and own["token_ids"] != control["token_ids"]


def bench(model: str, out: Path, methods: str, drafters: str) -> list[str]:
    (out.parent / "suite.jsonl").write_text('{"prompt": "the cat in the hat"}\n{"prompt": "a b a b a b"}\n')
    words = ["bench", "--suite", str(out.parent / "suite.jsonl"), "--target", model, "--drafters", drafters]
    return [*words, "--max-tokens", "12", "--methods", methods, "--out", str(out)]


def test_they_take_part_in_a_benchmark_that_goes_on_with_the_same_file_alone(
    model: str, folder: Path, capsys: Captured
) -> None:
    methods = [f"chain:verify={NAME}:First:depth=2", "chain", "opt-tree:nodes=4"]
    asked = bench(model, folder / "out", ",".join(methods), f"{OWN},lookup+{OWN},lookup")
    assert run(asked) == 0
    rows = json.loads((folder / "out" / "summary.json").read_text())["methods"]
    equal = {name: row["all"]["ids_equal"] for name, row in rows.items()}
    for drafter in (OWN, f"lookup+{OWN}", "lookup"):
        assert equal[f"chain@{drafter}"] == equal[f"opt-tree:nodes=4@{drafter}"] == 1.0
    drafted = {record.method for record in read_results(folder / "out") if any(t.steps for t in record.turns)}
    assert {f"{method}@{OWN}" for method in methods} <= drafted
    results = folder / "out" / "results.jsonl"
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    assert run(asked) == 0
    module = folder / f"{NAME}.py"
    module.write_text(MINE + "\n")
    capsys.readouterr()
    assert run(asked) == 2
    assert str(module) in capsys.readouterr().err


def test_lines_of_a_batch_are_drafted_for_by_it(model: str, folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"custom_id": "0", "prompt": "a b a b a b", "max_tokens": 12}\n')
    texts = list[str]()
    for drafter in (f"lookup+{OWN}", "none"):
        assert run(["batch", "in.jsonl", f"{len(texts)}.jsonl", "--target", model, "--drafter", drafter]) == 0
        (line,) = (folder / f"{len(texts)}.jsonl").read_text().splitlines()
        texts.append(json.loads(line)["response"]["body"]["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


BAD = {
    "draftree_test_none:Mine": "importing draftree_test_none raised ModuleNotFoundError: No module named",
    "draftree_test_raises:Mine": "importing draftree_test_raises raised ZeroDivisionError: division by zero",
    f"{NAME}:Other": f"{NAME}.py has no 'Other'",
    f"{NAME}:number": "raised TypeError: 'int' object is not callable",
    f"{NAME}:none": "returned None: return a ",
}
BAD_DRAFTERS = {
    **BAD,
    "lookup+draftree_test_none:Mine": "importing draftree_test_none raised",
    "draftree_test_none:Mine:method=chain>self": "importing draftree_test_none raised",
    f"{NAME}:Unready": "raised TypeError: Unready.__init__() takes 1 positional argument but 2 were given",
    f"{NAME}:ends": "raised KeyError: 'x'",
    f"{NAME}:First": "raised TypeError",
    f"lookup>{OWN}": f"{OWN} is no model, whose passes a cascade could save: use drafter lookup+{OWN}",
}
BAD_SCHEMES = {**BAD, f"{NAME}:": f"{NAME}.py has no ''", f"{NAME}:ends": "missing 1 required positional argument"}
CASES = [("--drafter", name, said) for name, said in BAD_DRAFTERS.items()]
CASES += [("--verify", name, said) for name, said in BAD_SCHEMES.items()]


@pytest.mark.parametrize(("flag", "name", "said"), CASES)
def test_what_is_none_is_refused_in_one_line(flag: str, name: str, said: str, model: str, capsys: Captured) -> None:
    assert run(["generate", "a b", "--target", model, flag, name]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and name.split(">")[0].split("+")[-1].split(":method")[0] in line
    assert line.startswith("draftree: ")


@pytest.mark.parametrize("command", ["generate a --target not-loaded", "serve not-loaded", "batch in.jsonl out.jsonl"])
@pytest.mark.parametrize("flag", ["--drafter", "--verify"])
def test_no_model_is_loaded_before_the_import(flag: str, command: str, capsys: Captured) -> None:
    assert run([*command.split(), flag, "draftree_test_none:Mine"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "importing draftree_test_none raised" in line


def test_beams_are_drafted_by_models_alone(model: str, capsys: Captured) -> None:
    assert run(["generate", "a b", "--target", "not-loaded", "--beams", "2", "--drafter", OWN]) == 2
    assert OWN in capsys.readouterr().err


OTHERS = (
    "hf.co/ORG/NAME:Q4_K_M",
    "lookup+hf.co/ORG/NAME:Q4_K_M",
    r"C:\models\tiny.gguf",
    "C:/models/tiny.gguf",
    "org/name",
    "lookup:method=chain>self:pending=2",
)


@pytest.mark.parametrize("name", [*OTHERS, f"{NAME}:Mine.gguf"])
def test_what_else_has_colons_imports_nothing(name: str) -> None:
    assert read_drafter(name) == name
    assert NAME not in sys.modules


def test_a_file_of_that_name_comes_first(folder: Path) -> None:
    (folder / OWN).write_text("")
    assert read_drafter(OWN) == OWN and read_drafter(f"lookup+{OWN}") == f"lookup+{OWN}"
    assert NAME not in sys.modules
    (folder / OWN).unlink()
    assert isinstance(read_drafter(OWN), DrafterSpec) and NAME in sys.modules
