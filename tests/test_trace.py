"""Traces: they have what the engine did, and never disturb decoding or another file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from draftree.config import SamplingParams
from draftree.drafters.base import Drafter
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.engine.engine import Engine
from draftree.engine.speculation import Observer, Speculation
from draftree.engine.trace import RequestTrace, Trace, plain
from draftree.errors import ConfigError, DraftreeWarning, RunError
from draftree.integrations.hf_generate import as_processor
from draftree.policies.methods import METHODS
from draftree.request import Outcome, Request
from draftree.sampling.constraint import TokenRules
from draftree.sampling.grammar import Grammar
from draftree.tree import ROOT, DraftTree

from .conftest import Full
from .pairs import drafter, policy, target
from .test_concurrency import run
from .test_constraint import VOCAB, ToyConstraint, model

PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26]]
SCHEMA = Path(__file__).parent.parent / "docs" / "traces.md"
OPEN_KEYS = ("drafter", "labels", "stats.drafters", "stats.out_of_context", "texts")
"""Objects whose keys are settings, the caller's words, names of drafters, and token ids."""


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


def _columns(tree: DraftTree) -> dict[str, list[float]]:
    names = ("tokens", "parents", "depths", "path_logprobs", "entropies")
    return {name: getattr(tree, name) for name in names}


def _read_tree(written: dict[str, Any]) -> dict[str, list[float]]:
    """As float32 gives them."""
    floats = {name: np.array(written[name], np.float32).tolist() for name in ("path_logprobs", "entropies")}
    return {name: written[name] for name in ("tokens", "parents", "depths")} | floats


@pytest.mark.parametrize("count", [1, 3])
def test_a_trace_has_every_step_as_the_engine_took_it(count: int, tmp_path: Path) -> None:
    did = _traced(tmp_path / "t.jsonl", PROMPTS[:count], PARAMS[:count])
    steps = [line for line in _lines(tmp_path / "t.jsonl") if line["kind"] == "step"]
    assert len(steps) == len(did.outcomes)
    for record, (outcome, length) in zip(steps, did.outcomes, strict=True):
        request, cost = outcome.request, outcome.step
        assert did.requests[record["request"]] is request
        assert (record["length"], record["root"]) == (length, request.ids[length - 1])
        assert _read_tree(record["tree"]) == _columns(outcome.tree)
        assert (record["path"], record["tokens"], record["taken"]) == (outcome.path, outcome.tokens, outcome.taken)
        assert record["expected"] == pytest.approx(outcome.tree.expected_acceptance_length, rel=1e-8)
        assert (record["batch"], record["draft_passes"]) == (cost.batch, cost.draft_passes)
        assert record["seconds"] == pytest.approx({"draft": cost.draft, "verify": cost.verify, "other": cost.other})
    assert max(len(record["path"]) for record in steps) > 0
    assert max(record["batch"] for record in steps) == count


@pytest.mark.parametrize("count", [1, 3])
def test_a_trace_has_requests_and_their_ends(count: int, tmp_path: Path) -> None:
    did = _traced(tmp_path / "t.jsonl", PROMPTS[:count], PARAMS[:count])
    run, *records = _lines(tmp_path / "t.jsonl")
    assert (run["nodes"], run["verification"], run["labels"]) == (12, "match", {"drafter": "model", "suite": "tests"})
    assert run["target"]["dtype"] == "float32"
    assert run["drafter"]["policy"]["width_of"] == pytest.approx(
        {"class": "BranchingSteps", "sure": 0.02, "unsure": 1.0, "slope": 4.0, "width": 7, "stop": "Infinity"}
    )
    begun = [r for r in records if r["kind"] == "request"]
    ended = {r["request"]: r for r in records if r["kind"] == "end"}
    assert [r["request"] for r in begun] == sorted(ended) == list(range(count))
    for r, request in zip(begun, did.requests, strict=True):
        assert r["prompt"] == PROMPTS[r["request"]] == request.ids[: r["prompt_length"]]
        assert (r["seed"], r["limit"]) == (request.seed, request.limit)
        assert r["params"]["temperature"] == request.params.temperature
        assert len(r["params"]["processors"]) == len(request.params.processors)
        steps = [s for s in records if s["kind"] == "step" and s["request"] == r["request"]]
        gained = [t for s in steps for t in s["tokens"][: s["taken"]]]
        assert [r["first"], *gained] == request.output_ids
        assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
        end, stats = ended[r["request"]], request.stats
        assert end["finish_reason"] == request.finish_reason == "length"
        for name in ("tokens", "steps", "drafted", "accepted", "draft_passes"):
            assert end["stats"][name] == getattr(stats, name)
        assert end["stats"]["accepted_entropies"] == pytest.approx(stats.accepted_entropies)
        seconds = end["stats"]["seconds"]
        assert seconds["prefill"] == pytest.approx(r["prefill"]) == pytest.approx(stats.seconds.prefill)
        assert seconds["draft"] == pytest.approx(sum(s["seconds"]["draft"] for s in steps))
        assert sum(seconds.values()) == pytest.approx(stats.seconds.total)


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
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.M)
    documented = {key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)}
    written = [_keys(line) for line in _lines(tmp_path / "t.jsonl") if line["kind"] == kind]
    assert written
    assert all(keys == documented for keys in written)


