"""transformers' models whose rows cannot branch: they decode without drafts what their own ``generate`` does."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from draftree import Engine, SamplingParams, SpeculationParams, load
from draftree.engine.scheduler import SchedulerParams
from draftree.errors import CacheError, DraftreeWarning, NoTreesError, UnsupportedModelError
from draftree.models.base import LanguageModel, Nodes, prefill
from draftree.models.huggingface import attention, inspection
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.linear_hf_model import LinearHFModel
from draftree.models.measuring import Grid, measure
from draftree.models.prefixes import WORTHWHILE, PrefixCache
from draftree.scores import Scores
from draftree.tree import ROOT

from ..references import generate_greedily
from ..tiny import causal_logits, save_tiny, tiny
from .linear_walk import walk

WHY = {
    "qwen3_5": "recurrent state",
    "qwen3_next": "recurrent state",
    "mamba": "recurrent state",
    "mamba2": "recurrent state",
    "bloom": "counts cache slots",
    "gpt_neo": "counts cache slots",
}
"""Models whose rows cannot branch, and why."""
ROUNDING = 1e-3
"""Of logits, whose standard deviation is near 1; other tokens move them by tenths."""
PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15, 3, 5], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]
every = pytest.mark.parametrize("kind", WHY)


def linear(kind: str) -> LinearHFModel:
    """A tiny model as it is loaded."""
    model = tiny(kind)
    with pytest.raises(NoTreesError, match=WHY[kind]) as refused:
        HFModel(model, name=kind)
    return LinearHFModel(model, None, kind, refused.value.reason)


@pytest.mark.parametrize("chunk", [None, 3])
@every
def test_greedy_ids_are_those_of_generate(kind: str, chunk: int | None) -> None:
    """Of several requests at once, whose prompts are read at once or by parts."""
    engine = Engine(linear(kind), SpeculationParams(drafter="none"), scheduling=SchedulerParams(rows=3, chunk=chunk))
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    stock = tiny(kind)
    assert [each.token_ids for each in found] == [generate_greedily(stock, prompt, 30) for prompt in PROMPTS]


@every
def test_sampled_texts_are_those_of_each_request_alone_whatever_is_to_draft(kind: str) -> None:
    model = linear(kind)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    alone = Engine(model, SpeculationParams(drafter="none"))
    want = [alone.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    with pytest.warns(DraftreeWarning, match=f"without drafts: .*{WHY[kind]}") as said:
        for drafter, method in (("auto", "auto"), ("lookup", "opt-tree")):
            engine = Engine(model, SpeculationParams(drafter=drafter, method=method))
            assert [each.token_ids for each in engine.generate(PROMPTS, params)] == want
    assert len(said) == 1


@every
def test_whatever_rows_do_logits_are_those_of_their_texts(kind: str) -> None:
    stock = tiny(kind)
    checked = walk(
        linear(kind),
        lambda ids: causal_logits(stock, ids)[-1].numpy(),
        steps=60,
        prompts=(1, 20),
        rounding=ROUNDING,
    )
    assert checked > 10


def test_trees_are_refused_and_change_nothing() -> None:
    model = linear("mamba2")
    assert isinstance(model, LanguageModel)
    row = prefill(model, [1, 2])
    for parents in ([ROOT, ROOT], [0, 1], [ROOT, 0, 0]):
        with pytest.raises(CacheError, match="no trees"):
            model.extend([row], [Nodes([*range(len(parents))], parents)])
    found = model.extend([row], [Nodes.chain([9])]).logits([0])[0]
    assert np.abs(found - causal_logits(tiny("mamba2"), [1, 2, 9])[-1].numpy()).max() < ROUNDING


def test_a_pass_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has changed the states of rows: they are read anew."""
    model, read = linear("qwen3_5"), LinearHFModel._read
    row = prefill(model, [1, 2, 3])

    def failing(model: LinearHFModel, *given: object) -> Scores:
        read(model, *given)  # type: ignore[arg-type]
        raise CacheError("it fails")

    with monkeypatch.context() as broken:
        broken.setattr(LinearHFModel, "_read", failing)
        with pytest.raises(CacheError, match="it fails"):
            model.extend([row], [Nodes.chain([7])])
    found = model.extend([row], [Nodes.chain([9])]).logits([0])[0]
    assert np.abs(found - causal_logits(tiny("qwen3_5"), [1, 2, 3, 9])[-1].numpy()).max() < ROUNDING


