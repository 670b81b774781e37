"""``draftree report`` on runs that were stored: all figures of the papers, a page that needs no network."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from draftree.bench.contestants import entries
from draftree.bench.report import agreement
from draftree.bench.report.gunjur import saving, wasted
from draftree.bench.report.headlines import sections as sections_of
from draftree.bench.report.page import Case, Grid, Section, to_html, to_markdown
from draftree.bench.report.source import load_runs
from draftree.bench.summary import Interval
from draftree.cli.main import run
from draftree.cli.report import build

from .runs import full_run, record, save, turn

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("runs") / "one")


class _Reader(HTMLParser):
    """Collects what a browser would fetch, and whether every element that opens is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attributes if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def sections(stored: Path) -> list[Section]:
    return build(load_runs(stored))


def test_a_report_has_every_figure_that_the_runs_have(sections: list[Section]) -> None:
    titles = [s.title for s in sections]
    for figure in (1, 2, 5, 6):
        assert any(t.startswith(f"Gunjur & Waitz, Figure {figure}:") for t in titles), figure
    for name in ("Table 1", "Table 3", *(f"Figure {n}" for n in (5, 6, 7, 8, 9, 10, 11))):
        assert any(t.startswith(f"OPT-Tree, {name}:") for t in titles), name


def test_auto_is_held_against_the_best_fixed_method_and_plain_decoding(tmp_path: Path) -> None:
    made = entries(["auto", "chain", "opt-tree"], ["lookup"], [0.0], 8)
    seconds = {"plain": 2.0, "auto": 1.0, "chain": 1.25, "opt-tree": 1.5}
    records = [
        record(e, prompt, turn([1] * 12, seconds[e.method] * (2.5 if (e.method, prompt % 2) == ("auto", 1) else 1.0)))
        for prompt in range(4)
        for e in made
    ]
    grid = sections_of(load_runs(save(tmp_path / "run", made, records)))[0].grid
    assert grid is not None
    rows = {row[0]: row[3] for row in grid.rows}
    ratio = rows["speed without the prefill, auto over the best of 2 fixed methods (chain)"]
    assert ratio.startswith(f"{(1.25 * 0.5) ** 0.5:.2f} [")
    under = rows["categories in which auto is under 0.98 of plain decoding, without the prefill"]
    assert under == "1 of 2; lowest 0.80 (b)"


def test_every_figure_has_the_command_that_made_it(sections: list[Section]) -> None:
    for section in sections:
        if section.figure:
            assert section.commands == ["draftree bench --suite humaneval"], section.title
            assert section.figure[1].startswith("<svg")


def test_the_page_needs_no_network(stored: Path, capsys: Captured) -> None:
    assert run(["report", str(stored)]) == 0
    page = (stored / "report.html").read_text()
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.fetched
    assert all(f.startswith("data:image/svg+xml;base64,") for f in reader.fetched)
    assert "@import" not in page and "url(" not in page
    for data in reader.fetched:
        figure = base64.b64decode(data.partition(",")[2]).decode()
        assert not re.findall(r'(?:href|src)="(?!#|data:)', figure)
    assert capsys.readouterr().out == f"{stored / 'report.md'}\n{stored / 'report.html'}\n"


def test_markdown_has_its_figures_beside_it(stored: Path, tmp_path: Path) -> None:
    assert run(["report", str(stored), "--markdown", str(tmp_path / "results.md")]) == 0
    text = (tmp_path / "results.md").read_text()
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(shown) > 7
    assert all((tmp_path / name).read_text().startswith("<svg") for name in shown)


def test_a_report_is_the_same_every_time(stored: Path, sections: list[Section]) -> None:
    assert to_html("x", build(load_runs(stored))) == to_html("x", sections)


