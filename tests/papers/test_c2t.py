"""C2T's trees: what is kept, by brute force; chains; batches; whom they are for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.config import Budget, SamplingParams
from draftree.drafters.default import resolved
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.provenance import check_made_for, provenance
from draftree.drafters.registry import load_drafter
from draftree.drafters.spec import DrafterSpec
from draftree.engine.engine import Engine, load_engine
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.errors import ConfigError, DraftreeWarning
from draftree.models.heads.eagle_network import save_head
from draftree.models.heads.head_folder import find_head, load_head
from draftree.models.huggingface.hf_model import HFModel
from draftree.models.huggingface.inspection import fingerprint
from draftree.models.loading import BACKENDS, load
from draftree.models.model_files import DEFAULT_MODEL, PACKAGE
from draftree.papers.c2t import DEFAULT, Classifier, ClassifierTree, Score, read_classifier
from draftree.policies.base import Frontier
from draftree.policies.methods import find_policy
from draftree.tree import ROOT, DraftTree

from ..heads import DRAFTED, random_network
from ..pairs import drafter, source, target
from ..tiny import tiny
from ..toy import Path as Tokens
from ..toy import Script, ScriptedScorer, trees_of

WIDTH = 3


def flat(row: int, path: Tokens) -> tuple[list[int], list[float], float]:
    """Three candidates anywhere, told apart by the path's length and tokens alone."""
    return [1, 2, 3], [math.log(x) for x in (0.5, 0.3, 0.2)], 1.0


class Scripted:
    """A score for every path, drawn from a seed: not monotone along paths."""

    def __init__(self, seed: int, scorer: ScriptedScorer) -> None:
        self.seed, self.scorer = seed, scorer

    def of(self, row: int, path: Tokens) -> float:
        return Random(f"{self.seed} {row} {path}").random()

    def __call__(self, frontier: Frontier) -> list[list[float]]:
        found = zip(frontier.requests, frontier.nodes, frontier.candidates, strict=True)
        return [[self.of(b, (*self.scorer._paths[b, node], t)) for t in own.tokens] for b, node, own in found]


def grown(seed: int, budgets: list[Budget], script: Script = flat, **settings: float | None) -> list[DraftTree]:
    scorer = ScriptedScorer(script)
    return trees_of(scorer, ClassifierTree(Scripted(seed, scorer), **settings), budgets)  # type: ignore[arg-type]


def paths(tree: DraftTree) -> list[Tokens]:
    out: list[Tokens] = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        out.append((*(out[parent] if parent != ROOT else ()), token))
    return out


def every(seed: int, beta: float, depth: int, row: int = 0) -> dict[Tokens, float]:
    """Tokens -> its least score, of all paths whose prefixes all score at least beta."""
    scores, found = Scripted(seed, ScriptedScorer(flat)), dict[Tokens, float]()
    layer: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        below = {(*p, t): min(x, scores.of(row, (*p, t))) for p, x in layer.items() for t in (1, 2, 3)}
        layer = {p: x for p, x in below.items() if x >= beta}
        found |= layer
    return found


@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.0, 0.3, 0.6, 0.95]), depth=st.integers(1, 3))
def test_all_that_scores_at_least_beta_below_what_does_is_verified(seed: int, beta: float, depth: int) -> None:
    tree = grown(seed, [Budget(100)], beta=beta, width=WIDTH, top=None, depth=depth)[0]
    assert set(paths(tree)) == set(every(seed, beta, depth))


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 12))
def test_a_budget_keeps_the_paths_with_the_highest_least_score(seed: int, nodes: int) -> None:
    tree = grown(seed, [Budget(nodes)], beta=0.1, width=WIDTH, top=None, depth=3)[0]
    distribution = every(seed, 0.1, 3)
    found = sorted((distribution[p] for p in paths(tree)), reverse=True)
    assert found == pytest.approx(sorted(distribution.values(), reverse=True)[:nodes])
    for path in paths(tree):
        assert len(path) == 1 or path[:-1] in paths(tree)


@given(seed=st.integers(0, 10_000), top=st.integers(1, 4))
def test_each_layer_keeps_its_best_and_only_their_children_are_asked_about(seed: int, top: int) -> None:
    """C2T's second top-K is by the node's own C; it was once by the least C on the path."""
    tree = grown(seed, [Budget(100)], beta=0.2, width=WIDTH, top=top, depth=3)[0]
    scores = Scripted(seed, ScriptedScorer(flat))
    layer: list[Tokens] = [()]
    want: set[Tokens] = set()
    for _ in range(3):
        own = {(*p, t): scores.of(0, (*p, t)) for p in layer for t in (1, 2, 3)}
        layer = sorted((p for p in own if own[p] >= 0.2), key=own.__getitem__, reverse=True)[:top]
        want |= set(layer)
    assert set(paths(tree)) == want


