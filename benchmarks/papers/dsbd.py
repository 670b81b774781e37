"""The figures and tables of "Dynamic-Width Speculative Beam Decoding" (Qin et al.) from our runs with sampled beams.

Figures 4 and 5 are of a run on SQuAD and on Spider that ``benchmarks.quality`` has scored, Table 1 of one on MT-Bench,
Table 2 of contestants that keep one beam in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftree.bench.contestants import AR, Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import ALL, NO_METER, LoadedRun, MethodFigures

from ..quality.answers import mean_scores, read_scores
from .plots import line_style, plot
from .sections import Grid, Section, first

PAPER = "DSBD"
MEASURES = {"squad": "exact", "spider": "execution"}
SPECINFER = "multi-round-replacement"
KINDS = ("multinomial", "speculative", "SpecInfer", "beam sampling", "DSBD")
PAPERS_TABLE_2 = {
    ("squad", "multinomial"): (74, 21.14, 12.36),
    ("squad", "speculative"): (75, 27.11, 8.34),
    ("squad", "SpecInfer"): (74, 27.15, 9.22),
    ("squad", "DSBD"): (86, 26.67, 8.75),
    ("spider", "multinomial"): (20, 21.98, 11.14),
    ("spider", "speculative"): (19, 31.74, 7.06),
    ("spider", "SpecInfer"): (19, 32.00, 8.01),
    ("spider", "DSBD"): (31, 30.30, 7.17),
}
"""(suite, kind) -> per cent right, tokens a second, joules a token, with Llama-2-13B and Llama-68M."""


class Point(NamedTuple):
    """One contestant: how fast, and how good."""

    speed: float
    quality: float


def kind(entry: Entry, records: Sequence[AnswerRecord]) -> str | None:
    """What the paper calls a sampling contestant, given its answers; None: it has no name for it.

    Beams that drafted no layer are beam sampling, whatever drafter they had: costs may choose not to draft.
    """
    if entry.temperature == 0 or entry.is_peer:
        return None
    if entry.beams is not None:
        return "DSBD" if entry.drafter and any(drafted(r) for r in records) else "beam sampling"
    if entry.method == AR:
        return "multinomial"
    return "SpecInfer" if entry.verify == SPECINFER else "speculative"


def drafted(record: AnswerRecord) -> bool:
    """Its beams were drafted: some layers are recorded, or the passes gave more than one layer each."""
    return record.drafted_layers > 0 or (record.passes is not None and record.gained > record.passes)


def one_cache(entry: Entry) -> bool:
    """It keeps one beam in the cache."""
    return entry.beams is None or entry.beams.single_cache or entry.beams.width == 1


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both speed and quality, by rising speed."""
    front, best = list[Point](), float("-inf")
    for point in sorted(points, key=lambda p: (-p.speed, -p.quality)):
        if point.quality > best:
            front.append(point)
            best = point.quality
    return front[::-1]


def sections(runs: Sequence[LoadedRun]) -> list[Section]:
    """Those that the runs have."""
    made = [
        _pareto(runs, "squad", "Figure 4: SQuAD, exact match"),
        _pareto(runs, "spider", "Figure 5: Spider, execution accuracy"),
        _table1(runs),
        _table2(runs),
    ]
    return [section for section in made if section is not None]


def _sampled(run: LoadedRun, wanted: Callable[[Entry], bool] = lambda entry: True) -> dict[str, list[Entry]]:
    """Kind -> contestants that have answers."""
    found: dict[str, list[Entry]] = {}
    for name in KINDS:
        if own := run.of(lambda e: kind(e, run.by_method[e.label]) == name and wanted(e)):  # noqa: B023
            found[name] = own
    return found


def _scores(run: LoadedRun, suite: str) -> dict[str, float]:
    """Label -> mean of the suite's measure."""
    measure = MEASURES[suite]
    return {label: own[measure] for label, own in mean_scores(read_scores(run.path)).items() if measure in own}


