"""Decoding with published heads of every kind: the output never changes, whatever they draft."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from draftree.config import SamplingParams
from draftree.drafters.base import DraftSource
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.ensemble import EnsembleSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.ngram import NgramSource
from draftree.drafters.registry import load_drafter, load_source
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.methods import METHODS
from draftree.verify.schemes import SCHEMES, find_scheme

from ..heads import PROMPTS, random_head
from ..pairs import mixed, policy
from ..published import KINDS, eagle_head, saved
from ..tiny import VOCAB, tiny

DRAWING = [scheme for scheme in SCHEMES if scheme not in ("match", "relaxed")]
FORMS: dict[str, dict[str, str]] = {"stock": {}, "graph": {"runner": "graph"}}


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("heads")
    return {kind: saved(recipe, place / kind.replace(" ", "-")) for kind, recipe in KINDS.items()}


def engine(target: HFModel, source: DraftSource, method: str, scheme: str = "match") -> Engine:
    return Engine(target, Speculation(TreeDrafter(policy(method), source), 9, find_scheme(scheme)))


@pytest.mark.parametrize(("method", "kind"), [*zip(METHODS, itertools.cycle(KINDS), strict=False)])
def test_ids_equal_ar_decoding(method: str, kind: str, target: HFModel, folders: dict[str, Path]) -> None:
    params = mixed(len(PROMPTS), 10)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    made = engine(target, EagleSource(eagle_head(folders[kind], target), VOCAB), method)
    found = made.generate(PROMPTS, params)
    assert [g.token_ids for g in found] == plain
    assert made.generate(PROMPTS[:1], params[0])[0].token_ids == plain[0]
    assert any(any(g.stats.drafted) for g in found) or method != "static"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_on_every_runner(kind: str, form: str, folders: dict[str, Path]) -> None:
    model: HFModel = HFModel(tiny(), self_test=False, **FORMS[form])  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=12)
    plain = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    made = engine(model, EagleSource(eagle_head(folders[kind], model), VOCAB), "opt-tree")
    assert [g.token_ids for g in made.generate(PROMPTS, params)] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_two_heads_that_read_other_hidden_states_draft_for_one_target(
    kind: str, target: HFModel, folders: dict[str, Path]
) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=3)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    heads = [EagleSource(random_head(target), VOCAB), EagleSource(eagle_head(folders[kind], target), VOCAB)]
    made = engine(target, EnsembleSource((NgramSource(shortest=1), *heads)), "opt-tree")
    assert [g.token_ids for g in made.generate(PROMPTS, params)] == plain
    for source in heads:
        alone = engine(target, source, "chain")
        assert [g.token_ids for g in alone.generate(PROMPTS, params)] == plain


@pytest.mark.parametrize(("kind", "scheme"), [*zip(KINDS, itertools.cycle(DRAWING), strict=False)])
def test_drawn_children_are_the_same_alone_and_batched(
    kind: str, scheme: str, target: HFModel, folders: dict[str, Path]
) -> None:
    params = [SamplingParams(max_tokens=10, temperature=0.8, seed=i) for i in range(len(PROMPTS))]
    source = EagleSource(eagle_head(folders[kind], target), VOCAB)
    made = engine(target, source, "static", scheme)
    together = [g.token_ids for g in made.generate(PROMPTS, params)]
    assert [made.generate([p], q)[0].token_ids for p, q in zip(PROMPTS, params, strict=True)] == together


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_a_drafter_by_its_path(kind: str, target: HFModel, folders: dict[str, Path]) -> None:
    folder = str(folders[kind])
    assert isinstance(load_source(folder, target), EagleSource)
    drafter = load_drafter(f"lookup+{folder}", target, policy("opt-tree"))
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, SamplingParams(max_tokens=12))]
    found = Engine(target, Speculation(drafter, 8)).generate(PROMPTS, SamplingParams(max_tokens=12))
    assert [g.token_ids for g in found] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_below_an_intermediate_verifier_it_reads_the_target(
    kind: str, target: HFModel, folders: dict[str, Path]
) -> None:
    drafter = load_drafter(f"{folders[kind]}>self", target, policy("chain"))
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, SamplingParams(max_tokens=12))]
    found = Engine(target, Speculation(drafter, 8)).generate(PROMPTS, SamplingParams(max_tokens=12))
    assert [g.token_ids for g in found] == plain
