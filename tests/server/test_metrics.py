"""What a server counts: equal to what its engine did, by depth and by drafter, and what its cache holds."""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftree.config import SamplingParams
from draftree.drafters.spec import NONE
from draftree.engine.engine import Engine
from draftree.engine.scheduler import SchedulerParams
from draftree.engine.speculation import Observer, SpeculationParams
from draftree.openai.answers import speculative_decoding
from draftree.policies.auto import AutoTree
from draftree.request import Outcome
from draftree.server.metrics import Metrics

from .running import NAME, TEXT, fetched, posted, running, target

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
ENSEMBLE = SpeculationParams(drafter="lookup+self", method="static", nodes=12)
REPEATING = {5: 100.0}
"""A bias that repeats one token, of which lookup is sure."""
PROMPTS = [TEXT, "the cat in the hat the cat in the hat", "abc abc abd abc abd"]


class _Witness(Observer):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes


def _figures(page: str) -> dict[tuple[str, ...], float]:
    """Name and values of labels -> figure."""
    families = text_string_to_metric_families(page)
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def _recounted(outcomes: Sequence[Outcome], parts: Sequence[str]) -> Counter[tuple[str, str]]:
    """Nodes by drafter and fate, one by one."""
    found = Counter[tuple[str, str]]()
    for outcome in outcomes:
        accepted = outcome.path[: outcome.taken]
        for node in range(len(outcome.tree)):
            name = parts[outcome.tree.part]
            found[name, "drafted"] += 1
            found[name, "accepted"] += node in accepted
    return found


@pytest.mark.parametrize(
    ("speculation", "parts"),
    [(ENSEMBLE, ["lookup", NAME]), (SpeculationParams(drafter="lookup", method="chain"), ["lookup"])],
)
def test_nodes_are_counted_by_depth_and_by_the_drafter_that_proposed_them(
    speculation: SpeculationParams, parts: list[str]
) -> None:
    metrics, witness = Metrics(), _Witness()
    engine = Engine(target(), speculation, observers=[metrics, witness])
    params = SamplingParams(max_tokens=64)
    made = engine.generate([*PROMPTS, TEXT], [params] * len(PROMPTS) + [replace(params, logit_bias=REPEATING)])
    expected = _recounted(witness.outcomes, parts)
    assert expected[parts[0], "accepted"] > 0 and expected[parts[-1], "accepted"] > 0
    told = speculative_decoding([one.stats for one in made])
    assert told["by_drafter"] == {
        name: {fate: expected[name, fate] for fate in ("drafted", "accepted")} for name in parts
    }
    figures = _figures(metrics.text(engine).decode())
    for name in parts:
        assert figures["draftree:drafter_tokens_total", "yes", name] == expected[name, "accepted"]
        rest = expected[name, "drafted"] - expected[name, "accepted"]
        assert figures["draftree:drafter_tokens_total", "no", name] == rest
    depths = Counter(depth for o in witness.outcomes for depth in o.tree.depths)
    for depth, count in depths.items():
        both = [figures.get(("draftree:draft_tokens_total", fate, str(depth)), 0.0) for fate in ("yes", "no")]
        assert sum(both) == count
    assert figures["vllm:spec_decode_num_draft_tokens_total",] == sum(depths.values())
    assert all(figures["draftree:step_seconds_total", part] > 0 for part in ("draft", "verify", "other"))


def test_without_drafts_no_drafter_is_named() -> None:
    (made,) = Engine(target(), SpeculationParams(drafter=NONE)).generate([TEXT], SamplingParams(max_tokens=4))
    assert speculative_decoding([made.stats])["by_drafter"] == {}


def test_what_the_cache_holds_is_told_beside_what_it_may_hold() -> None:
    metrics, model = Metrics(), target()
    model.cache_bytes = 4096 * model.capabilities.slot_bytes
    engine = Engine(model, ENSEMBLE, observers=[metrics], scheduling=SchedulerParams(rows=1, prefixes=2))
    for ended in range(2):
        stream = engine.stream(PROMPTS[1], SamplingParams(max_tokens=64))
        next(stream)
        figures, (job,) = _figures(metrics.text(engine).decode()), engine.scheduler.running
        assert job.request.row is not None
        held, kept = job.request.row.length, sum(engine.stepper.prefixes.lengths)
        assert held >= job.request.prompt_length
        assert figures["draftree:kv_tokens", "running"] == held and figures["draftree:kv_tokens", "kept"] == kept
        assert figures["draftree:kv_tokens_most",] == 4096
        assert figures["vllm:kv_cache_usage_perc",] == pytest.approx((held + kept) / 4096)
        assert figures["draftree:requests_running",] == 1 and figures["draftree:requests_waiting",] == 0
        assert figures["draftree:prefix_hits_total",] == ended
        list(stream)
    figures = _figures(metrics.text(engine).decode())
    assert figures["draftree:kv_tokens", "running"] == 0 < figures["draftree:kv_tokens", "kept"]
    assert figures["draftree:prompt_tokens_reused_total",] > 0