RISING = {(1,): 0.3, (2,): 0.6, (1, 1): 0.9, (1, 2): 0.8, (2, 1): 0.5, (2, 2): 0.4}
"""C of each node: below the less probable of two parents both children score higher than those of the other."""


class Table(Scripted):
    """Scores from a table; 0 elsewhere."""

    def __init__(self, scorer: ScriptedScorer) -> None:
        super().__init__(0, scorer)

    def of(self, row: int, path: Tokens) -> float:
        return RISING.get(path, 0.0)


def of_table(nodes: int, top: int | None) -> list[Tokens]:
    scorer = ScriptedScorer(flat)
    return paths(trees_of(scorer, ClassifierTree(Table(scorer), 0.2, WIDTH, top, 2), [Budget(nodes)])[0])


def test_a_layer_is_ranked_by_own_scores_and_a_budget_by_the_least_of_the_path() -> None:
    """By the least C on the path, 0.3, the two best nodes of the second layer would have lost to 0.5 and 0.4."""
    assert set(of_table(100, 2)) == {(1,), (2,), (1, 1), (1, 2)}
    assert set(of_table(100, None)) == set(RISING)
    assert set(of_table(3, None)) == {(2,), (2, 1), (2, 2)}


@pytest.mark.parametrize(("value", "top"), [("none", None), ("20", 20), (20, 20)])
def test_the_second_top_k_is_set_or_switched_off_by_name(value: str | int, top: int | None) -> None:
    policy = find_policy("c2t", {"top": value})
    assert isinstance(policy, ClassifierTree)
    assert policy.top == top
    assert policy.pool(30) == policy.depth * min(30, top or 30)


def test_what_cannot_be_in_the_tree_is_not_asked_about() -> None:
    scorer = ScriptedScorer(flat)
    score: Score = lambda frontier: [[*map(math.exp, own)] for own in frontier.scores]  # noqa: E731
    tree = trees_of(scorer, ClassifierTree(score, 0.0, WIDTH, None, 10), [Budget(2)])[0]
    assert paths(tree) == [(1,), (2,)]  # 0.5 and 0.3: both children of (1,) have 0.25 and less
    assert [len(call) for call in scorer.calls] == [1, 2]


def test_a_chain_ends_where_the_score_falls_below_beta() -> None:
    falling = [0.9, 0.8, 0.65, 0.7, 0.1]
    score: Score = lambda frontier: [[falling[frontier.depth]]]  # noqa: E731
    for beta, length in ((0.85, 1), (0.66, 2), (0.6, 4), (0.95, 0)):
        tree = trees_of(ScriptedScorer(flat), ClassifierTree(score, beta, 1), [Budget(9)])[0]
        assert tree.tokens == [1] * length


def test_three_sequences_get_what_each_gets_alone() -> None:
    budgets = [Budget(5), Budget(12, 2), Budget(1)]
    together = grown(3, budgets, width=WIDTH, beta=0.1)
    for b, (tree, budget) in enumerate(zip(together, budgets, strict=True)):
        alone = [Budget(0)] * 3
        alone[b] = budget
        assert paths(grown(3, alone, width=WIDTH, beta=0.1)[b]) == paths(tree)
        assert len(tree)


NET = Classifier(
    features=("probability", "entropy", "depth"),
    hidden=((4.0, -0.2, 0.0), (1.0, 0.3, -0.1)),
    bias=(0.1, 0.0),
    output=(1.5, 0.5),
    threshold=-1.0,
)
PROMPTS = [[3, 14, 15, 9, 2, 6, 14, 15], [27, 1, 8], [31, 41, 5, 9, 26, 53, 58, 9, 7, 9, 3, 2, 3, 8]]


@pytest.mark.parametrize(
    ("name", "temperature", "width"),
    [
        ("lookup", 0.0, 15),
        ("lookup", 1.0, 1),
        ("relative", 1.0, 15),
        ("relative", 0.0, 1),
        ("stranger", 0.0, 15),
        ("lookup+relative", 1.0, 15),
        ("lookup+relative", 0.0, 1),
    ],
)
def test_output_is_ar_decodings_alone_and_in_a_batch_of_three(name: str, temperature: float, width: int) -> None:
    model, params = target(), SamplingParams(max_tokens=18, temperature=temperature, seed=5)
    want = [g.token_ids for g in Engine(model).generate(PROMPTS, params)]
    policy = ClassifierTree(NET, 0.3, width)
    together = Engine(model, Speculation(drafter(name, model, policy), 12)).generate(PROMPTS, params)
    assert [g.token_ids for g in together] == want
    for prompt, ids in zip(PROMPTS, want, strict=True):
        alone = Engine(model, Speculation(drafter(name, model, policy), 12)).generate([prompt], params)[0]
        assert alone.token_ids == ids
    assert sum(sum(g.stats.drafted) for g in together) > 0


