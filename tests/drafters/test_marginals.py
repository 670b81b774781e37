"""Drafting by heads of marginals: the text is the target's own, trees are the best of all products, a pass a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftree.config import Budget, SamplingParams
from draftree.drafters.base import TokenSource
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.heads.marginals import MarginalSource
from draftree.drafters.registry import load_drafter, load_source
from draftree.engine.engine import Engine
from draftree.engine.speculation import Speculation
from draftree.engines import load_beam_engine
from draftree.errors import ConfigError
from draftree.models.base import FINAL_STATE, Capabilities, LanguageModel, Row
from draftree.models.huggingface.hf_model import HFModel
from draftree.policies.auto.benefit import Benefit
from draftree.policies.auto.cost_model import ARPass
from draftree.policies.base import GrowthPolicy
from draftree.policies.best_paths import OptTree
from draftree.policies.fixed import StaticTree
from draftree.sampling.warping import softmax
from draftree.tree import ROOT, Drawing
from draftree.verify.schemes import SCHEMES, find_scheme

from ..heads import PROMPTS
from ..marginal_heads import KINDS, VOCAB, MedusaRecipe, features_of
from ..pairs import policy
from ..tiny import save_tiny, tiny
from ..toy import ToyFeatureModel, ToyModel, chi_square, distribution

TOKENS, PROMPT, DEPTH = 4, [1, 2], 3
DRAWING = [name for name, scheme in SCHEMES.items() if not scheme.lossy and name != "match"]


class ToyMarginals:
    """Marginals that depend on the last token, over some of the tokens in an order of its own."""

    features, depth = FINAL_STATE, DEPTH

    def __init__(self, target: ToyFeatureModel, vocabulary: list[int] | None = None, seed: int = 4) -> None:
        target.track_features()
        self.capabilities: Capabilities = replace(target.capabilities, name="toy marginals")
        self.vocabulary = None if vocabulary is None else torch.tensor(vocabulary)
        size = TOKENS if vocabulary is None else len(vocabulary)
        self.table = torch.randn((TOKENS, DEPTH, size), generator=torch.Generator().manual_seed(seed)) * 1.5
        self.fed: list[list[int]] = []

    def reserve(self, rows: int, tokens: int) -> None: ...

    def open(self) -> Row:
        return Row()

    def marginals(self, rows: Sequence[Row], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
        """See ``MarginalHead``."""
        for row, new, given in zip(rows, tokens, features, strict=True):
            assert given.shape == (len(new), TOKENS)
            row.length += len(new)
            self.fed.append(new.tolist())
        return self.table[[int(new[-1]) for new in tokens]]

    def close(self, row: Row) -> None: ...


def toy(
    policy: GrowthPolicy, vocabulary: list[int] | None = None
) -> tuple[ToyFeatureModel, MarginalSource, TreeDrafter]:
    target = ToyFeatureModel(TOKENS)
    source = MarginalSource(ToyMarginals(target, vocabulary))
    return target, source, TreeDrafter(policy, source)


@pytest.fixture(scope="module")
def target() -> HFModel:
    return HFModel(tiny(), name="tiny", self_test=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("heads")
    return {kind: recipe.save(place / kind) for kind, recipe in KINDS.items()}


def loaded(folder: Path, target: LanguageModel) -> TokenSource:
    source = load_source(str(folder), target)
    assert isinstance(source, MarginalSource)
    return source


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["opt-tree", "chain", "auto", "eagle2", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_ar_decoding(
    kind: str, method: str, temperature: float, target: HFModel, folders: dict[str, Path]
) -> None:
    params = [SamplingParams(max_tokens=10, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    made = Engine(target, Speculation(TreeDrafter(policy(method), loaded(folders[kind], target)), 9))
    found = made.generate(PROMPTS, params)
    assert [g.token_ids for g in found] == plain
    assert made.generate(PROMPTS[:1], params[0])[0].token_ids == plain[0]
    assert any(any(g.stats.drafted) for g in found)


def test_medusa_heads_that_know_a_text_by_heart_are_right_throughout(target: HFModel, tmp_path: Path) -> None:
    """Output layers are solved for the tokens two, three and four places behind each hidden state of one answer."""
    recipe, prompt, params = MedusaRecipe(style="vllm", layers=0), PROMPTS[0], SamplingParams(max_tokens=24)
    (plain,) = Engine(target).generate([prompt], params)
    text = [*prompt, *plain.token_ids]
    states, tensors = features_of(target, text, FINAL_STATE), recipe.tensors()
    for i in range(recipe.heads):
        places = torch.arange(len(prompt) - 1, len(text) - 2 - i)
        wanted = torch.eye(VOCAB)[torch.tensor(text)[places + 2 + i]]
        tensors[f"lm_heads.{i}.weight"] = 20 * torch.linalg.lstsq(states[places], wanted).solution.T.contiguous()
    save_file(tensors, recipe.save(tmp_path) / "model.safetensors")
    drafter = TreeDrafter(policy("chain"), loaded(tmp_path, target))
    (found,) = Engine(target, Speculation(drafter, 3)).generate([prompt], params)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted == found.stats.drafted
    assert len(found.stats.accepted) == recipe.heads


@pytest.mark.parametrize("name", ["lookup+{}", "{}>self"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_do_in_ensembles_and_cascades(kind: str, name: str, target: HFModel, folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=12)
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    drafter = load_drafter(name.format(folders[kind]), target, policy("opt-tree"))
    assert [g.token_ids for g in Engine(target, Speculation(drafter, 8)).generate(PROMPTS, params)] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_not_allowed_are_not_drafted(kind: str, target: HFModel, folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4, allowed_token_ids=(2, 4, 8, 16, 32))
    plain = [g.token_ids for g in Engine(target).generate(PROMPTS, params)]
    made = Engine(target, Speculation(TreeDrafter(policy("opt-tree"), loaded(folders[kind], target)), 6))
    found = made.generate(PROMPTS, params)
    assert [g.token_ids for g in found] == plain
    assert any(any(g.stats.accepted) for g in found)  # five tokens: some draft is right


@pytest.mark.parametrize(("scheme", "vocabulary"), list(zip(DRAWING, itertools.cycle([[3, 0, 1], None]))))
def test_sampled_text_follows_the_targets_distribution(scheme: str, vocabulary: list[int] | None) -> None:
    shape = StaticTree(width=1 if scheme == "block" else 2, depth=2)
    target, _, drafter = toy(shape, vocabulary)
    each = [SamplingParams(max_tokens=3, temperature=1.0, seed=i) for i in range(1000)]
    engine = Engine(target, Speculation(drafter, 6, find_scheme(scheme)))
    ids = torch.tensor([g.token_ids for g in engine.generate([PROMPT] * len(each), each)])
    counts = torch.zeros((TOKENS,) * 3).index_put_(tuple(ids.T), torch.ones(len(ids)), accumulate=True)
    assert chi_square(counts.flatten(), distribution(ToyModel(TOKENS), PROMPT, 3).flatten()) > 1e-4


def test_children_are_drawn_from_what_is_reported() -> None:
    target, source, drafter = toy(StaticTree(width=2, depth=3), [3, 0, 1])
    request = Engine(target, Speculation(drafter, 14)).stepper.open(
        Engine(target, Speculation(drafter, 14)).request(PROMPT, SamplingParams(temperature=1.0, seed=3))
    )
    (tree,) = drafter.propose([request], [Budget(14)], Drawing.WITHOUT_REPLACEMENT)
    head = source.head
    assert isinstance(head, ToyMarginals)
    assert tree.depth == 3
    for parent, q in tree.distributions.items():
        depth = 0 if parent == ROOT else int(tree.depths[parent])
        want = torch.zeros(TOKENS).index_put_(
            (torch.tensor([3, 0, 1]),), head.table[request.ids[-1], depth].softmax(-1)
        )
        np.testing.assert_allclose(softmax(q.dense(TOKENS)), want.numpy(), rtol=1e-5, atol=1e-7)
    assert {ROOT, *tree.parents.tolist()} == set(tree.distributions)


@pytest.mark.parametrize("nodes", [1, 4, 9, 20])
def test_opt_tree_is_the_best_of_all_products(nodes: int) -> None:
    """Brute force over all paths: what DDTree's best-first search finds. A threshold holds no free layer back."""
    target, source, drafter = toy(OptTree(delta=0.999))
    request = Engine(target, Speculation(drafter, nodes)).stepper.open(
        Engine(target, Speculation(drafter, nodes)).request(PROMPT)
    )
    (tree,) = drafter.propose([request], [Budget(nodes)])
    head = source.head
    assert isinstance(head, ToyMarginals)
    marginals = head.table[request.ids[-1]].softmax(-1)
    products = {
        path: float(torch.stack([marginals[d, token] for d, token in enumerate(path)]).prod())
        for depth in range(1, DEPTH + 1)
        for path in itertools.product(range(TOKENS), repeat=depth)
    }
    want = sorted(products, key=lambda path: products[path], reverse=True)[:nodes]
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert sorted(paths) == sorted(want)
    for path, logprob in zip(paths, np.exp(tree.path_logprobs).tolist(), strict=True):
        assert logprob == pytest.approx(products[path], rel=1e-4)