def _pareto(runs: Sequence[LoadedRun], suite: str, title: str) -> Section | None:
    def has(run: LoadedRun) -> bool:
        kinds = _sampled(run)
        if run.suite != suite or "DSBD" not in kinds:
            return False
        scores = _scores(run, suite)
        return all(e.label in scores for own in kinds.values() for e in own)

    run = first(runs, has)
    if run is None:
        return None
    name, kinds, scores = f"dsbd-{suite}", _sampled(run), _scores(run, suite)
    metered = all(run.table[e.label][ALL].joules_per_token is not None for own in kinds.values() for e in own)
    rows = []
    with plot(name, 7.2 if metered else 4.8, 3.4) as made:
        panels = made.figure.subplots(1, 2 if metered else 1, squeeze=False)[0]
        for number, (what, own) in enumerate(kinds.items()):
            figures = [run.table[e.label][ALL] for e in own]
            quality = [100 * scores[e.label] for e in own]
            speeds = [[f.tokens_per_second for f in figures], [-(f.joules_per_token or 0.0) for f in figures]]
            style = {**line_style(number), "linestyle": ""}
            for axes, values in zip(panels, speeds, strict=False):
                signs = [abs(v) for v in values]
                axes.plot(signs, quality, label=what, **style)
                if len(own) > 1:
                    front = pareto([Point(v, q) for v, q in zip(values, quality, strict=True)])
                    line = {"color": style["color"], "linewidth": 1}
                    axes.plot([abs(p.speed) for p in front], [p.quality for p in front], **line)
            rows += [[what, e.label, _percent(scores[e.label]), *_cells(f)] for e, f in zip(own, figures, strict=True)]
        panels[0].set(xlabel="tokens/s", ylabel=f"{MEASURES[suite]}, per cent")
        panels[0].legend()
        for axes in panels:
            axes.set_ylim(-1, max(10.0, axes.get_ylim()[1]))
        if metered:
            panels[1].set(xlabel="joules per token")
    text = (
        "Points are contestants, lines the Pareto fronts of those of one kind; beams that drafted no layer are beam "
        "sampling, whatever drafter they had. The paper: the front of DSBD lies above "
        "beam sampling's; at equal quality it is 1.5 to 1.9 times faster and takes 1.8 to 2.5 times less energy."
    )
    if not any(scores[e.label] for own in kinds.values() for e in own):
        text += " No contestant is right about any prompt of this run: no front can be read from it."
    header = ["kind", "contestant", MEASURES[suite], "tokens/s", "J/token"]
    return Section(f"{PAPER}, {title}", [text], Grid(header, rows), (name, made.svg), commands=[run.command])


def _percent(score: float | None) -> str:
    return "" if score is None else f"{100 * score:.1f}%"


def _cells(figures: MethodFigures) -> list[str]:
    joules = figures.joules_per_token
    return [f"{figures.tokens_per_second:.2f}", NO_METER if joules is None else f"{joules:.3g}"]


def _table1(runs: Sequence[LoadedRun]) -> Section | None:
    run = first(runs, lambda run: run.suite == "mt-bench" and "DSBD" in _sampled(run))
    if run is None:
        return None
    own = [(what, e) for what, entries in _sampled(run).items() for e in entries]
    rows = [[what, e.label, *_cells(run.table[e.label][ALL])] for what, e in own]
    text = (
        "The paper, Llama-2-13B: SpecInfer 21.8 tokens/s and 21.2 J/token, W = 5 beams 12.1, 26.3; DSBD 16.5, 16.1; "
        "its scores are a judge model's, which is not run here."
    )
    grid = Grid(["kind", "contestant", "tokens/s", "J/token"], rows)
    return Section(f"{PAPER}, Table 1: MT-Bench", [text], grid, commands=[run.command])


def _table2(runs: Sequence[LoadedRun]) -> Section | None:
    rows, commands = list[list[str]](), list[str]()
    for suite in MEASURES:
        run = first(runs, lambda run: run.suite == suite and "DSBD" in _sampled(run, one_cache))  # noqa: B023
        if run is None:
            continue
        commands.append(run.command)
        scores = _scores(run, suite)
        for what, own in _sampled(run, one_cache).items():
            paper = PAPERS_TABLE_2.get((suite, what))
            theirs = "" if paper is None else f"{paper[0]}%, {paper[1]:.2f}, {paper[2]:.2f}"
            for e in own:
                cells = [_percent(scores.get(e.label)), *_cells(run.table[e.label][ALL])]
                rows.append([f"{suite}: {what}", e.label, *cells, theirs])
    if not rows:
        return None
    grid = Grid(["suite: kind", "contestant", "right", "tokens/s", "J/token", "the paper's three"], rows)
    text = "Contestants that keep one beam in the cache; DSBD then goes on with its best beam after each pass."
    return Section(f"{PAPER}, Table 2: one cache", [text], grid, commands=commands)