@pytest.mark.parametrize("scheme", ["multi-round", "multi-round-replacement", "top1-residual"])
@pytest.mark.parametrize("width", ["1", "15"])
def test_schemes_that_draw_children_refuse_a_policy_that_ranks_them(scheme: str, width: str) -> None:
    with pytest.raises(ConfigError, match=f"{scheme} .*c2t"):
        load_engine("./never-loaded", SpeculationParams(method="c2t", settings={"width": width}, verification=scheme))


def saved_head(folder: Path, model: HFModel, seed: int) -> str:
    save_head(folder, random_network(model, seed=seed), DRAFTED, model)
    return str(folder)


def test_a_classifier_of_another_head_warns(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A head was trained anew under its old name, and the classifiers of the old one were shipped for weeks: only
    names were compared, so nobody was warned."""
    model, folders = target(), [tmp_path_factory.mktemp("one") / "head", tmp_path_factory.mktemp("other") / "head"]
    old, new = (saved_head(folder, model, seed) for seed, folder in enumerate(folders))
    learned = load_drafter(old, model, ClassifierTree(NET))
    assert isinstance(learned, TreeDrafter)
    policy = ClassifierTree(NET, made_for=provenance(model, learned.source, old))
    load_drafter(old, model, policy)
    with pytest.warns(DraftreeWarning, match="classifier .*target .*drafter ") as warned:
        load_drafter(new, model, policy)
    weights = [load_head(Path(folder), model).capabilities.fingerprint for folder in (old, new)]
    assert all(each in str(warned[0].message) for each in weights)


def test_a_classifier_of_another_target_or_drafter_warns() -> None:
    model = target()
    made_for = provenance(model, source("relative", model), "relative")
    check_made_for(made_for, made_for)
    with pytest.warns(DraftreeWarning, match="target .*drafter lookup .lookup."):
        check_made_for(made_for, provenance(model, source("lookup", model), "lookup"))
    other = HFModel(tiny(seed=5), self_test=False)
    with pytest.warns(DraftreeWarning):
        check_made_for(made_for, provenance(other, source("relative", other), "relative"))


def test_names_do_not_matter_where_weights_are_the_same() -> None:
    model = HFModel(tiny(), name="elsewhere/tiny", self_test=False)
    used = provenance(model, source("self", model), "self")
    check_made_for(replace(used, target="tiny", drafter="it"), used)


@pytest.mark.parametrize("name", [DEFAULT])
def test_the_shipped_classifiers_belong_to_the_shipped_head(name: str) -> None:
    """They once were of the head before it."""
    made_for = read_classifier(name).made_for
    head = find_head(PACKAGE / "heads" / "smollm2")
    assert head is not None
    assert made_for.drafter_weights == fingerprint(head.network(head.arrays(None))[0].parameters())
    assert (made_for.target, made_for.drafter) == ("smollm2", "head")
    assert find_policy("c2t").made_for == read_classifier(DEFAULT).made_for


@pytest.mark.real
@pytest.mark.parametrize("backend", sorted({*BACKENDS} - {"transformers"}))  # on which ``test_real`` has it loaded
def test_a_gguf_file_is_the_same_target_on_every_backend(backend: str) -> None:
    """The shipped classifiers once warned of another target where it was only another backend."""
    found = load(DEFAULT_MODEL, backend=backend).capabilities.fingerprint
    assert {read_classifier(name).made_for.target_weights for name in (DEFAULT,)} == {found}


def test_a_target_without_a_head_gets_lookup_and_a_warning() -> None:
    model = target()
    assert str(resolved(DrafterSpec.parse("auto"), model, find_policy("c2t"))) == "lookup"
    with pytest.warns(DraftreeWarning, match="drafter head .*target .*drafter lookup"):
        made = load_drafter("auto", model, find_policy("c2t"))
    assert made.name == "lookup"


def test_nothing_is_drafted_where_there_are_no_candidates() -> None:
    script: Script = lambda row, path: ([1, 2], [-math.inf, -math.inf], 0.0)  # noqa: E731
    assert not len(trees_of(ScriptedScorer(script), ClassifierTree(NET, 0.0), [Budget(4)])[0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": 1.1}, "beta is 1.1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"width": 0}, "width is 0"),
        ({"width": 65}, "width is 65"),
        ({"top": -1}, "top is -1"),
        ({"top": 0}, "top is 0"),
        ({"top": "all"}, "top is 'all': .*'none'"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_a_value_out_of_range_is_named(settings: dict[str, float | str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        find_policy("c2t", settings)
