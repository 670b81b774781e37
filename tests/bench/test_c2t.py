"""C2T's figures: calibration counted once a law, plots that are written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from draftree.bench.c2t import TOP_NODES, WIDTH_BETAS, Point, equal_mal, held_against, joint, main, top_ks, widths
from draftree.bench.c2t_clock import Contestant, Timed, decoded, of_mal, print_clock
from draftree.bench.c2t_plots import calibration, check_plot, plot_calibration, plot_curves, print_calibration
from draftree.bench.recorded import KnownText, record
from draftree.policies.best_paths import Eagle2Tree
from draftree.policies.c2t import ClassifierTree
from draftree.policies.classifier import Classifier
from draftree.policies.entropy import EntropyTree

from ..pairs import source, target

PROMPT = [3, 14, 15, 9, 2, 6, 14, 15]


def texts() -> list[KnownText]:
    model = target()
    return list(record(model, source("self", model), [PROMPT], 8))


def test_each_law_on_the_text_is_counted_once() -> None:
    found = calibration(texts())
    assert int(found.laws.sum()) == sum(range(1, 7))  # 7 tokens follow the first: 6 laws, then 5, ...
    assert found.accepted[found.laws > 0, 0].tolist() == [1.0] * int((found.laws > 0).sum())  # the target drafts itself
    assert float(found.accepted[:, 1:].sum()) == 0


def test_the_calibration_is_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = calibration(texts())
    print_calibration(found)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [int(row[1]) for row in rows] == [int(n) for n in found.laws]
    many = found._replace(laws=found.laws * 100)
    plot_calibration(many, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<svg")
    plot_calibration(found, tmp_path / "few.svg")  # bins of few laws are left out
    assert len((tmp_path / "few.svg").read_text()) < len(drawn)


def test_curves_are_a_plot_and_the_same_every_time(tmp_path: Path) -> None:
    curves = {"one": ([1.0, 2.0], [0.5, 3.0]), "two": ([1.2, 2.2], [0.5, 3.0])}
    for name in ("a.svg", "b.svg"):
        plot_curves(curves, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert check_plot(tmp_path / "a.svg") == ""


@pytest.mark.parametrize("name", ["plot.png", "nowhere/plot.svg"])
def test_a_plot_that_cannot_be_is_refused_before_any_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["c2t", "--target", "./never-loaded", "--plot", str(tmp_path / name)])
    with pytest.raises(SystemExit):
        main()
    assert "name a .svg file in a folder that exists" in capsys.readouterr().err


def test_widths_are_held_against_the_published_function_over_the_budget() -> None:
    one = Classifier(("entropy", "rank"), ((0.0, -99.0),), (14.0,), (1.0,), -9.0, given_parent=True)  # the first alone
    curves = widths({"one": one})
    assert list(curves) == ["published B(H)", *(f"one, {b:g}" for b in WIDTH_BETAS)]
    known = texts()
    for name, curve in curves.items():
        label, policy, budget = curve[3]
        assert (label, budget) == ("N=6", 6)
        assert isinstance(policy, EntropyTree) and policy.depth == 4
        point, _ = held_against((label, policy, budget), known)
        assert (int(point.nodes) == 4 + 1) == (name != "published B(H)")  # 7 tokens: a chain of 4, then of 1


LIKELY = Classifier(("step",), ((1.0,),), (0.0,), (9.0,), -1.0)


def test_each_second_top_k_has_a_curve_of_its_own() -> None:
    curves = top_ks({"one": LIKELY}, [1, 15, None])
    assert list(curves) == ["eagle2, N", "one, K=1", "one, K=15", "one, K=none"]
    for top, key in ((1, "one, K=1"), (15, "one, K=15"), (None, "one, K=none")):
        label, policy, nodes = curves[key][-1]
        assert isinstance(policy, ClassifierTree)
        assert (label, policy.top, nodes) == ("beta=0.005", top, TOP_NODES)
    known = texts()
    found = [int(held_against(curves[key][0], known)[0].nodes) for key in ("one, K=1", "one, K=none")]
    assert found[0] < found[1]


@pytest.mark.parametrize("text", ["15,most", "0", ""])
def test_a_second_top_k_that_is_none_is_refused_before_any_model(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["c2t", "--target", "./never-loaded", "--tops", text])
    with pytest.raises(SystemExit):
        main()
    assert "--tops" in capsys.readouterr().err


def tree(beta: float, nodes: int) -> Contestant:
    return f"beta={beta:g}", ClassifierTree(joint, beta), nodes


def test_a_setting_of_equal_mal_lies_between_two_points_of_a_curve() -> None:
    betas = [tree(0.4, 64), tree(0.1, 64), tree(0.025, 64)]
    _, policy, nodes = of_mal(2.5, betas, [1.0, 2.0, 3.0])
    assert isinstance(policy, ClassifierTree)
    assert policy.beta == pytest.approx(0.05)
    assert nodes == 64
    sizes: list[Contestant] = [(f"N={n}", Eagle2Tree(10, 10), n) for n in (4, 8)]
    assert of_mal(1.5, sizes, [1.0, 2.0]) == ("N=6", Eagle2Tree(10, 10), 6)
    assert of_mal(0.5, betas, [1.0, 2.0, 3.0]) == betas[0]
    assert of_mal(9.0, betas, [1.0, 2.0, 3.0]) == betas[-1]


def test_the_bases_points_are_paired_with_settings_of_the_same_mal() -> None:
    def point(mal: float) -> Point:
        return Point("", *(torch.tensor([x, x]).double() for x in (5.0, 1.0, mal)))

    sizes: list[Contestant] = [(f"N={n}", Eagle2Tree(10, 10), n) for n in (4, 8)]
    contestants = {"eagle2, N": sizes, "joint, beta": [tree(0.4, 64), tree(0.1, 64)]}
    curves = {
        "eagle2, N": [point(1.0)._replace(label="N=4"), point(2.5)._replace(label="N=8")],
        "joint, beta": [point(2.0), point(3.0)],
    }
    points, pairs = equal_mal(contestants, curves, "eagle2, N", ["N=8"])
    assert pairs == [("eagle2, N: N=8", "joint, beta: beta=0.2 N=64")]
    assert [nodes for _, _, nodes in points.values()] == [8, 64]


def test_contestants_decode_every_prompt_in_turns_and_times_are_compared_by_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, prompts = target(), [PROMPT, PROMPT[::-1]]
    chosen: dict[str, Contestant] = {"eagle2": ("N=4", Eagle2Tree(2, 3), 4), "tree": tree(0.01, 3)}
    found = decoded(model, "self", chosen, prompts, 12, repeats=2)
    for name, own in found.items():
        assert [t.tokens for t in own] == [2 * 11] * 2  # of two decodes, all but the token of the prefill
        assert all(t.seconds > 0 and t.steps < t.tokens for t in own), name
    assert max(t.nodes / t.steps for t in found["tree"]) <= 3
    slow = [Timed(2.0, 10, 5, 20), Timed(4.0, 10, 5, 20)]
    capsys.readouterr()
    print_clock({"fast": [Timed(1.0, 10, 4, 12), Timed(2.0, 10, 4, 12)], "slow": slow}, [("fast", "slow")])
    fast, other, over = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert fast == ["fast", "2.500", "1.20", "150.00"]
    assert other == ["slow", "2.000", "2.00", "300.00"]
    assert over[-3:] == ["2.000", "[2.000,", "2.000]"]
