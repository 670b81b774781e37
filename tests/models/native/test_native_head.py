"""Draft heads in the native engine: what they compute, that bits depend on a path alone, and where states come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Format
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftree.errors import CacheError, ModelFileError, UnsupportedModelError
from draftree.models.base import FINAL_STATE, Nodes, Row, prefill, prefill_scored
from draftree.models.heads.eagle_network import EagleNetwork
from draftree.models.heads.head_folder import HeadFolder, find_head, load_head
from draftree.models.huggingface.inspection import fingerprint
from draftree.models.native.binding import tiers
from draftree.models.native.native_head import NativeHead, NativeHeadRow, describe_head
from draftree.models.native.native_model import NativeModel
from draftree.sampling.warping import Warping, stream_key
from draftree.scores import Draft, Edit, NumpyScores
from tests import tiny_gguf
from tests.heads import check_same_costs
from tests.models.native.conftest import Dense
from tests.published import FLAGS, ROPES, Recipe, reference

HIDDEN, VOCAB = 64, 274
TEXT = [5, 200, 31, 7, 90, 4, 4, 150, 33, 8, 71, 190]
FURTHER = [9, 3, 250, 17]

BASE = Recipe(vocab=VOCAB, target_size=HIDDEN, size=HIDDEN, width=16, wide=64, drafted=tuple(range(0, VOCAB, 2)))
EAGLE = replace(BASE, kind="eagle", fc_bias=True, drafted=tuple(range(VOCAB)))
OWN = replace(EAGLE, input_norm=True, drafted=tuple(range(1, 80, 3)), flags={"embedding_scale": 1.7})
RECIPES = {
    **{f"eagle3, {name}": replace(BASE, flags=flags) for name, flags in FLAGS.items()},
    **{f"eagle3, {name}": replace(BASE, rope=rope) for name, rope in ROPES.items()},
    "eagle3 of all tokens": replace(BASE, drafted=None, ids=(2, 0, 1), flags={"norm_output": True, "fc_norm": True}),
    "eagle3 of other states": replace(
        BASE, size=96, flags={"num_hidden_layers": 2, "norm_before_residual": True}, seed=1
    ),
    "eagle3, embeddings": replace(BASE, embeddings=True),
    "eagle3, a bias of fc": replace(BASE, fc_bias=True),
    "eagle3, normed queries": replace(BASE, qk_norm=True),
    "eagle": replace(EAGLE, drafted=None),
    "draftree's own": OWN,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model") / "model.gguf"
    return tiny_gguf.write(at, layers=3, hidden=HIDDEN, heads=2, kv_heads=1, context=512)


@pytest.fixture
def target(path: Path) -> NativeModel:
    return NativeModel(path)


def folder_of(recipe: Recipe, at: Path) -> HeadFolder:
    found = find_head(recipe.save(at / "head", "speculators" if recipe.kind == "eagle3" else "midlayer"))
    assert found is not None
    return found


def head_of(recipe: Recipe, at: Path, target: NativeModel, weights: Format = Format.F32) -> NativeHead:
    arrays = folder_of(recipe, at).arrays(target.layers)
    return NativeHead(describe_head("head", arrays, target, weights), target)


def read(head: NativeHead, target: NativeModel, text: list[int] = TEXT) -> tuple[NativeHeadRow, Row, NDArray[Any]]:
    """A row that has read a text, the target's, and the logits after it."""
    row, opened = head.open(), prefill(target, text[:-1])
    return row, opened, head.read([row], [text[1:]], [opened]).logits([0])[0]


def bits(logits: NDArray[np.float32]) -> list[int]:
    found: list[int] = logits.view(np.uint32).tolist()
    return found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_head_computes_what_the_papers_say(recipe: Recipe, target: NativeModel, tmp_path: Path) -> None:
    check_head(recipe, target, tmp_path)