def test_a_step_takes_one_pass_whatever_the_depth() -> None:
    target, source, drafter = toy(StaticTree(width=2, depth=6))
    result = Engine(target, Speculation(drafter, 14)).generate([PROMPT], SamplingParams(max_tokens=20))[0]
    assert source.passes == result.stats.drafted[0] // 2  # two children of each root that was drafted for
    assert 0 < source.pass_seconds < result.stats.seconds.draft
    assert len(result.stats.drafted) == DEPTH
    head = source.head
    assert isinstance(head, ToyMarginals)
    assert [token for new in head.fed for token in new] == [*PROMPT[1:], *result.token_ids][: sum(map(len, head.fed))]


def test_a_root_that_is_scored_again_takes_no_pass() -> None:
    target, source, drafter = toy(StaticTree(width=2, depth=2))
    request = Engine(target, Speculation(drafter)).stepper.open(Engine(target, Speculation(drafter)).request(PROMPT))
    first, again = (drafter.propose([request], [Budget(6)])[0] for _ in range(2))
    assert source.passes == 1
    assert np.array_equal(first.tokens, again.tokens)


def test_auto_counts_one_pass_for_all_layers() -> None:
    """Drafting takes 1.5 passes: a drafter of a pass a layer cannot win, one of a single pass can, by two tokens."""
    verify, ar = torch.ones(9).numpy(), ARPass(64, 1)
    source = toy(OptTree())[1]
    once = Benefit(source, balance=1.0)
    once.measure(1.5, 1, 0.0)
    assert once.pays(verify, ar, DEPTH, 0.0, 100.0, 1.0)
    assert not once.pays(verify, ar, 1, 0.0, 100.0, 1.0)
    layered = Benefit(balance=1.0)
    layered.measure(1.5, 1, 0.0)
    assert not layered.pays(verify, ar, DEPTH, 0.0, 100.0, 1.0)


def test_beams_are_refused_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafts one sequence, not beams"):
        load_beam_engine(str(save_tiny(tmp_path)), drafter=str(folders["medusa"]))
