"""EAGLE-3 heads that are trained here: what they learn, what is in their files, and that these are what was trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from draftree.config import SamplingParams
from draftree.drafters.draft_model import EagleSource
from draftree.drafters.grow import TreeDrafter
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.models.base import FINAL_STATE, FeatureSpec, Nodes, prefill
from draftree.models.heads.eagle_network import EagleNetwork, save_head
from draftree.models.heads.head_folder import HeadFolder, find_head
from draftree.models.huggingface.cache import feature_row
from draftree.models.huggingface.hf_model import HFModel
from draftree.train.eagle_fit import Batch, Fit, FitRecipe, evaluate, loss, unrolled
from draftree.train.eagle_training import draft_vocabulary
from draftree.train.head_architectures import ARCHITECTURES, layers_read
from draftree.train.responses import Response

from ..heads import PROMPTS, frozen, random_network, responses
from ..pairs import policy
from ..published import FLAGS, ROPES, Config, Recipe, eagle_head, reference
from ..references import extended
from ..tiny import VOCAB, tiny

EAGLE3 = ARCHITECTURES["eagle3"]
LAYERS = (0, 1, 2)
"""What a head of a target of two layers reads."""
STEPS = 100


@dataclass(frozen=True, slots=True)
class Trained:
    """A head that has learned two responses, and its folder."""

    fit: Fit
    vocabulary: Tensor
    folder: Path

    @property
    def network(self) -> EagleNetwork:
        return self.fit.network


@pytest.fixture(scope="module")
def target() -> HFModel:
    model = HFModel(tiny(), name="tiny", self_test=False)
    model.track_features(FeatureSpec(LAYERS) | FINAL_STATE)
    return model


@pytest.fixture(scope="module")
def learned(target: HFModel) -> list[Response]:
    return responses(target)[:2]


def untrained(target: HFModel, learned: list[Response]) -> tuple[EagleNetwork, Tensor]:
    vocabulary = draft_vocabulary(learned, VOCAB, 40)
    return EAGLE3.begin(target, frozen(target, vocabulary), vocabulary, learned, 0), vocabulary


@pytest.fixture(scope="module")
def trained(target: HFModel, learned: list[Response], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    network, vocabulary = untrained(target, learned)
    recipe = FitRecipe(learning_rate=1e-2, batch=2)
    fit = Fit(recipe, network, frozen(target, vocabulary), learned, STEPS, "")
    assert list(fit.run())[-1] == STEPS
    folder = tmp_path_factory.mktemp("trained") / "head"
    save_head(folder, fit.network, vocabulary, target)
    return Trained(fit, vocabulary, folder)


def test_its_loss_falls_and_a_text_is_learned_by_heart(
    trained: Trained, target: HFModel, learned: list[Response]
) -> None:
    parts, batch = trained.fit.frozen, Batch.of(learned, torch.device("cpu"))
    least = loss(random_network(target), [batch.truth] * 3, batch, parts.weight, None, decay=0.8, feature_weight=0.0)
    excess = []
    for network in (untrained(target, learned)[0], trained.network):
        own = Batch.of(learned, torch.device("cpu"), network.features)
        states = unrolled(network, parts.embeddings, own, 3)
        found = loss(network, states, own, parts.weight, None, decay=0.8, feature_weight=0.0)
        excess.append(float(found.detach() - least))
    assert 0 < excess[1] < 0.2 * excess[0]
    acceptance = evaluate(trained.network, parts, learned, 4)
    assert all(row[0] > 0.5 for row in acceptance[:3])  # it is trained for three steps


def test_it_starts_as_the_best_linear_map_of_what_it_reads(target: HFModel, learned: list[Response]) -> None:
    network, _ = untrained(target, learned)
    assert network.norm is not None and network.lm_head is not None
    both = FeatureSpec(LAYERS + FINAL_STATE.layers)
    batch = Batch.of(learned, torch.device("cpu"), both)
    features = batch.features[torch.arange(2)[:, None], batch.at][batch.valid]
    read, truth = features[:, :96], features[:, 96:]
    with torch.no_grad():
        residual = truth - network.fused(read)
        assert float((read.T @ residual / len(read)).abs().max()) < 0.05  # nothing linear is left
        predicted = unrolled(
            network, target.embeddings(torch.arange(VOCAB)), Batch.of(learned, torch.device("cpu"), network.features), 1
        )[0][batch.valid]
        assert torch.allclose(predicted, network.fused(read), atol=1e-5)  # the layer adds nothing yet
        assert torch.equal(network.lm_head.weight, target.output_rows(draft_vocabulary(learned, VOCAB, 40))[0])
        assert float(network.norm.weight[0]) == pytest.approx(float(truth.square().mean().sqrt()), rel=0.3)


@pytest.mark.parametrize(
    ("layers", "read"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (0, 3, 5)), (3, (0, 1, 2)), (2, LAYERS), (1, (0, 1))]
)
def test_it_reads_the_usual_layers_where_there_are_so_many(layers: int, read: tuple[int, ...]) -> None:
    assert layers_read(layers) == read


def test_its_folder_has_the_names_and_shapes_of_speculators(trained: Trained) -> None:
    found = {
        name: (list(tensor.shape), tensor.dtype)
        for name, tensor in load_file(trained.folder / "model.safetensors").items()
    }
    floats = {
        "embed_tokens.weight": [VOCAB, 32],
        "fc.weight": [32, 96],
        "layers.0.input_layernorm.weight": [32],
        "layers.0.hidden_norm.weight": [32],
        "layers.0.post_attention_layernorm.weight": [32],
        "layers.0.self_attn.q_proj.weight": [32, 64],
        "layers.0.self_attn.k_proj.weight": [16, 64],
        "layers.0.self_attn.v_proj.weight": [16, 64],
        "layers.0.self_attn.o_proj.weight": [32, 32],
        "layers.0.mlp.gate_proj.weight": [64, 32],
        "layers.0.mlp.up_proj.weight": [64, 32],
        "layers.0.mlp.down_proj.weight": [32, 64],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
    }
    wanted = {name: (shape, torch.float32) for name, shape in floats.items()}
    assert found == wanted | {"d2t": ([40], torch.int64), "t2d": ([VOCAB], torch.bool)}


def test_its_maps_lead_to_its_vocabulary(trained: Trained) -> None:
    tensors = load_file(trained.folder / "model.safetensors")
    assert torch.equal(torch.arange(40) + tensors["d2t"], trained.vocabulary)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], trained.vocabulary)


def test_its_config_is_what_servers_read(trained: Trained) -> None:
    document = json.loads((trained.folder / "config.json").read_text())
    layer = document.pop("transformer_layer_config")
    assert document == {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 40,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [*LAYERS],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**layer)
    assert {key: config.to_dict()[key] for key in layer if key not in ("rope_scaling", "rope_theta")} == {
        key: value for key, value in layer.items() if key not in ("rope_scaling", "rope_theta")
    }
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, VOCAB)
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": layer["rope_theta"]}


def test_a_head_of_all_tokens_has_no_maps(target: HFModel, tmp_path: Path) -> None:
    old = opened(Recipe(drafted=None).save(tmp_path / "old"))
    network, vocabulary = old.network(old.arrays(target.layers))
    save_head(tmp_path / "new", network, vocabulary, target)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "new" / "model.safetensors").keys()
    assert torch.equal(torch.from_numpy(opened(tmp_path / "new").arrays(target.layers).ids), torch.arange(VOCAB))


def test_a_target_in_a_folder_is_named_by_its_whole_path(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is given the head alone loads the target from there, wherever it runs."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    half = HFModel(tiny().bfloat16(), name="./model", self_test=False)
    save_head(tmp_path / "head", trained.network, trained.vocabulary, half)
    assert opened(tmp_path / "head").target == str(tmp_path / "model")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}


def opened(folder: Path) -> HeadFolder:
    head = find_head(folder)
    assert head is not None
    return head


@torch.no_grad()
def test_what_is_read_back_is_what_was_trained(trained: Trained, target: HFModel, learned: list[Response]) -> None:
    folder = opened(trained.folder)
    read, vocabulary = folder.network(folder.arrays(target.layers))
    assert torch.equal(vocabulary, trained.vocabulary)
    batch = Batch.of(learned, torch.device("cpu"), read.features)
    logits = []
    for network in (trained.network, read):
        assert network.lm_head is not None
        states = unrolled(network, target.embeddings(torch.arange(VOCAB)), batch, 3)
        logits.append(torch.stack([network.lm_head(network.readout(state)) for state in states]))
    torch.testing.assert_close(*logits, atol=1e-6, rtol=0)


@dataclass(frozen=True, kw_only=True)
class Written(Recipe):
    """A head as its file has it."""

    folder: Path

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")


def test_it_drafts_what_the_format_makes_of_its_file(trained: Trained, target: HFModel) -> None:
    recipe = Written(folder=trained.folder, ids=LAYERS, rope={"rope_theta": 10000.0})
    prompt, further = PROMPTS[2], [38, 4, 6]
    head, row = eagle_head(trained.folder, target), prefill(target, prompt)
    features, own = feature_row(row).last_features(wanted=head.features)[:-1], head.open()
    found = [head.advance([own], [prompt[1:]], [features]).tensor[0]]
    for i, token in enumerate(further):
        found.append(extended(head, [own], [Nodes([token], [i - 1])])[0, 0])
    matrices = target.embeddings(torch.arange(VOCAB)), target.output_rows(torch.arange(VOCAB))[0]
    want = reference(recipe, *matrices, prompt[1:], features, further)
    torch.testing.assert_close(torch.stack(found)[:, :40], want, atol=1e-4, rtol=1e-4)
    target.close(row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["chain", "opt-tree"])
def test_ids_equal_ar_decoding(method: str, temperature: float, trained: Trained, target: HFModel) -> None:
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    source = EagleSource(eagle_head(trained.folder, target), VOCAB)
    made = Engine(target, Speculation(TreeDrafter(policy(method), source), 9))
    found = made.generate(PROMPTS, params)
    assert [g.token_ids for g in found] == plain
    assert sum(sum(g.stats.accepted) for g in found) > 10


WRITTEN: dict[str, Config] = {
    **{name: {"flags": FLAGS[name]} for name in FLAGS if name != "two layers"},
    **{name: {"rope": ROPES[name]} for name in ROPES},
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_head_of_others_is_written_as_it_was_read(case: str, target: HFModel, tmp_path: Path) -> None:
    recipe = Recipe(**WRITTEN[case])
    old = opened(recipe.save(tmp_path / "old", "midlayer"))
    network, vocabulary = old.network(old.arrays(target.layers))
    save_head(tmp_path / "new", network, vocabulary, target)
    new = opened(tmp_path / "new")
    assert new.network(new.arrays(target.layers))[0].features == network.features
    before, after = old.tensors(), new.tensors()
    assert np.array_equal(after.pop("embed_tokens.weight"), target.embedding_rows(np.arange(VOCAB)))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    positions = torch.arange(100)
    assert torch.equal(new.network(new.arrays(target.layers))[0].turns(positions), network.turns(positions))
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "logit_scale")
    assert [getattr(new.config, flag) for flag in flags] == [getattr(old.config, flag) for flag in flags]