@pytest.mark.parametrize("name", ["lookup", "relative", "none"])
def test_greedy_output_with_a_trace_equals_output_without(name: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30)
    with Trace(tmp_path / "t.jsonl") as trace:
        traced = _engine(trace, name=name).generate(PROMPTS, params)
    assert [g.token_ids for g in traced] == [g.token_ids for g in _engine(name=name).generate(PROMPTS, params)]


def test_infinities_and_every_float32_come_back_and_json_stays_json() -> None:
    torch.manual_seed(0)
    n = 200
    bits = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32)
    floats = bits.view(torch.float32).nan_to_num()
    floats[:2] = torch.tensor([-torch.inf, torch.inf])
    tree = DraftTree([*range(n)], [ROOT] * n, [1] * n, floats.tolist(), floats.flip(0).tolist())
    line = json.dumps(plain(tree), allow_nan=False)
    assert '"-Infinity"' in line
    assert _read_tree(json.loads(line)) == _columns(tree)


def test_constraints_are_written_as_their_classes() -> None:
    """The private fields of grammars were written."""
    grammar: Any = Grammar(None, None, None, None)  # type: ignore[arg-type]
    rules = TokenRules(VOCAB, frozenset(), inner=grammar)
    written = [plain(SamplingParams(constraint=constraint))["constraint"] for constraint in (grammar, rules, None)]
    assert written == ["Grammar", "TokenRules", None]


def test_a_trace_has_the_parts_of_an_ensemble_and_which_one_drafted(tmp_path: Path) -> None:
    witness = Witness()
    with Trace(tmp_path / "t.jsonl") as trace:
        _engine(trace, witness, name="lookup+relative").generate(
            PROMPTS[:1], SamplingParams(max_tokens=12, logit_bias={5: 100.0})
        )
    run, *records = _lines(tmp_path / "t.jsonl")
    parts = run["drafter"]["source"]["parts"]
    assert [part["class"] for part in parts] == ["NgramSource", "ModelSource"]
    assert isinstance(parts[1]["model"], str)
    trees = [record["tree"] for record in records if record["kind"] == "step"]
    assert [tree["part"] for tree in trees] == [outcome.tree.part for outcome, _ in witness.outcomes]
    assert {tree["part"] for tree in trees if tree["tokens"]} == {0, 1}


def test_a_request_that_is_left_early_was_cancelled(tmp_path: Path) -> None:
    with Trace(tmp_path / "t.jsonl") as trace:
        stream = _engine(trace).stream(PROMPTS[0], SamplingParams(max_tokens=30))
        next(stream)
        del stream
    *_, end = _lines(tmp_path / "t.jsonl")
    assert (end["kind"], end["finish_reason"]) == ("end", "cancelled")


