"""The drafter "auto": what it stands for is known once the target is, and is what people see from then on."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import draftree
from draftree.cli.main import run
from draftree.config import SamplingParams
from draftree.drafters.default import resolved
from draftree.drafters.provenance import check_made_for, short_name
from draftree.drafters.registry import load_draft_model, load_drafter, load_source
from draftree.drafters.spec import AUTO, DrafterSpec
from draftree.errors import ConfigError, ModelFileError
from draftree.models.base import FINAL
from draftree.models.heads import head_folder
from draftree.models.heads.eagle_network import save_head
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.base import Provenance
from draftree.policies.fixed import read_tree
from draftree.verify.schemes import SCHEMES

from ..heads import DRAFTED, random_network
from ..pairs import generated, policy, save_tree, target
from ..tiny import tiny

Captured = pytest.CaptureFixture[str]

ALL = "lookup+head"
PROMPT = [3, 14, 15, 9, 2, 6, 14, 15]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for the tiny target comes with the package."""
    tiny_target = target()
    save_head(tmp_path / "heads" / "tiny", random_network(tiny_target), DRAFTED, tiny_target)
    monkeypatch.setattr(head_folder, "shipped", lambda pattern: sorted(tmp_path.glob(pattern)))
    monkeypatch.setattr("draftree.drafters.default._second_token", lambda target: 0.1)
    return tmp_path / "heads" / "tiny"


