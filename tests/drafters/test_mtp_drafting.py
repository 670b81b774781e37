"""Decoding with MTP layers of the target's own checkpoint: the output never changes, whatever they draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftree.beams.beam_engine import BeamEngine
from draftree.beams.params import BeamParams
from draftree.config import SamplingParams
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.heads.eagle import EagleSource
from draftree.drafters.registry import load_drafter, load_source
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.engines import load_beam_source
from draftree.models.heads.mtp import load_mtp
from draftree.models.huggingface.hf_model import HFModel
from draftree.verify.schemes import find_scheme

from ..heads import PROMPTS
from ..mtp import Oracle, known, read, save_mtp
from ..pairs import generated, policy
from ..tiny import VOCAB

CASES = [("glm4_moe", 1), ("deepseek_v3", 3)]


@pytest.fixture(scope="module", autouse=True)
def known_layers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        known(patch)
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, layers = request.param
    return save_mtp(tmp_path_factory.mktemp(f"{kind}{layers}"), kind, layers)


@pytest.fixture(scope="module")
def target(folder: Path) -> HFModel:
    return HFModel(read(folder), name="tiny", self_test=False)


def engine(target: HFModel, method: str, scheme: str = "match") -> Engine:
    source = EagleSource(load_mtp(target), VOCAB)
    return Engine(target, Speculation(TreeDrafter(policy(method), source), 9, find_scheme(scheme)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "opt-tree", "auto"])
def test_ids_equal_ar_decoding(method: str, temperature: float, target: HFModel) -> None:
    prompts = PROMPTS[:3]
    params = [SamplingParams(max_tokens=8, temperature=temperature, seed=i) for i in range(3)]
    plain = [g.token_ids for g in Engine(target).generate(prompts, params)]
    made = engine(target, method)
    found = made.generate(prompts, params)
    assert [g.token_ids for g in found] == plain
    assert made.generate(prompts[:1], params[0])[0].token_ids == plain[0]
    assert any(any(g.stats.drafted) for g in found) or method == "auto"


def test_greedy_ids_are_those_of_transformers(target: HFModel) -> None:
    found = engine(target, "opt-tree").generate(PROMPTS[:1], SamplingParams(max_tokens=10))[0].token_ids
    assert found == generated(target.model, PROMPTS[0], 10)


def test_chains_are_those_that_transformers_would_draft(folder: Path, target: HFModel) -> None:
    oracle, made = Oracle(folder), engine(target, "chain")
    request = made.stepper.open(made.request(PROMPTS[1], SamplingParams(max_tokens=20)))
    for _ in range(3):
        outcome = made.stepper.step([request])[0]
        text, drafts = request.ids[: len(request.ids) - outcome.taken], outcome.tree.tokens.tolist()
        assert len(drafts) > 2
        assert oracle.drafted(text, drafts)[:-1].argmax(-1).tolist() == drafts
    made.stepper.close(request)


@pytest.mark.parametrize("scheme", ["multi-round", "block"])
def test_drawn_children_are_the_same_alone_and_batched(scheme: str, target: HFModel) -> None:
    prompts = PROMPTS[:2]
    params = [SamplingParams(max_tokens=6, temperature=0.8, seed=i) for i in range(2)]
    made = engine(target, "chain" if scheme == "block" else "static", scheme)
    together = [g.token_ids for g in made.generate(prompts, params)]
    assert [made.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)] == together


def test_it_is_a_drafter_by_name_alone_joined_and_below_a_verifier(target: HFModel) -> None:
    params = SamplingParams(max_tokens=12)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    assert load_source("mtp", target).name == "mtp"
    for name in ("lookup+mtp", "mtp>self"):
        drafter = load_drafter(name, target, policy("chain"))
        assert [g.token_ids for g in Engine(target, Speculation(drafter, 8)).generate(PROMPTS, params)] == plain


def test_beams_are_those_without_drafts(target: HFModel) -> None:
    params = SamplingParams(max_tokens=8)
    plain, drafted = (
        BeamEngine(target, source).generate(PROMPTS[:2], params, BeamParams(width=3))
        for source in (None, load_beam_source("mtp", target))
    )
    assert [[h.token_ids for h in g.hypotheses] for g in drafted] == [
        [h.token_ids for h in g.hypotheses] for g in plain
    ]


FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "graph": {"wrapped": {"runner": "graph"}},
    "eager": {"read": {"attn_implementation": "eager"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_equal_ar_decoding_on_every_runner(form: str, folder: Path) -> None:
    options = FORMS[form]
    model = HFModel(read(folder, **options.get("read", {})), self_test=False, **options.get("wrapped", {}))
    params = SamplingParams(max_tokens=8)
    plain = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    assert [g.token_ids for g in engine(model, "opt-tree").generate(PROMPTS, params)] == plain
