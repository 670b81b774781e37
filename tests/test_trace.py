"""Traces: what the engine did is what the reader gives, and a trace never disturbs decoding or another file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Observer, Speculation
from draftree.errors import ConfigError, DraftreeWarning, TraceError
from draftree.integrations.hf_generate import as_processor
from draftree.policies.methods import METHODS
from draftree.request import Outcome, Request, Stats
from draftree.tracing.records import VERSION, EndRecord, RequestRecord, RunRecord, StepRecord, encode
from draftree.tracing.trace import Trace, read_trace
from draftree.tree import DraftTree

from .conftest import Full
from .pairs import drafter, policy, target

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26]]
SCHEMA = Path(__file__).parent.parent / "docs" / "traces.md"
OPEN_KEYS = ("drafter", "labels", "stats.drafters", "stats.out_of_context")
"""Objects whose keys are settings, the caller's words, and names of drafters."""


class Witness(Observer):
    """Keeps all that an observer is told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.outcomes: list[tuple[Outcome, int]] = []
        self.ended: list[Request] = []

    def opened(self, request: Request) -> None:
        self.requests.append(request)

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += [(o, len(o.request.ids) - o.taken) for o in outcomes]

    def closed(self, request: Request) -> None:
        self.ended.append(request)


def _engine(*observers: Observer, name: str = "relative", method: str = "dynamic-width") -> Engine:
    model = target()
    return Engine(model, Speculation(drafter(name, model, policy(method)), 12), observers=observers)


def _traced(path: Path, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> Witness:
    witness = Witness()
    with Trace(path, labels={"suite": "tests"}) as trace:
        _engine(trace, witness).generate(prompts, params)
    return witness


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PARAMS = [
    SamplingParams(max_tokens=14),
    SamplingParams(
        max_tokens=9, temperature=1.0, seed=5, processors=(as_processor(RepetitionPenaltyLogitsProcessor(1.2)),)
    ),
    SamplingParams(max_tokens=20, temperature=0.7, top_k=20),
]


@pytest.mark.parametrize("count", [1, 3])
def test_the_reader_gives_every_step_as_the_engine_took_it(count: int, tmp_path: Path) -> None:
    did = _traced(tmp_path / "t.jsonl", PROMPTS[:count], PARAMS[:count])
    steps = [r for r in read_trace(tmp_path / "t.jsonl") if isinstance(r, StepRecord)]
    assert len(steps) == len(did.outcomes)
    for record, (outcome, length) in zip(steps, did.outcomes, strict=True):
        request, cost = outcome.request, outcome.step
        assert did.requests[record.request] is request
        assert (record.length, record.root) == (length, request.ids[length - 1])
        for column in (f for f in fields(DraftTree) if f.repr):
            ours, theirs = getattr(record.tree, column.name), getattr(outcome.tree, column.name)
            assert np.asarray(ours).dtype == np.asarray(theirs).dtype
            assert np.array_equal(ours, theirs)
        assert (list(record.path), list(record.tokens), record.taken) == (outcome.path, outcome.tokens, outcome.taken)
        assert record.expected == pytest.approx(outcome.tree.expected_acceptance_length, rel=1e-8)
        assert (record.batch, record.draft_passes) == (cost.batch, cost.draft_passes)
        s = record.seconds
        assert (s.draft, s.verify, s.other) == pytest.approx((cost.draft, cost.verify, cost.other))
    assert max(len(r.path) for r in steps) > 0
    assert max(r.batch for r in steps) == count


@pytest.mark.parametrize("count", [1, 3])
def test_the_reader_gives_sequences_and_their_ends(count: int, tmp_path: Path) -> None:
    did = _traced(tmp_path / "t.jsonl", PROMPTS[:count], PARAMS[:count])
    records = list(read_trace(tmp_path / "t.jsonl"))
    assert isinstance(records[0], RunRecord)
    assert (records[0].nodes, records[0].verification, records[0].labels) == (
        12,
        "match",
        {"drafter": "model", "suite": "tests"},
    )
    assert records[0].target["dtype"] == "float32"
    assert records[0].drafter["policy"]["width_of"] == pytest.approx(
        {"class": "BranchingSteps", "sure": 0.02, "unsure": 1.0, "slope": 4.0, "width": 7, "stop": "Infinity"}
    )
    begun = [r for r in records if isinstance(r, RequestRecord)]
    ended = {r.request: r for r in records if isinstance(r, EndRecord)}
    assert [r.request for r in begun] == sorted(ended) == list(range(count))
    for r, request in zip(begun, did.requests, strict=True):
        assert list(r.prompt) == PROMPTS[r.request] == request.ids[: r.prompt_length]
        assert (r.seed, r.limit) == (request.seed, request.limit)
        assert r.params["temperature"] == request.params.temperature
        assert len(r.params["processors"]) == len(request.params.processors)
        steps = [s for s in records if isinstance(s, StepRecord) and s.request == r.request]
        gained = [t for s in steps for t in s.tokens[: s.taken]]
        assert [r.first, *gained] == request.output_ids
        assert [s.step for s in steps] == list(range(1, len(steps) + 1))
        stats = ended[r.request].stats
        assert ended[r.request].finish_reason == request.finish_reason == "length"
        assert _integers(stats) == _integers(request.stats)
        assert torch.tensor(stats.accepted_entropies).tolist() == request.stats.accepted_entropies
        assert stats.seconds.prefill == pytest.approx(r.prefill) == pytest.approx(request.stats.seconds.prefill)
        assert stats.seconds.draft == pytest.approx(sum(s.seconds.draft for s in steps))
        assert stats.seconds.total == pytest.approx(request.stats.seconds.total)


def _integers(stats: Stats) -> tuple[object, ...]:
    return stats.tokens, stats.steps, stats.drafted, stats.accepted, stats.draft_passes


def _keys(line: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, value in line.items():
        found.add(prefix + key)
        if isinstance(value, dict) and prefix + key not in OPEN_KEYS:
            found |= _keys(value, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("kind", ["run", "request", "step", "end"])
def test_the_schema_documents_exactly_the_keys_that_are_written(kind: str, tmp_path: Path) -> None:
    _traced(tmp_path / "t.jsonl", PROMPTS, PARAMS)
    table = SCHEMA.read_text().split(f"\n### {kind}\n")[1].split("\n### ")[0]
    documented = set(re.findall(r"^\| `([\w.]+)` \|", table, flags=re.M))
    written = [_keys(line) for line in _lines(tmp_path / "t.jsonl") if line["kind"] == kind]
    assert written
    assert all(keys == documented for keys in written)


@pytest.mark.parametrize("name", ["lookup", "relative", "none"])
def test_greedy_output_with_a_trace_equals_output_without(name: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30)
    with Trace(tmp_path / "t.jsonl") as trace:
        traced = _engine(trace, name=name).generate(PROMPTS, params)
    assert [g.token_ids for g in traced] == [g.token_ids for g in _engine(name=name).generate(PROMPTS, params)]


def test_infinities_and_every_float32_come_back_and_json_stays_json(tmp_path: Path) -> None:
    torch.manual_seed(0)
    n = 200
    bits = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32)
    floats = bits.view(torch.float32).nan_to_num()
    floats[:2] = torch.tensor([-torch.inf, torch.inf])
    first = _some_step(tmp_path)
    tree = DraftTree.of(torch.arange(n), torch.full((n,), -1), torch.ones(n, dtype=torch.int64), floats, floats.flip(0))
    line = encode(replace(first, tree=tree, path=(), tokens=(1,), taken=1))
    json.loads(line, parse_constant=pytest.fail)
    assert b'"-Infinity"' in line
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:2], line]))
    back = list(read_trace(path))[-1]
    assert isinstance(back, StepRecord)
    assert back.tree.path_logprobs.tolist() == floats.tolist()
    assert back.tree.entropies.tolist() == floats.flip(0).tolist()


def test_the_parts_of_an_ensemble_and_what_each_node_came_from_come_back(tmp_path: Path) -> None:
    witness = Witness()
    with Trace(tmp_path / "t.jsonl") as trace:
        _engine(trace, witness, name="lookup+relative").generate(
            PROMPTS[:1], SamplingParams(max_tokens=12, logit_bias={5: 100.0})
        )
    run, *records = read_trace(tmp_path / "t.jsonl")
    assert isinstance(run, RunRecord)
    parts = run.drafter["source"]["parts"]
    assert [part["class"] for part in parts] == ["NgramSource", "ModelSource"]
    assert isinstance(parts[1]["model"], str)
    steps = [r for r in records if isinstance(r, StepRecord)]
    for record, (outcome, _) in zip(steps, witness.outcomes, strict=True):
        assert len(record.tree) == len(outcome.tree)
        assert record.tree.part == outcome.tree.part
    assert {record.tree.part for record in steps if len(record.tree)} == {0, 1}


def _some_step(folder: Path) -> StepRecord:
    """The first step of ``folder/t.jsonl``, which it traces."""
    _traced(folder / "t.jsonl", PROMPTS[:1], SamplingParams(max_tokens=12))
    return next(r for r in read_trace(folder / "t.jsonl") if isinstance(r, StepRecord))


def test_a_step_knows_which_nodes_were_judged_and_which_accepted(tmp_path: Path) -> None:
    tree = DraftTree.of(
        torch.tensor([5, 6, 7, 8, 9]),
        torch.tensor([-1, -1, 0, 1, 3]),
        torch.tensor([1, 1, 2, 2, 3]),
        torch.zeros(5),
        torch.zeros(5),
    )
    record = replace(_some_step(tmp_path), tree=tree, path=(1,), tokens=(6, 2), taken=2)
    assert record.accepted.tolist() == [False, True, False, False, False]
    assert record.reached.tolist() == [True, True, False, True, False]
    assert replace(record, path=(), tokens=(2,), taken=1).reached.tolist() == [True, True, False, False, False]


def test_a_request_that_is_left_early_was_cancelled(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        stream = _engine(trace).stream(PROMPTS[0], SamplingParams(max_tokens=30))
        next(stream)
        del stream
    *_, end = read_trace(tmp_path / "t.jsonl")
    assert isinstance(end, EndRecord)
    assert end.finish_reason == "cancelled"


def test_a_trace_belongs_to_one_engine(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    _engine(trace)
    with pytest.raises(ConfigError, match="make a Trace for each"):
        _engine(trace)


def test_no_file_is_made_before_a_sequence_is_open(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        _engine(trace)
    assert not list(tmp_path.iterdir())


def test_a_users_own_drafter_and_functions_are_described_by_name(tmp_path: Path) -> None:
    class Own(NgramSource):
        pass

    made = TreeDrafter(METHODS["static"].policy(), Own(shortest=3))
    with Trace(tmp_path / "t.jsonl") as trace:
        Engine(target(), Speculation(made), observers=[trace]).generate([[1, 2]], SamplingParams(max_tokens=1))
    described = _lines(tmp_path / "t.jsonl")[0]["drafter"]
    assert described["class"] == "TreeDrafter"
    assert described["source"]["class"].endswith("Own")
    assert described["source"]["shortest"] == 3
    assert described["policy"] == {"class": "StaticTree", "width": 2, "depth": 4}


# what goes wrong


def test_a_full_disk_ends_the_trace_with_one_warning_and_not_the_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, complaints = Full(room=4000), list[str]()
    want = _engine().generate(PROMPTS, SamplingParams(max_tokens=30))
    trace = Trace(tmp_path / "t.jsonl", warn=complaints.append)
    engine = _engine(trace)
    monkeypatch.setattr(Path, "open", lambda self, mode: disk)
    got = engine.generate(PROMPTS, SamplingParams(max_tokens=30))
    trace.close()
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    assert len(complaints) == 1
    assert "No space left on device" in complaints[0]
    assert str(tmp_path / "t.jsonl") in complaints[0]
    assert disk.closed


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_warns_once_in_python(tmp_path: Path) -> None:
    with pytest.warns(DraftreeWarning, match="decoding goes on") as warned, Trace(tmp_path / "t.jsonl") as trace:
        got = _engine(trace).generate(PROMPTS, SamplingParams(max_tokens=9))
    assert len(warned) == 1
    assert [len(g.token_ids) for g in got] == [9, 9, 9]


def _trace_lines(tmp_path: Path) -> tuple[Path, list[bytes]]:
    path = tmp_path / "t.jsonl"
    _traced(path, PROMPTS[:2], SamplingParams(max_tokens=12))
    return path, path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("left", [1, 40, -2, -1])
def test_a_torn_last_line_is_left_out_with_one_warning(left: int, tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    torn = lines[-1][:left]
    path.write_bytes(b"".join(lines[:-1]) + torn)
    if left == -1:  # only the newline is missing: the line is whole
        assert len(list(read_trace(path))) == len(lines)
        return
    with pytest.warns(UserWarning, match=f"line {len(lines)}: torn") as warned:
        assert len(list(read_trace(path))) == len(lines) - 1
    assert len(warned) == 1


def _edit(line: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n"


CORRUPT: dict[str, dict[str, object]] = {
    "a path that leaves the tree": {"path": [99], "tokens": [1, 2]},
    "a path that does not lead down": {"path": [1, 0], "tokens": [1, 2, 3]},
    "more taken than given": {"taken": 50},
    "a parent after its child": {"tree": {"tokens": [1], "parents": [3], "depths": [1]}},
    "an unknown kind": {"kind": "stride"},
    "an unknown request": {"request": 7},
    "a length that does not follow": {"length": 3},
    "a second run": {"kind": "run"},
    "text for numbers": {"tokens": "abc"},
    "no object": {"tree": 3},
    "a token beyond int64": {
        "tree": {"tokens": [2**80], "parents": [-1], "depths": [1], "path_logprobs": [0.0], "entropies": [0.0]}
    },
    "a fraction for a number": {"taken": 1.0},
    "no seconds": {"seconds": {"draft": 1.0}},
    "words for seconds": {"expected": "soon"},
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_line_is_named_with_its_file_and_number(case: str, tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "step")
    lines[at] = _edit(lines[at], **CORRUPT[case])
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError, match=re.escape(f"'{path}', line {at + 1} is corrupt")):
        list(read_trace(path))


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b"\n", b"\xff\n", b'{"kind": "step"}\n', b"3\n"])
def test_a_line_that_is_no_record_is_corrupt(line: bytes, tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    path.write_bytes(b"".join([*lines[:4], line, *lines[4:]]))
    with pytest.raises(TraceError, match="line 5 is corrupt"):
        list(read_trace(path))


def test_a_lost_line_is_noticed(tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    path.write_bytes(b"".join([*lines[:3], *lines[4:]]))
    with pytest.raises(TraceError, match="length"):
        list(read_trace(path))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"text\n", b"[1]\n", b'{"kind":"run"}\n', b'{"kind":"end"}\n', b"\x89PNG\n"]
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(TraceError, match="not a draftree trace"):
        list(read_trace(tmp_path / "x"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "x"))


def test_a_newer_version_is_refused_and_new_keys_are_left_out(tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    path.write_bytes(b"".join(_edit(line, weather="fair") for line in lines))
    assert len(list(read_trace(path))) == len(lines)
    path.write_bytes(b"".join([_edit(lines[0], version=VERSION + 1), *lines[1:]]))
    with pytest.raises(TraceError, match=f"version {VERSION + 1} .* record it again"):
        list(read_trace(path))


def test_a_corrupt_line_names_the_key(tmp_path: Path) -> None:
    path, lines = _trace_lines(tmp_path)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "step")
    path.write_bytes(b"".join([*lines[:at], _edit(lines[at], seconds={"draft": 1.0})]))
    with pytest.raises(TraceError, match=r"step\.seconds\.verify") as found:
        list(read_trace(path))
    assert "\n" not in str(found.value)


class _Ending(Witness):
    """Witnesses one request, and whether it is done when its end is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bool] = []

    def closed(self, request: Request) -> None:
        super().closed(request)
        self.done.append(request.row is None)


def test_an_observer_of_one_request_is_notified_of_that_alone_and_before_it_is_done() -> None:
    """It was done, for other threads, before its observers knew: its last record could be missed."""
    whole, own = Witness(), _Ending()
    engine = _engine(whole)
    handles = [
        engine.submit(p, SamplingParams(max_tokens=9), observers=[own] * (i == 1)) for i, p in enumerate(PROMPTS)
    ]
    for handle in handles:
        handle.result()
    request = handles[1].request
    assert own.requests == own.ended == [request] and own.done == [False]
    assert [o for o, _ in own.outcomes] == [o for o, _ in whole.outcomes if o.request is request] != []
    assert len(whole.ended) == 3 and all(handle.done for handle in handles)