@pytest.mark.parametrize(
    ("kind", "states", "keys"), [("mamba2", True, False), ("qwen3_5", True, True), ("bloom", False, True)]
)
def test_states_and_keys_count_as_memory(kind: str, states: bool, keys: bool) -> None:
    model = linear(kind)
    can = model.capabilities
    assert (can.row_bytes > 0, can.slot_bytes > 0) == (states, keys)
    model.cache_bytes = 2 * can.row_bytes + 100 * can.slot_bytes
    assert model.holds([50, 50]) and not model.holds([50, 50, 50])


def test_a_kept_row_goes_on_and_passes_are_measured() -> None:
    model, ids = linear("qwen3_5"), [i * 31 % 97 for i in range(3 * WORTHWHILE)]
    prefixes = PrefixCache(model, 2)
    prefixes.keep(ids, prefill(model, ids))
    row = prefixes.find([*ids, 1, 2])
    assert row.length == len(ids)
    found = model.extend([row], [Nodes.chain([1, 2], wanted=1)]).logits([0])[0]
    assert np.abs(found - causal_logits(tiny("qwen3_5"), [*ids, 1, 2])[-1].numpy()).max() < ROUNDING
    profile = measure(model, Grid((1, 2, 4), (4,), (1, 2), 2))
    assert [(point.batch, point.sizes) for point in profile.points] == [(1, (1,)), (2, (1,))]


def test_a_model_that_does_not_go_on_from_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("bloom")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda past_key_values=None, **given: forward(**given))
    with pytest.raises(UnsupportedModelError, match="my-bloom .*cache"):
        LinearHFModel(model, None, "my-bloom", "it is a test")
    with pytest.raises(UnsupportedModelError, match="my-gpt .*cache"):
        LinearHFModel(tiny("openai_gpt"), None, "my-gpt", "it is a test")


@pytest.mark.parametrize("kind", ["bloom", "mamba2"])
def test_a_folder_is_loaded_and_decodes(kind: str, tmp_path: Path) -> None:
    model = load(str(save_tiny(tmp_path / kind, kind=kind)))
    assert isinstance(model, LinearHFModel) and WHY[kind] in model.capabilities.no_trees
    (found,) = Engine(model, SpeculationParams(drafter="none")).generate(["the cat"], SamplingParams(max_tokens=8))
    assert found.token_ids


@pytest.mark.parametrize(("where", "name"), [(inspection, "self_test"), (attention, "grouped_sdpa")])
def test_a_model_that_fails_the_self_test_is_loaded_without_trees(
    where: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of itself, or since the attention that it is given does not suit it: then it has its own again."""

    def fail(*given: object, **options: object) -> None:
        raise IndexError("no such slot")

    folder = str(save_tiny(tmp_path / "llama"))
    monkeypatch.setattr(where, name, fail)
    model = load(folder)
    assert isinstance(model, LinearHFModel) and "IndexError: no such slot" in model.capabilities.no_trees
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (found,) = Engine(model, SpeculationParams(drafter="none")).generate([[5, 6, 7]], params)
    assert found.token_ids == generate_greedily(tiny(), [5, 6, 7], 12)


def test_a_model_whose_own_code_fails_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mamba2")

    @wraps(type(model).forward)
    def fail(*given: object, **options: object) -> None:
        raise KeyError("no such kernel")

    monkeypatch.setattr(type(model), "forward", fail)
    with pytest.raises(UnsupportedModelError, match="KeyError"):
        LinearHFModel(model, None, "mamba2", "it cannot")
