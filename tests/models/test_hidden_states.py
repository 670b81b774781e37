"""Hidden states of the target: the right ones, for the right tokens, only where asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftree.errors import CacheError, UnsupportedModelError
from draftree.models.base import FINAL, FINAL_STATE, FeatureSpec, Nodes, prefill
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.prefixes import PrefixCache

from ..tiny import FAMILIES, tiny

PROMPT = [3, 1, 4, 1, 5]
TREE = Nodes([9, 2, 6, 5], [-1, -1, 1, 2])


def tracked(kind: str = "llama") -> HFModel:
    model = HFModel(tiny(kind), self_test=False)
    model.track_features()
    return model


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_they_are_what_the_output_layer_turns_into_logits(kind: str) -> None:
    model = tracked(kind)
    row = prefill(model, PROMPT)
    features = feature_row(row).last_features()
    causal = model.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert torch.allclose(model.model.get_output_embeddings()(features), causal, atol=1e-4)


def test_a_commit_keeps_those_of_its_path() -> None:
    model = tracked()
    rows = [prefill(model, PROMPT), prefill(model, PROMPT[:2])]
    model.extend(rows, [TREE, Nodes.chain([7])])
    model.commit(rows[0], [1, 2, 3])
    model.commit(rows[1], [])
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, 2, 6, 5]]), use_cache=False)[0][0]
    assert torch.allclose(feature_row(rows[0]).last_features(), causal, atol=1e-5)
    assert torch.allclose(feature_row(rows[1]).last_features(), causal[:2], atol=1e-5)


def test_they_are_kept_in_few_pieces() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    for _ in range(100):
        model.extend([row], [Nodes.chain([7])])
        model.commit(row, [0])
    assert len(feature_row(row).features) < 70
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, *[7] * 100]]), use_cache=False)[0][0]
    assert torch.allclose(feature_row(row).last_features(len(PROMPT) + 100), causal, atol=1e-4)


def test_nodes_fed_in_two_passes_are_one_path() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    model.extend([row], [Nodes.chain([7])])
    model.extend([row], [Nodes([8], [0])])
    model.commit(row, [0, 1])
    causal = model.model.base_model(input_ids=torch.tensor([[*PROMPT, 7, 8]]), use_cache=False)[0][0]
    assert torch.allclose(feature_row(row).last_features(2), causal[len(PROMPT) :], atol=1e-5)


def test_a_fork_has_its_own() -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    fork = model.fork(row)
    assert torch.equal(feature_row(row).last_features(), feature_row(fork).last_features())


@pytest.mark.parametrize("length", [2, len(PROMPT), len(PROMPT) + 1])
def test_a_fork_has_those_of_its_tokens(length: int) -> None:
    model = tracked()
    row = prefill(model, PROMPT)
    model.extend([row], [Nodes.chain([7, 8])])
    model.commit(row, [0, 1])
    assert torch.equal(
        feature_row(model.fork(row, length)).last_features(),
        feature_row(row).last_features(len(PROMPT) + 2)[:length],
    )


def test_a_fork_of_a_row_that_was_tracked_late_has_what_there_is() -> None:
    model = HFModel(tiny(), self_test=False)
    row = prefill(model, PROMPT)
    model.track_features()
    model.extend([row], [Nodes.chain([7, 8])])
    model.commit(row, [0, 1])
    assert torch.equal(
        feature_row(model.fork(row, len(PROMPT) + 1)).last_features(), feature_row(row).last_features()[:1]
    )
    assert not feature_row(model.fork(row, len(PROMPT))).features


def test_two_models_on_the_same_weights_read_them_by_one_hook() -> None:
    first = tracked()
    second = first.twin()
    second.track_features()
    one, two = prefill(first, PROMPT), prefill(second, PROMPT[:3])
    first.extend([one], [Nodes.chain([7])])
    second.extend([two], [Nodes.chain([7, 8])])
    first.commit(one, [0])
    second.commit(two, [0, 1])
    assert len(feature_row(one).last_features()) == 6
    assert len(feature_row(two).last_features()) == 5
    assert len(first.model.get_decoder()._forward_hooks) == 1


def test_a_model_that_nobody_asks_keeps_none() -> None:
    model = HFModel(tiny(), self_test=False)
    row = prefill(model, PROMPT)
    model.extend([row], [Nodes.chain([7])])
    model.commit(row, [0])
    assert not feature_row(row).features
    assert feature_row(row).pending is None


def test_a_model_whose_logits_are_not_its_output_layers_is_refused() -> None:
    weights = tiny()

    class Capped(nn.Module):
        def forward(self, *given: object, **named: object) -> object:
            out = type(weights).forward(weights, *given, **named)
            out.logits = 2 * out.logits.tanh()
            return out

    model = HFModel(weights, self_test=False)
    weights.forward = Capped().forward
    with pytest.raises(UnsupportedModelError, match="output layer's .*'lookup'"):
        model.track_features()


def test_a_model_without_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(tiny(), self_test=False)
    monkeypatch.setattr(type(model.model), "get_decoder", lambda self: self)
    with pytest.raises(UnsupportedModelError, match="apart"):
        model.track_features()


LAYERS = FeatureSpec((2, 0, FINAL, 1))


def stock_states(kind: str, ids: list[int], wanted: FeatureSpec) -> Tensor:
    """[n, F] of transformers' own: what it gives for the last layer is after the norm, so that goes through a hook."""
    weights: Any = tiny(kind)
    last: list[Tensor] = []
    layers = next(m for m in weights.get_decoder().children() if isinstance(m, nn.ModuleList))
    layers[-1].register_forward_hook(lambda m, i, out: last.append(out if isinstance(out, Tensor) else out[0]))
    with torch.inference_mode():
        out = weights(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    found = {FINAL: out.hidden_states[-1], len(layers): last[0]} | dict(enumerate(out.hidden_states[:-1]))
    return torch.cat([found[layer][0] for layer in wanted.layers], dim=-1)


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_chosen_layers_read_is_what_transformers_says(kind: str, runner: str) -> None:
    model = HFModel(tiny(kind), self_test=False, runner=runner)
    wanted = LAYERS if kind != "opt" else FeatureSpec((2, 0, 1))  # OPT's last norm is in front of its output layer
    model.track_features(wanted)
    rows = [prefill(model, PROMPT), prefill(model, PROMPT[:2])]
    model.extend(rows, [TREE, Nodes.chain([7])])
    model.commit(rows[0], [1, 2, 3])
    model.commit(rows[1], [])
    model.extend(rows, [Nodes.chain([8]), Nodes.chain([4, 4])])
    model.commit(rows[0], [0])
    model.commit(rows[1], [0, 1])
    for row, text in zip(rows, ([*PROMPT, 2, 6, 5, 8], [*PROMPT[:2], 4, 4]), strict=True):
        torch.testing.assert_close(
            feature_row(row).last_features(), stock_states(kind, text, wanted), atol=1e-4, rtol=0
        )
        some = FeatureSpec((1, 2))
        assert torch.equal(
            feature_row(row).last_features(2, some), some_of(feature_row(row).last_features(2), wanted, some)
        )


def some_of(states: Tensor, kept: FeatureSpec, wanted: FeatureSpec) -> Tensor:
    columns = [range(32 * kept.layers.index(k), 32 * kept.layers.index(k) + 32) for k in wanted.layers]
    return states[:, [c for part in columns for c in part]]


def test_a_row_keeps_what_was_tracked_when_it_began() -> None:
    model = tracked()
    old = prefill(model, PROMPT)
    model.track_features(FeatureSpec((1,)))
    assert model.tracked == FeatureSpec((FINAL, 1))
    new = prefill(model, PROMPT)
    model.extend([old, new], [Nodes.chain([7]), Nodes.chain([7])])
    for row in (old, new):
        model.commit(row, [0])
    assert torch.equal(feature_row(old).last_features(6, FINAL_STATE), feature_row(new).last_features(6, FINAL_STATE))
    assert feature_row(new).last_features(6, FeatureSpec((1, FINAL))).shape == (6, 64)
    with pytest.raises(CacheError, match=r"hidden states \[1\]"):
        feature_row(old).last_features(6, FeatureSpec((1,)))


def test_a_kept_row_without_the_hidden_states_that_are_wanted_now_is_read_again() -> None:
    model = tracked()
    cache, text = PrefixCache(model, 2), list(range(20))
    row = prefill(model, text)
    cache.keep(text, row)
    assert cache.find([*text, 3]).length == 20
    cache.keep(text, row)
    model.track_features(FeatureSpec((0,)))
    assert cache.find([*text, 3]).length == 0


def test_models_without_tracking_have_no_hooks_on_layers() -> None:
    model = tracked()
    assert not any(layer._forward_pre_hooks for layer in model.model.model.layers)


@pytest.mark.parametrize("layer", [3, -2])
def test_layers_that_a_model_has_not_are_refused_by_number(layer: int) -> None:
    model = HFModel(tiny(), name="tiny", self_test=False)
    with pytest.raises(UnsupportedModelError, match=f"tiny .*2 layers .*{layer}"):
        model.track_features(FeatureSpec((1, layer)))
    assert not model.tracked
    assert not any(layer._forward_pre_hooks for layer in model.model.model.layers)


def test_layers_of_a_model_with_scaled_logits_can_be_read_all_the_same() -> None:
    model = HFModel(tiny(), self_test=False)
    weights: Any = model.model

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = type(weights).forward(weights, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    weights.forward = scaled
    model.track_features(FeatureSpec((0, 2)))
    assert feature_row(prefill(model, PROMPT)).last_features().shape == (len(PROMPT), 64)
    with pytest.raises(UnsupportedModelError):
        model.track_features()
    assert model.tracked == FeatureSpec((0, 2))
