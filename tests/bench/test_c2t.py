"""C2T's figures: calibration counted once a law, plots that are written, widths, and features that help or do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from draftree.bench import c2t_features
from draftree.bench.c2t import WIDTH_BETAS, held_against, main, widths
from draftree.bench.c2t_features import SOURCES, compared, held_out, tried
from draftree.bench.c2t_plots import calibration, check_plot, plot_calibration, plot_curves, print_calibration
from draftree.bench.recorded import KnownText, record
from draftree.draft.classifier import DEFAULT_FEATURES, Classifier
from draftree.draft.entropy import EntropyTree
from draftree.draft.features import FEATURES
from draftree.train.classifier_fit import ClassifierRecipe
from draftree.train.sample_store import SampleRecipe, SampleStore
from draftree.train.samples import Samples

from ..pairs import source, target

PROMPT = [3, 14, 15, 9, 2, 6, 14, 15]
NAMES = list(FEATURES)


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


def synthetic(count: int = 20_000) -> Samples:
    """Acceptance is 0.9 of what the margin says; nothing else matters."""
    rng = torch.Generator().manual_seed(0)
    given = torch.rand(count, len(NAMES), generator=rng)
    given[:, [NAMES.index(name) for name in SOURCES]] = 0.0
    accepted = torch.rand(count, generator=rng) < 0.9 * given[:, NAMES.index("margin")]
    return Samples(given, accepted, torch.ones_like(accepted), torch.arange(count) % 20)


def test_a_feature_that_says_more_lowers_the_loss_and_noise_does_not() -> None:
    samples = synthetic()
    loss = {
        name: held_out(samples, ClassifierRecipe(features=features, batch=128, epochs=3), 1.0, 4)
        for name, features in tried(samples).items()
        if name in ("default", "+ margin", "+ rank")
    }
    assert all(len(each) == 20 for each in loss.values())
    ratio, low, high = compared(loss["+ margin"], loss["default"])
    assert low < ratio < high < 0.95
    assert compared(loss["+ rank"], loss["default"])[0] > 0.98
    assert compared(loss["default"], loss["default"]) == (1.0, 1.0, 1.0)


def test_sources_are_tried_where_samples_are_of_a_union() -> None:
    samples = synthetic(100)
    assert not any("source" in name for name in tried(samples))
    samples.features[:, NAMES.index("source-2")] = 1.0
    assert tried(samples)["+ source-2"] == (*DEFAULT_FEATURES, "source-2")


def test_the_features_of_a_folder_of_samples_are_held_against_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = SampleRecipe(
        target="t",
        target_weights="0123",
        drafter="d",
        drafter_weights="4567",
        prompts="p",
        max_tokens=9,
        negatives=1.0,
        seed=0,
        dtype="torch.float32",
    )
    store, samples = SampleStore.open(tmp_path / "data", recipe), synthetic(2000)
    for number in range(20):
        store.add(number, samples.take(samples.numbers == number), 1)
    store.flush()
    monkeypatch.setattr(sys, "argv", ["c2t_features", "--data", str(tmp_path / "data"), "--folds", "2"])
    c2t_features.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("drafter d: 20 prompts, 2000 samples")
    names = [line.split(" loss")[0].strip() for line in lines[1:] if line.strip()]
    assert names == ["default", *(f"+ {n}" for n in ("step", "rank", "margin", "entropy-variance"))]
    (tmp_path / "data" / "recipe.json").write_text(json.dumps({"target": 1}))
    with pytest.raises(SystemExit):
        c2t_features.main()
    assert "holds no samples: collect some with" in capsys.readouterr().err