def test_figures_are_those_of_the_records(stored: Path) -> None:
    """Plain decoding takes 2 s for 13 tokens where drafting takes 1 s in 5 steps."""
    (loaded,) = load_runs(stored)
    plain, chain = loaded.table["plain T=0"]["all"], loaded.table["chain T=0"]["all"]
    assert plain.tokens_per_second == pytest.approx(13 / (2 * 1.15))
    assert chain.speedup == pytest.approx((2, 2, 2))
    assert chain.speedup_decode == pytest.approx((2, 2, 2))
    assert chain.mal == pytest.approx(12 / 5)
    assert chain.nodes_per_token == pytest.approx(5 * 8 / 13)
    assert chain.nodes_per_step == 8
    assert chain.depth_per_step == pytest.approx((2 + 2 + 2 + 3 + 2) / 5)
    assert (plain.nodes_per_step, plain.depth_per_step) == (0, 0)
    assert chain.acceptance_by_depth == [0.7, 0.0]
    assert chain.share == pytest.approx({"draft": 2 / 9, "verify": 6 / 9, "other": 1 / 9})
    assert (chain.ids_equal, chain.verdicts) == (1.0, {"equal": 4})
    peer = loaded.table["peer:hf-generate T=0"]["all"]
    assert (peer.mal, peer.nodes_per_step, peer.depth_per_step) == (1.0, None, None)
    assert peer.speedup == pytest.approx((0.5, 0.5, 0.5))


def test_time_saved_and_layers_wasted() -> None:
    own, base = entries(["chain"], ["lookup"], [0.0], 8)
    slow = [record(base, i, turn([2, 2], 4.0)) for i in range(3)]
    fast = [record(own, i, turn([2, 2], 3.0)) for i in range(3)]
    assert saving(fast, slow) == pytest.approx((0.25, 0.25, 0.25))
    assert wasted(slow[0]) == 2  # two layers drafted in each step, one accepted


def test_gsm8k_shows_the_entropy_of_right_and_wrong_answers(tmp_path: Path) -> None:
    plain, chain = entries(["chain"], ["lookup"], [0.0], 8)
    records = []
    for prompt in range(4):
        answer = replace(turn([1, 1], 1.0, drafts=False), entropy=0.2 + 0.1 * prompt)
        records.append(record(plain, prompt, answer, score={"exact": float(prompt < 2)}))
        records.append(record(chain, prompt, turn([2], 1.0), score={"exact": 1.0}))
    (loaded,) = load_runs(save(tmp_path / "one", [plain, chain], records, suite="gsm8k"))
    section = next(s for s in build([loaded]) if "Figure 3" in s.title)
    assert "0.25 nats over 2 right answers, 0.45 over 2 wrong ones" in section.text[0]
    worth = next(s for s in build([loaded]) if s.title == "What the answers are worth")
    assert worth.grid is not None and worth.grid.rows == [["plain", "0.50"], ["chain", "1.00"]]


def test_a_folder_of_runs_is_one_report_and_says_whether_they_agree(tmp_path: Path) -> None:
    for name in ("b", "a"):
        full_run(tmp_path / name, [0.0])
    runs = load_runs(tmp_path)
    assert [r.path.name for r in runs] == ["a", "b"]
    (section,) = agreement.sections(runs)
    assert section.text[0].startswith("26 of 26 ratios agree")
    assert "1.00 to 1.00" in section.text[0]


def test_runs_agree_where_each_mean_lies_in_the_others_interval() -> None:
    wide = Interval(1.2, 1.0, 1.4)
    assert agreement.agree(wide, Interval(1.1, 1.05, 1.25))
    assert not agreement.agree(wide, Interval(1.1, 1.05, 1.15))
    assert not agreement.agree(Interval(1.1, 1.05, 1.15), wide)


def test_no_run_and_an_unfinished_one_are_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    plain, chain = entries(["chain"], ["lookup"], [0.0], 8)
    save(tmp_path / "empty", [plain, chain], [])
    assert run(["report", str(tmp_path / "empty")]) == 2
    assert "has no answers yet" in capsys.readouterr().err
    other = turn([2, 1], 1.0)
    other.ids[-1] = 99  # nobody has asked the target yet whether that is a near-tie
    records = [record(plain, 0, turn([1, 1, 1], 1.0)), record(chain, 0, other)]
    save(tmp_path / "torn", [plain, chain], records)
    assert run(["report", str(tmp_path / "torn")]) == 2
    assert "is not finished: give its command again: draftree bench" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    stored: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(["report", str(stored)]) == 2
    assert "draftree[plots]" in capsys.readouterr().err


def test_text_of_models_is_escaped() -> None:
    case = Case([("<script>", True), ("x|y", False)])
    sections = [Section("a & b", ["1 < 2"], Grid(["h|h"], [["<i>"]]), case=case)]
    page = to_html("t", sections)
    assert "<script>" not in page and "<i>" not in page
    assert '<span class="drafted">&lt;script&gt;</span>' in page
    assert "h\\|h" in to_markdown("t", sections)
    assert "> <script>[x|y]" in to_markdown("t", sections)