@pytest.mark.parametrize("runner", ["eager", "graph"])
def test_a_draft_model_is_on_its_targets_device_by_its_runner(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--runner eager`` turned the target's graphs off, and its draft model still had them."""
    own, given = target(), dict[str, Any]()

    def loaded(name: str, **options: Any) -> HFModel:
        given.update(options)
        return HFModel(tiny(seed=1), self_test=False)

    monkeypatch.setattr("draftree.drafters.registry.load_here", loaded)
    own.capabilities = replace(own.capabilities, device="cuda:1", runner=runner)
    load_draft_model("near", own)
    assert given == {"device": "cuda:1", "runner": runner}


def stands_for(model: HFModel, learning: bool = True) -> str:
    return str(resolved(DrafterSpec.parse(AUTO), model, policy("auto"), learning=learning))


def test_without_a_head_it_is_lookup() -> None:
    assert (stands_for(target()), stands_for(target(), learning=False)) == ("lookup", "lookup")


def test_with_a_head_it_takes_that_too(shipped: Path) -> None:
    assert (stands_for(target()), stands_for(target(), learning=False)) == (ALL, "head")


def test_where_a_second_token_costs_more_than_heads_gain_it_leaves_the_head_out(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.drafters.default._second_token", lambda target: 0.8)
    assert (stands_for(target()), stands_for(target(), learning=False)) == ("lookup", "lookup")
    assert str(resolved(DrafterSpec.parse(AUTO), target(), policy("chain"))) == ALL  # whoever names a shape gets trees


def test_a_target_is_known_by_its_weights_in_any_precision_and_not_by_its_name(shipped: Path) -> None:
    assert stands_for(HFModel(tiny().bfloat16(), name="mine", self_test=False)) == ALL
    assert stands_for(HFModel(tiny(seed=1), name="tiny", self_test=False)) == "lookup"
    assert stands_for(HFModel(tiny("gpt2"), name="tiny", self_test=False)) == "lookup"


def test_a_model_with_embeddings_of_its_own_kind_has_no_head(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = target()
    monkeypatch.setattr(own.model, "get_input_embeddings", lambda: torch.nn.Identity())
    assert stands_for(own) == "lookup"


def test_heads_of_other_sizes_are_not_read(shipped: Path) -> None:
    config = json.loads((shipped / "config.json").read_text())
    config["transformer_layer_config"]["vocab_size"] = 49152
    (shipped / "config.json").write_text(json.dumps(config))
    (shipped / "model.safetensors").unlink()
    assert stands_for(target()) == "lookup"


def test_a_package_that_is_not_whole_is_one_line(shipped: Path) -> None:
    (shipped / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelFileError, match="draft head .*tiny"):
        stands_for(target())


def test_any_other_name_stands_for_itself(shipped: Path) -> None:
    own = target()
    named = [DrafterSpec.parse(name) for name in ("lookup", "none", own)]
    assert [resolved(spec, own, policy("auto")) for spec in named] == named


def test_methods_share_a_drafting_model_as_long_as_one_drafts_by_it(shipped: Path, model: str) -> None:
    """Each method that a server's clients chose loaded the weights once more: 32 times those of the draft model."""
    own, other = target(), target()
    for name in ("head", model):
        made = [load_source(name, own), load_source(name, own), load_source(name, other)]
        assert made[0] is not made[1] and made[0].model is made[1].model is not made[2].model
        gone = weakref.ref(made[0].model)
        del made
        gc.collect()
        assert gone() is None


def test_the_drafter_is_called_by_what_it_is(shipped: Path) -> None:
    assert load_drafter(AUTO, target(), policy("auto")).name == ALL
    assert load_drafter("none", target(), policy("auto")).name == "none"
    other = HFModel(tiny(seed=5), name="other", self_test=False)
    assert load_drafter(other, target(), policy("auto")).name == "other"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("with_head", [False, True])
def test_every_scheme_decodes_with_it(scheme: str, with_head: bool, model: str, request: pytest.FixtureRequest) -> None:
    """Schemes that draw children refuse what learns from all requests: the default must never be refused."""
    if with_head:
        request.getfixturevalue("shipped")
    engine = draftree.load_engine(model, draftree.SpeculationParams(method="chain", verification=scheme))
    name = "head" if SCHEMES[scheme].sampler else ALL
    assert engine.speculation.drafter.name == (name if with_head else "lookup")
    results = engine.generate([PROMPT, PROMPT[:4]], PARAMS)
    want = [generated(tiny(), prompt, 24, eos_token_id=None) for prompt in (PROMPT, PROMPT[:4])]
    assert SCHEMES[scheme].lossy or [r.token_ids for r in results] == want


def test_a_calibrated_tree_brings_its_drafter(model: str, tmp_path: Path, capsys: Captured) -> None:
    tree = save_tree(tmp_path / "tree.json", model, "self")
    asked = ["generate", "the cat", "--target", model, "--max-tokens", "9"]
    asked += ["--method", "sequoia", "--set", f"tree={tree}"]
    assert run(asked) == 0
    assert "self, sequoia, match: 9 tokens" in capsys.readouterr().err


def test_calibrate_takes_what_does_not_learn(model: str, shipped: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the cat in the hat\na b a b a b\n")
    out = tmp_path / "tree.json"
    asked = ["calibrate", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(out), "--target", model]
    assert run([*asked, "--max-tokens", "24", "--depth", "4", "--stride", "1"]) == 0
    assert read_tree(str(out)).made_for.drafter == "head"


def test_figures_traces_and_explanations_say_what_it_is(
    model: str, shipped: Path, tmp_path: Path, capsys: Captured
) -> None:
    trace = tmp_path / "t.jsonl"
    asked = ["generate", "the cat in the hat", "--target", model, "--max-tokens", "12", "--trace", str(trace)]
    assert run([*asked, "--explain"]) == 0
    printed = capsys.readouterr().err
    assert f"{ALL}, auto, match: 12 tokens" in printed
    assert all(f"drafter {part}, now" in printed for part in ("lookup", "head tiny"))
    begun = json.loads(trace.read_text().splitlines()[0])
    assert (begun["labels"], begun["drafter"]["name"]) == ({"drafter": ALL, "method": "auto"}, ALL)


def test_inside_generate_the_head_comes_by_the_models_weights(shipped: Path) -> None:
    weights = tiny()
    want = generated(weights, PROMPT, 24, eos_token_id=None)
    for _ in range(2):
        got = generated(weights, PROMPT, 24, eos_token_id=None, custom_generate=draftree.custom_generate())
        assert got == want


def test_torchs_own_random_numbers_are_left_alone(shipped: Path) -> None:
    """Loading a head once drew random weights before it read its own: ``generate`` moved the user's global seed."""
    before = torch.get_rng_state()
    generated(tiny(), PROMPT, 5, custom_generate=draftree.custom_generate())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_was_drafted_for_can_be_trained_and_keeps_no_graph(shipped: Path) -> None:
    """The hook that reads hidden states once kept those of a training pass with the whole graph behind them."""
    weights = tiny()
    generated(weights, PROMPT, 5, custom_generate=draftree.custom_generate())
    loss = cast(Any, weights)(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    loss.backward()
    assert all(p.grad is not None for p in weights.parameters())
    kept = HFModel(weights, self_test=False)
    kept.track_features()
    assert kept._hidden is not None
    assert kept._hidden._last[FINAL].grad_fn is None


@pytest.mark.parametrize(
    ("name", "short"),
    [("smollm2", "smollm2"), ("org/Model-7B", "Model-7B"), ("./models/tiny/", "tiny"), (r"C:\models\tiny", "tiny")],
)
def test_a_model_keeps_its_short_name_on_another_machine(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_tree_is_refused_for_models_that_it_was_not_made_for() -> None:
    made_for = Provenance("org/big", "org/small")
    check_made_for(made_for, Provenance("/models/big", "small", "0123", "4567"))
    check_made_for(None, Provenance("anything", "lookup"))
    with pytest.raises(ConfigError, match="target 'org/big', not 'org/huge'"):
        check_made_for(made_for, Provenance("org/huge", "org/small"))
    with pytest.raises(ConfigError, match="drafter 'org/small', not 'lookup'"):
        check_made_for(made_for, Provenance("org/big", "lookup"))