def test_a_head_takes_the_output_layer_of_a_target_that_scales_its_logits(
    dense: Mapping[str, Dense], tmp_path: Path
) -> None:
    target = NativeModel(dense["granite"].path)
    assert target.loaded.logit_scale == 2
    check_head(replace(EAGLE, target_size=256, size=256), target, tmp_path)
    target.track_features(FINAL_STATE)
    row, scores = prefill_scored(target, TEXT)
    last = torch.from_numpy(target.states(row, len(TEXT) - 1, 1))
    output = target.output_rows(torch.arange(VOCAB))[0]
    np.testing.assert_allclose(scores.logits([0]), last @ output.T, rtol=0, atol=1e-4)


def check_head(recipe: Recipe, target: NativeModel, folder: Path) -> None:
    """It computes what NumPy does (``tests.published.reference``)."""
    head = head_of(recipe, folder, target)
    row, opened, first = read(head, target)
    found = [first]
    for number, token in enumerate(FURTHER):
        nodes = Nodes([token], [number - 1])
        found.append(head.extend([row], [nodes]).logits([0])[0])
    every = torch.arange(VOCAB)
    places = [target.tracked.layers.index(layer) for layer in head.features.layers]
    states = target.states(opened, 0, len(TEXT) - 1).reshape(len(TEXT) - 1, -1, target.hidden_size)[:, places]
    features = torch.from_numpy(states.reshape(len(TEXT) - 1, -1))
    embeddings, output = target.embeddings(every), target.output_rows(every)[0]
    recipe = replace(recipe, flags={**recipe.flags, "float16_cache": True})
    expected = reference(recipe, embeddings, output, TEXT[1:], features, FURTHER).numpy()
    outputs = head.vocabulary_of(row)
    if recipe.kind == "eagle":
        expected = expected[:, outputs]
    np.testing.assert_allclose(np.stack(found), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_fork_of_a_part_of_a_row_has_to_read_a_token(target: NativeModel, tmp_path: Path) -> None:
    """Its last token is not known: it was scored as if it were the row's."""
    head = head_of(OWN, tmp_path, target)
    row, opened, logits = read(head, target)
    part, whole = head.fork(row, 4), head.fork(row)
    with pytest.raises(CacheError):
        head.read([part], [[]], [opened])
    assert part.length == 4
    assert bits(head.read([whole], [[]], [opened]).logits([0])[0]) == bits(logits)
    assert bits(head.read([part], [TEXT[5:]], [opened]).logits([0])[0]) == bits(logits)


@pytest.mark.parametrize(("recipe", "learns"), [(BASE, False), (OWN, True)], ids=["eagle3", "own"])
def test_what_a_row_learns_to_score_counts_as_memory(
    recipe: Recipe, learns: bool, target: NativeModel, tmp_path: Path
) -> None:
    head = head_of(recipe, tmp_path, target)
    head.cache_bytes = 2 * head.loaded.page_bytes + head.learned_bytes
    assert head.holds([1]) and head.holds([64]) != learns
    head.cache_bytes += 63 * head.learned_bytes
    assert head.holds([64])


@pytest.mark.parametrize("recipe", [BASE, OWN], ids=["eagle3", "own"])
def test_quantised_matrices_are_near_exact_ones(recipe: Recipe, target: NativeModel, tmp_path: Path) -> None:
    exact, packed = (head_of(recipe, tmp_path / kind.name, target, kind) for kind in (Format.F32, Format.Q8_0))
    one, two = (read(head, target)[2] for head in (exact, packed))
    assert 0 < np.abs(one - two).max() < 0.05 * np.abs(one).max()
    assert packed.capabilities.weight_bytes < exact.capabilities.weight_bytes
    assert packed.capabilities.weights == exact.capabilities.weights


@pytest.mark.parametrize("recipe", [BASE, EAGLE, OWN], ids=["eagle3", "eagle", "own"])
def test_a_head_costs_what_its_own_weights_do(recipe: Recipe, dense: Mapping[str, Dense], tmp_path: Path) -> None:
    """A pass over several tokens was believed to read experts of the target, too."""
    targets = [NativeModel(dense[name].path) for name in ("smollm3", "qwen3moe")]
    assert [target.capabilities.expert_bytes > 0 for target in targets] == [False, True]
    recipe = replace(recipe, target_size=256, size=256)
    one, other = (head_of(recipe, tmp_path / str(i), target).capabilities for i, target in enumerate(targets))
    check_same_costs(one, other)


TREE = Nodes([9, 8, 7, 6, 5], [-1, 0, 0, 1, -1])


def level_by_level(head: NativeHead, row: Row) -> list[list[int]]:
    """Bits after each node of ``TREE``."""
    found: dict[int, list[int]] = {}
    order: list[int] = []
    for level in ([0, 4], [1, 2], [3]):
        parents = [-1 if TREE.parents[n] == -1 else order.index(TREE.parents[n]) for n in level]
        logits = head.extend([row], [Nodes([TREE.tokens[n] for n in level], parents)]).logits(range(len(level)))
        order += level
        found |= {node: bits(logits[i]) for i, node in enumerate(level)}
    return [found[node] for node in range(5)]


@pytest.mark.parametrize("recipe", [BASE, replace(OWN, drafted=tuple(range(1, 90, 3)))], ids=["eagle3", "own"])
@pytest.mark.parametrize("tier", tiers())
def test_bits_depend_on_a_nodes_path_alone(tier: str, recipe: Recipe, path: Path, tmp_path: Path) -> None:
    """Not on threads, on the instruction set, on the nodes beside it, on other rows, nor on how a text was cut."""
    expected: list[list[int]] = []
    long = [*TEXT, *(int(i) for i in np.random.default_rng(1).integers(0, VOCAB, 200))]
    for threads, of in ((1, "base"), (1, tier), (3, tier)):
        target = NativeModel(path, tier=of, threads=threads)
        head = head_of(recipe, tmp_path, target, Format.Q8_0)
        row, opened, logits = read(head, target, long)
        expected = expected or [bits(logits), *level_by_level(head, row)]
        head.commit(row, [])
        assert [bits(logits), *level_by_level(head, row)] == expected
        others = [read(head, target, text) for text in (TEXT[:5], TEXT)]
        pieces = head.open()
        for first, last in ((1, 2), (2, 90), (90, len(long))):
            scores = head.read([pieces], [long[first:last]], [target.fork(opened, last - 1)])
        assert bits(scores.logits([0])[0]) == expected[0]
        some = [others[0][0], pieces, others[1][0]]
        scores = head.extend(some, [Nodes([1, 2], [-1, -1]), Nodes([9, 5], [-1, -1])] + [TREE_ROOT])
        width = len(expected[0])
        assert [bits(row[:width]) for row in scores.logits([2, 3])] == [expected[1], expected[5]]


TREE_ROOT = Nodes([3], [-1])


def test_a_row_scores_the_tokens_of_its_own_text_too(target: NativeModel, tmp_path: Path) -> None:
    """Those of other rows do not count, and a fork has those of its tokens."""
    head = head_of(OWN, tmp_path, target)
    row, opened, _ = read(head, target)
    assert OWN.drafted is not None
    base, added = list(OWN.drafted), [token for token in dict.fromkeys(TEXT[1:]) if token not in OWN.drafted]
    assert head.vocabulary_of(row).tolist() == base + added
    assert head.vocabulary_of(head.open()).tolist() == base
    fork = head.fork(row, 4)
    assert head.vocabulary_of(fork).tolist() == base + [token for token in TEXT[1:5] if token not in base]
    head.read([fork], [TEXT[5:]], [opened])
    alone, _, logits = read(head, target)
    scores = head.read([fork], [[]], [opened])
    assert bits(scores.logits([0])[0]) == bits(logits)
    assert head.vocabulary_of(fork).tolist() == head.vocabulary_of(alone).tolist()
    long = list(range(VOCAB))
    row, _, logits = read(head, target, long)
    assert sorted(head.vocabulary_of(row).tolist()) == sorted({*base, *long[1:]})
    assert len(logits) == len(head.vocabulary_of(row))


@pytest.mark.parametrize("recipe", [BASE, OWN], ids=["eagle3", "own"])
def test_scores_are_those_of_numpy_over_the_same_logits(recipe: Recipe, target: NativeModel, tmp_path: Path) -> None:
    head = head_of(recipe, tmp_path, target)
    row, _, _ = read(head, target)
    found, ids = head.extend([row], [TREE_ROOT]), head.vocabulary_of(row)
    wide = np.full((1, VOCAB), -np.inf, np.float32)
    wide[0, ids] = found.logits([0])[0]
    expected = NumpyScores(wide, [1])
    mask = np.random.default_rng(0).integers(0, 2**32, (VOCAB + 31) // 32, dtype=np.uint32)
    none = np.zeros_like(mask)
    drafts = [None, Draft([Warping(0.7, 0, 1.0, 0.0)]), Draft([Warping(0.7, 20, 0.9, 0.0)], [stream_key(3, 4)])]
    for edit in (Edit(), Edit(mask=mask), Edit(mask=none)):
        for draft in drafts:
            one, two = (scores.top([0], 8, [edit], draft) for scores in (found, expected))
            possible = np.isfinite(two.logprobs)
            assert one.tokens[possible].tolist() == two.tokens[possible].tolist()
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
            np.testing.assert_allclose(one.entropies, two.entropies, atol=1e-5)
        assert found.argmax([0], [edit]).tolist() == expected.argmax([0], [edit]).tolist()
    given = [int(ids[3])]
    np.testing.assert_allclose(found.log_probabilities([0], given), expected.log_probabilities([0], given), atol=1e-5)
    missing = next(token for token in range(VOCAB) if token not in ids)
    assert np.isneginf(found.log_probabilities([0], [missing]))


def test_a_kept_prefix_of_the_target_gives_the_same_drafts(target: NativeModel, tmp_path: Path) -> None:
    head = head_of(BASE, tmp_path, target)
    _, opened, expected = read(head, target)
    fork = target.fork(opened, 5)
    target.extend([fork], [Nodes.chain(TEXT[5:-1])])
    target.commit(fork, range(len(TEXT) - 6))
    row = head.open()
    assert bits(head.read([row], [TEXT[1:]], [fork]).logits([0])[0]) == bits(expected)
    target.close(opened)
    assert bits(head.read([row], [[]], [fork]).logits([0])[0]) == bits(expected)


def test_rows_without_states_and_wrong_calls_are_errors_that_change_nothing(
    target: NativeModel, tmp_path: Path
) -> None:
    before = prefill(target, TEXT[:-1])
    head = head_of(BASE, tmp_path, target)
    row, opened, expected = read(head, target)
    with pytest.raises(CacheError, match="hidden states"):
        head.read([head.open()], [TEXT[1:]], [before])
    wrong: dict[str, Callable[[], object]] = {
        "a parent that comes with it": lambda: head.extend([row], [Nodes.chain([1, 2])]),
        "a token past the vocabulary": lambda: head.extend([row], [Nodes([VOCAB], [-1])]),
        "a text past the vocabulary": lambda: head.read([row], [[VOCAB]], [opened]),
        "another model's row": lambda: head.read([head.open()], [TEXT[1:]], [Row()]),
        "another model's row for the last token": lambda: head.read([row], [[]], [Row()]),
        "a closed row": lambda: head.extend([NativeHeadRow(tracked=head.features)], [TREE_ROOT]),
    }
    for call in wrong.values():
        with pytest.raises((CacheError, RuntimeError)):
            call()
    assert bits(head.read([row], [[]], [opened]).logits([0])[0]) == bits(expected)


def test_a_text_of_one_token_can_be_drafted_for(target: NativeModel, tmp_path: Path) -> None:
    head = head_of(OWN, tmp_path, target)
    row, opened = head.open(), target.open()
    assert np.isfinite(head.read([row], [[]], [opened]).top([0], 3).logprobs).all()
    target.extend([opened], [Nodes.chain(TEXT[:-1])])
    target.commit(opened, range(len(TEXT) - 1))
    assert bits(head.read([row], [TEXT[1:]], [opened]).logits([0])[0]) == bits(read(head, target)[2])


def test_passes_can_be_measured_without_a_target(target: NativeModel, tmp_path: Path) -> None:
    head = head_of(OWN, tmp_path, target)
    row = prefill(head, TEXT)
    assert len(head.extend([row], [Nodes([1, 2, 3], [-1] * 3)]).argmax([0, 1, 2])) == 3


@pytest.mark.parametrize("name", ROPES)
def test_rotary_positions_are_those_of_transformers(name: str, tmp_path: Path, target: NativeModel) -> None:
    arrays = folder_of(replace(BASE, rope=ROPES[name]), tmp_path).arrays(target.layers)
    turns = EagleNetwork(arrays).turns(torch.arange(300))[:, 0]
    config = arrays.config
    stock = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.head_size * config.num_attention_heads,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope,
        )
    )
    expected = torch.stack(stock(torch.zeros(1), torch.arange(300)[None]), dim=2)[0]
    torch.testing.assert_close(turns, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_its_fingerprint_is_that_of_its_network(recipe: Recipe, target: NativeModel, tmp_path: Path) -> None:
    arrays = folder_of(recipe, tmp_path).arrays(target.layers)
    head = NativeHead(describe_head("head", arrays, target), target)
    assert head.capabilities.fingerprint == fingerprint(EagleNetwork(arrays).parameters())
    assert head.capabilities.parameters == sum(p.numel() for p in EagleNetwork(arrays).parameters())


UNKNOWN: dict[str, tuple[Recipe, str]] = {
    "odd heads": (replace(BASE, width=8), "the head size is 8"),
    "an odd feed-forward block": (replace(BASE, wide=48), "the feed-forward size is 48"),
    "an activation": (replace(BASE, flags={"hidden_act": "relu"}), "does not know hidden_act 'relu'"),
}


def test_a_head_may_be_large(target: NativeModel, tmp_path: Path) -> None:
    folder = folder_of(replace(OWN, wide=51_200), tmp_path)
    assert sum(file.stat().st_size for file in folder.folder.glob("*.safetensors")) > 1 << 24
    assert load_head(folder.folder, target).capabilities.weights > 3 * 51_200 * HIDDEN


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_the_engine_does_not_compute_is_one_line(case: str, target: NativeModel, tmp_path: Path) -> None:
    recipe, message = UNKNOWN[case]
    with pytest.raises(UnsupportedModelError, match=f"{message}.*backend 'transformers', or drafter 'lookup'$"):
        load_head(folder_of(recipe, tmp_path).folder, target)


def test_a_head_that_reads_more_hidden_states_than_the_engine_is_one_line(target: NativeModel, tmp_path: Path) -> None:
    arrays = folder_of(BASE, tmp_path).arrays(target.layers)
    many = replace(arrays, features=replace(arrays.features, layers=(0, 1, 2) * 3))
    with pytest.raises(UnsupportedModelError, match="8 hidden states .*9: "):
        describe_head("head", many, target, Format.F32)


def test_a_damaged_folder_is_one_line(target: NativeModel, tmp_path: Path) -> None:
    file = folder_of(BASE, tmp_path).folder / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[:-100], whole[:9], b"", b"\xff" * 200):
        file.write_bytes(data)
        with pytest.raises(ModelFileError, match="draft head"):
            load_head(file.parent, target)


@pytest.mark.parametrize("name", ["cut", "learn", "extend", "commit"])
def test_a_row_has_what_c_has_after_an_interrupt(
    name: str, target: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises it when C has returned; what the head has not read then, it reads in its next pass."""
    head = head_of(OWN, tmp_path, target)
    row, opened, first = read(head, target)
    call = getattr(head.loaded, name)

    def interrupted(*arguments: object) -> None:
        call(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(head.loaded, name, interrupted)
        head.read([row], [[]], [opened])
    assert row.length == head.loaded.length(row.number)
    (again,) = head.read([row], [TEXT[1 + row.length :]], [opened]).logits([0])
    assert bits(again) == bits(first)
