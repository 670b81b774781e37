"""The model that ships drafts for any target with a tokenizer where that pays, and costs nothing elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.config import SamplingParams
from draftree.drafters import default
from draftree.drafters.default import resolved
from draftree.drafters.registry import load_drafter
from draftree.drafters.spec import AUTO, DrafterSpec
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.errors import DraftreeWarning
from draftree.installation import install_data
from draftree.models import model_files
from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Costed, Profile, estimated
from draftree.models.heads.published_heads import PUBLISHED, published_for
from draftree.models.model_files import DEFAULT_MODEL
from draftree.models.native.native_model import NativeModel, unloaded
from draftree.policies.methods import find_policy

from ..pairs import costs
from ..tiny_gguf import Vocabulary, byte_level, write
from ..toy import ToyModel

Captured = pytest.CaptureFixture[str]
BOTH = f"lookup+{DEFAULT_MODEL}"
ADVICE = install_data(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "target.gguf", layers=1)


@pytest.fixture
def target(path: Path) -> NativeModel:
    return NativeModel(path, threads=1)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of all models but the default one take a second."""

    def found(model: Costed) -> Profile:
        return estimated(model) if model.capabilities.name == DEFAULT_MODEL else costs(1.0)

    monkeypatch.setattr(default, "profile_of", found)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of the default model is missing, and nothing was said of that."""
    monkeypatch.setattr(model_files, "EMBEDDED", {DEFAULT_MODEL: "x.gguf"})
    default._default.cache_clear()
    default._ADVISED.clear()
    yield
    default._ADVISED.clear()


def stands_for(model: LanguageModel, method: str = "auto", **options: Any) -> str:
    return str(resolved(DrafterSpec.parse(AUTO), model, find_policy(method), **options))


def said(target: LanguageModel, drafter: str = AUTO) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load_drafter(drafter, target, find_policy("chain"))
    return [str(each.message) for each in found if each.category is DraftreeWarning]


@pytest.mark.usefixtures("slow")
def test_it_drafts_for_a_slow_target(target: NativeModel) -> None:
    assert (stands_for(target), stands_for(target, learning=False)) == (BOTH, DEFAULT_MODEL)
    assert stands_for(target, "static") == BOTH


@pytest.mark.usefixtures("slow")
def test_beside_a_head_of_the_users_it_drafts_for_a_method_that_weighs_both(
    target: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "head_for", lambda target: tmp_path)
    assert stands_for(target) == "lookup+head"
    monkeypatch.setattr(default, "own_heads", lambda: [tmp_path])
    assert stands_for(target) == f"lookup+head+{DEFAULT_MODEL}"
    assert (stands_for(target, "static"), stands_for(target, learning=False)) == ("lookup+head", "head")
    monkeypatch.setattr(default, "_second_token", lambda target: 0.9)
    assert stands_for(target) == BOTH


def test_where_it_does_not_pay_it_is_not_loaded(target: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.drafters.registry.load_here", None)
    monkeypatch.setattr("draftree.models.native.native_model._load", None)
    assert load_drafter(AUTO, target, find_policy("auto")).name == "lookup"


@pytest.mark.usefixtures("slow")
def test_it_drafts_text_and_on_a_cpu_alone(target: NativeModel, tmp_path: Path) -> None:
    words = byte_level()
    bare = write(tmp_path / "bare.gguf", layers=1, vocabulary=Vocabulary("none", words.tokens, words.types))
    assert stands_for(NativeModel(bare, threads=1)) == stands_for(ToyModel(20)) == "lookup"
    target.capabilities = replace(target.capabilities, device="cuda:0")
    assert stands_for(target) == "lookup"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("scheme", ["match", "multi-round"])
def test_texts_are_those_of_ar_decoding(target: NativeModel, scheme: str) -> None:
    params, prompts = SamplingParams(max_tokens=16), ["the cat in the hat", "é 🙂"]
    engine = Engine(target, SpeculationParams(method="static", verification=scheme))
    assert engine.speculation.drafter.name == (BOTH if scheme == "match" else DEFAULT_MODEL)
    found, alone = engine.generate(prompts, params), Engine(target).generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert sum(sum(each.stats.drafted) for each in found) > 0


def test_a_header_costs_what_the_model_does(path: Path, target: NativeModel) -> None:
    found = unloaded(path, str(path), 1)
    assert replace(found.capabilities, eos_ids=target.capabilities.eos_ids) == target.capabilities
    assert target.capabilities.slot_bytes == target.loaded.token_bytes
    assert estimated(found) == estimated(target)


@pytest.mark.usefixtures("package", "slow")
def test_an_install_without_it_says_once_what_is_faster(target: NativeModel) -> None:
    assert said(ToyModel(20)) == said(target, "lookup") == []
    (line,) = said(target)
    assert "target.gguf" in line and ADVICE in line and "\n" not in line
    assert said(target) == []


def test_an_install_with_it_says_nothing(target: NativeModel) -> None:
    assert said(target) == []
    assert default.advice(target) == ""


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("architecture", "known"), [("qwen3", True), ("Qwen3ForCausalLM", True), ("qwen2", False)])
def test_a_published_head_is_offered_by_the_targets_sizes(target: NativeModel, architecture: str, known: bool) -> None:
    target.capabilities = replace(target.capabilities, architecture=architecture, vocab_size=151936)
    target.hidden_size, target.layers = 2560, 36
    assert published_for(target) is (PUBLISHED[1] if known else None)
    assert ("AngelSlim/Qwen3-4B_eagle3 " in default.advice(target)) is known
    target.layers = 35
    assert published_for(target) is None


def test_the_data_package_of_a_head_is_offered(target: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "head_for", lambda target: None)
    target.capabilities = replace(target.capabilities, architecture="qwen2", vocab_size=151936)
    target.hidden_size, target.layers = 1536, 28
    assert default.advice(target).endswith(f"for Qwen2.5-Coder-1.5B-Instruct: {install_data('coder-head')}")


def test_a_model_whose_hidden_states_are_not_read_is_offered_none() -> None:
    assert published_for(ToyModel(20)) is None


def of_info(path: Path, capsys: Captured) -> str:
    assert run(["info", str(path)]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("drafter auto"))


@pytest.mark.usefixtures("slow")
def test_info_says_that_it_is_translated(path: Path, capsys: Captured) -> None:
    line = of_info(path, capsys)
    assert f"{BOTH}; {DEFAULT_MODEL} where children are drawn at random" in line
    assert f"{DEFAULT_MODEL} has another vocabulary, and is translated" in line


@pytest.mark.usefixtures("package")
def test_info_says_what_is_missing(path: Path, capsys: Captured) -> None:
    assert of_info(path, capsys).startswith(f"drafter auto      lookup; '{ADVICE}'")