def test_a_trace_belongs_to_one_engine(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    _engine(trace)
    with pytest.raises(ConfigError, match="a Trace"):
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
    disk = Full(room=4000)
    want = _engine().generate(PROMPTS, SamplingParams(max_tokens=30))
    trace = Trace(tmp_path / "t.jsonl")
    engine = _engine(trace)
    monkeypatch.setattr(Path, "open", lambda self, mode: disk)
    with pytest.warns(DraftreeWarning, match="No space left") as warned:
        got = engine.generate(PROMPTS, SamplingParams(max_tokens=30))
        trace.close()
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    assert len(warned) == 1
    assert str(tmp_path / "t.jsonl") in str(warned[0].message)
    assert disk.closed


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_warns_once_in_python(tmp_path: Path) -> None:
    with pytest.warns(DraftreeWarning, match="goes on") as warned, Trace(tmp_path / "t.jsonl") as trace:
        got = _engine(trace).generate(PROMPTS, SamplingParams(max_tokens=9))
    assert len(warned) == 1
    assert [len(g.token_ids) for g in got] == [9, 9, 9]


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


class _FaultError(Exception):
    """What a drafter or an observer raises."""


class _FaultyDrafter(Drafter):
    def observe(self, outcomes: Sequence[Outcome]) -> None:
        raise _FaultError


class _FaultyObserver(Observer):
    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        raise _FaultError


@pytest.mark.parametrize("at_fault", ["drafter", "observer"])
def test_a_failure_beside_them_takes_nothing_from_other_requests(at_fault: str, tmp_path: Path) -> None:
    """One whose prompt ended in that step ended by a KeyError of the trace; another lost its record of the step."""
    with Trace(tmp_path / "t.jsonl") as trace:
        witness = Witness()
        engine, params = _engine(trace, witness), SamplingParams(max_tokens=9)
        faulty = Speculation(_FaultyDrafter()) if at_fault == "drafter" else None
        observers = [_FaultyObserver()] if at_fault == "observer" else []
        failing = engine.submit(PROMPTS[0], params, faulty, observers=observers)
        going = engine.submit(PROMPTS[1], params, Speculation())
        engine.advance()
        began = engine.submit(PROMPTS[2], params)
        engine.advance()
        with pytest.raises((_FaultError, RunError)):
            failing.result()
        for handle, prompt in ((going, PROMPTS[1]), (began, PROMPTS[2])):
            assert handle.result().token_ids == _engine().generate([prompt], params)[0].token_ids
            assert handle.request.stats.tokens == 9 and handle.request.stats.seconds.prefill > 0
    assert began.request in witness.requests
    records = _lines(tmp_path / "t.jsonl")
    for number, handle in ((1, going), (2, began)):
        ours = [record for record in records if record.get("request") == number]
        assert [record["kind"] for record in ours if record["kind"] != "step"] == ["request", "end"]
        gained = [t for s in ours if s["kind"] == "step" for t in s["tokens"][: s["taken"]]]
        assert [ours[0]["first"], *gained] == handle.request.output_ids


def _dying(kind: str, at: int) -> SamplingParams:
    """Params of a prompt of two tokens: the next token fails behind so many."""

    def ends(ids: Any, logits: Any = False) -> Any:
        if len(ids) == 2 + at + (kind == "criteria"):
            raise _FaultError(kind, at)
        return logits

    if kind != "constraint":
        options: dict[str, Any] = {kind: (ends,)}
        return SamplingParams(ignore_eos=True, **options)
    dead = ToyConstraint(lambda path: set() if len(path) == at else {0, 1})
    return SamplingParams(constraint=TokenRules(VOCAB, frozenset(), inner=dead))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", ["constraint", "processors", "criteria"])
def test_a_request_with_a_trace_ends_by_its_own_error(kind: str, at: int, beside: bool, tmp_path: Path) -> None:
    """Where its first token could not come, the IndexError of its trace took the error's place."""
    errors = set()
    for traced in ("not", "request", "file"):
        own, witness, path = RequestTrace(0, None), Witness(), tmp_path / traced
        with Trace(path) as trace:
            engine = Engine(model(), observers=[witness, *[trace] * (traced == "file")])
            handles = [engine.submit([1, 2], _dying(kind, at), observers=[own] * (traced == "request"))]
            if beside:
                handles.append(engine.submit([2, 1], SamplingParams(max_tokens=9)))
            run(engine, handles)
        error = handles[0].request.error
        assert isinstance(error, ConfigError if kind == "constraint" else _FaultError)
        errors.add((type(error), str(error)))
        assert all(request.output_ids for request in witness.requests)
        records = [*own.take(), *(_lines(path) if path.exists() else [])]
        begun, ended = ([r["request"] for r in records if r["kind"] == kind] for kind in ("request", "end"))
        assert sorted(begun) == sorted(ended)
        assert len(ended) >= (at > 0) * (traced != "not")
    assert len(errors) == 1