class _Sizes(Observer):
    """Drafted tokens of each step, by the number of requests in it."""

    def __init__(self) -> None:
        self.steps = defaultdict[int, list[int]](list)

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        self.steps[len(outcomes)].append(sum(len(outcome.tree) for outcome in outcomes))


def test_where_auto_stands_and_why_is_told_by_load() -> None:
    """By the metrics in figures, on the page in the lines of ``generate --explain``."""
    seen, speculation = _Sizes(), SpeculationParams(drafter="lookup", method="auto")
    with running(speculation=speculation, observers=[seen]) as served:
        for n in (1, 3):
            body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0.7, "n": n, "ignore_eos": True}
            assert posted(served, "/v1/completions", body)[0] == 200
        served.settle()
        policy = served.engine.speculation.drafter.policy
        assert isinstance(policy, AutoTree)
        report, figures = policy.report, _figures(fetched(served, "/metrics")[1])
        assert {1, 3} <= seen.steps.keys()
        for requests, nodes in seen.steps.items():
            assert figures["draftree:auto_step_nodes", str(requests)] == pytest.approx(mean(nodes))
        assert figures["draftree:auto_step_mean", "tokens"] == pytest.approx(report.tokens / report.steps)
        assert figures["draftree:auto_step_mean", "passes"] == pytest.approx(report.passes / report.steps)
        assert figures["draftree:auto_drafter_on", "lookup"] == report.drafters[0].on
        *_, by_load = json.loads(fetched(served, "/draftree/about")[1])["auto"].splitlines()
        assert all(f"{mean(nodes):.1f} of {requests}" in by_load for requests, nodes in seen.steps.items())


def test_without_auto_nothing_is_told_of_it() -> None:
    with running() as served:
        assert posted(served, "/v1/completions", {"prompt": TEXT, "max_tokens": 2})[0] == 200
        assert not any(name.startswith("draftree:auto_step") for name, *_ in _figures(fetched(served, "/metrics")[1]))
        assert json.loads(fetched(served, "/draftree/about")[1])["auto"] is None


def test_an_answer_names_its_drafters() -> None:
    with running(speculation=ENSEMBLE) as served:
        body = {"prompt": [TEXT, TEXT], "max_tokens": 24, "temperature": 0, "logit_bias": REPEATING}
        found = posted(served, "/v1/completions", body)[1]
    figures = found["metrics"]["speculative_decoding"]
    assert set(figures["by_drafter"]) == {"lookup", NAME}
    assert all(0 <= one["accepted"] <= one["drafted"] for one in figures["by_drafter"].values())
    assert sum(one["accepted"] for one in figures["by_drafter"].values()) >= figures["num_accepted_draft_tokens"] > 0


def test_the_queries_of_the_page_read_metrics_that_are_there() -> None:
    metrics = Metrics()
    auto = SpeculationParams(drafter="lookup", method="auto")
    engine = Engine(target(), auto, observers=[metrics], scheduling=SchedulerParams(prefixes=2))
    for prompt, speculation in (*((prompt, ENSEMBLE) for prompt in PROMPTS), (TEXT, None)):
        handle = engine.submit(prompt, SamplingParams(max_tokens=64), speculation)
        handle.result()
        metrics.ended(handle.request)
    families = text_string_to_metric_families(metrics.text(engine).decode())
    names = {sample.name for family in families for sample in family.samples}
    queries = PAGE.read_text().partition("Queries for a dashboard:")[2].partition("[Benchmarks")[0]
    read = {*re.findall(r"\b(?:draftree|vllm):\w+", queries)}
    assert len(read) == 8 and read <= names


def test_the_openapi_document_says_what_comes() -> None:
    """schemathesis found metrics documented as JSON, and FastAPI documents 422 where no other errors are given."""
    with running() as served:
        document = json.loads(fetched(served, "/openapi.json")[1])
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
        connection.request("GET", "/metrics")
        kind = connection.getresponse().headers["Content-Type"].split(";")[0]
        connection.close()
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == [kind] == ["text/plain"]
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["responses"].keys() - {"200"} == {"4XX", "503"}
