"""Models without some of their layers: what they say; they share the whole model's weights and nothing else."""

from __future__ import annotations

import pytest
import torch

from draftree.drafters.spec import layers_of
from draftree.errors import ConfigError
from draftree.models.base import Nodes
from draftree.models.huggingface import HFModel

from ..tiny import FAMILIES, VOCAB, causal_logits, tiny

PROMPT, MORE = [3, 14, 15, 9, 2], [6, 5, 35]


def said(model: HFModel) -> torch.Tensor:
    """Logits after the prompt and after each token of a continuation, through the cache."""
    row = model.open(PROMPT)
    logits = torch.cat([row.logits[None], model.extend([row], [Nodes.chain(MORE)])[0]])
    model.close(row)
    return logits


@pytest.mark.parametrize("numerics", [None, "fp32"])
@pytest.mark.parametrize("kept", [[0], [1], [0, 1]])
def test_layers_that_are_left_out_are_not_run(kept: list[int], numerics: str | None) -> None:
    """The same as a model that was built of the layers that are kept."""
    reference = tiny()
    reference.model.layers = torch.nn.ModuleList(reference.model.layers[i] for i in kept)
    for i, layer in enumerate(reference.model.layers):
        layer.self_attn.layer_idx = i
    want = causal_logits(reference, PROMPT + MORE)[len(PROMPT) - 1 :]
    whole = HFModel(tiny(), numerics=numerics)
    torch.testing.assert_close(said(whole.with_layers(kept, "some")), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        said(whole), causal_logits(tiny(), PROMPT + MORE)[len(PROMPT) - 1 :], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_layers_of_any_family_are_the_model(kind: str) -> None:
    whole = HFModel(tiny(kind), self_test=False)
    assert torch.equal(said(whole.with_layers(range(2), "all")), said(whole))
    assert not torch.allclose(said(whole.with_layers([0], "one")), said(whole))


def test_weights_are_shared_and_rows_are_not() -> None:
    whole = HFModel(tiny(), self_test=False)
    some = whole.with_layers([1], "some")
    row = whole.open(PROMPT)
    assert {p.data_ptr() for p in some.model.parameters()} < {p.data_ptr() for p in whole.model.parameters()}
    assert some.open(PROMPT).slot == 0
    assert whole.layers == 2
    whole.close(row)


def test_it_is_smaller_and_has_a_name_of_its_own() -> None:
    whole = HFModel(tiny(), self_test=False)
    some = whole.with_layers([0], "half").capabilities
    assert some.name == "half"
    assert some.vocab_size == VOCAB
    assert some.parameters < whole.capabilities.parameters


def test_commits_that_move_slots_skip_layers_that_were_never_run() -> None:
    some = HFModel(tiny(), self_test=False).with_layers([1], "some")
    row = some.open(PROMPT)
    some.extend([row], [Nodes(torch.tensor([9, 6, 5]), torch.tensor([-1, -1, 1]))])
    some.commit(row, [1, 2])
    again = some.open([*PROMPT, 6, 5])
    after = [some.extend([r], [Nodes.chain([7])])[0] for r in (row, again)]
    torch.testing.assert_close(after[0], after[1], atol=1e-4, rtol=1e-4)
    assert some.fork(row).length == len(PROMPT) + 2


def test_its_passes_do_not_change_the_hidden_states_of_the_whole_model() -> None:
    whole = HFModel(tiny(), self_test=False)
    whole.track_features()
    some = whole.with_layers([0], "some")
    row = whole.open(PROMPT)
    before = row.waiting_features().clone()
    some.open([7, 8, 9])
    assert not some.tracks_features
    assert torch.equal(row.waiting_features(), before)


@pytest.mark.parametrize(
    ("name", "kept"), [("1", (0,)), ("6", tuple(range(6))), ("0-2.4", (0, 1, 2, 4)), ("3.5", (3, 5)), ("2-1", ())]
)
def test_layers_are_kept_by_number(name: str, kept: tuple[int, ...]) -> None:
    assert layers_of(f"layers={name}", 6) == kept


NO_LAYERS = (
    *("0", "7", "-1", "", "a", "1-", "-", ".", "0-6", "6-6", "0--1", "1.5.", " 1", "+1", "1_0", "0,1", "²"),
    "0-" + "9" * 18,
    "9" * 5000,
)


@pytest.mark.parametrize("name", NO_LAYERS, ids=lambda name: name[:9])
def test_layers_that_no_model_has_are_refused(name: str) -> None:
    """layers=0-999999999999999999 took all memory, and layers=1- was taken for layers=1-1."""
    with pytest.raises(ConfigError):
        layers_of(f"layers={name}", 6)


@pytest.mark.parametrize("kept", [[], [2], [1, 0], [0, 0], [-1]])
def test_layers_that_are_not_there_are_refused(kept: list[int]) -> None:
    whole = HFModel(tiny(), self_test=False)
    with pytest.raises(ConfigError, match="which has 2: give numbers from 0 to 1, ascending, at least one"):
        whole.with_layers(kept, "none")
