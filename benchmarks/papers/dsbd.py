"""The figures and tables of "Dynamic-Width Speculative Beam Decoding" (Qin et al.): sampled beams on three suites.

Figures 4 and 5 are of SQuAD and Spider, scored; Table 1 is of MT-Bench; Table 2 of contestants that keep one beam.
Scores and processor time of longer answers, top-k and top-p, and accepted widths are beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from draftree.beams.forest import BeamParams
from draftree.bench.entries import AR, Entry
from draftree.bench.results import AnswerRecord
from draftree.bench.summary import ALL, Interval, LoadedRun, MethodFigures, interval, number, paired, ratio_text

from ..quality.answers import mean_scores, read_scores
from .plots import line_style, plot
from .sections import Chapter, Grid, Part, Runs, Section, Verdict, of

RUNS = {suite: f"{suite}-beams-coder" for suite in ("squad", "spider", "mt-bench")}
GRID = "spider-widths-coder"
WARPED = ("spider-quality-coder", "spider-top-k-coder", "spider-top-p-coder")
LONG = ("humaneval-quality-coder", "gsm8k-quality-coder")
QUALITY = (*WARPED, *LONG)
SCORED = ("squad", "spider")
"""Suites of the paper that have right and wrong answers."""
MEASURES = {"squad": "exact", "spider": "execution", "humaneval": "pass@1", "gsm8k": "exact"}
SPECINFER = "multi-round-replacement"
KINDS = ("multinomial", "speculative", "SpecInfer", "beam sampling", "DSBD")
PAPERS_TABLE_2 = {
    ("squad", "multinomial"): (74, 21.14),
    ("squad", "speculative"): (75, 27.11),
    ("squad", "SpecInfer"): (74, 27.15),
    ("squad", "DSBD"): (86, 26.67),
    ("spider", "multinomial"): (20, 21.98),
    ("spider", "speculative"): (19, 31.74),
    ("spider", "SpecInfer"): (19, 32.00),
    ("spider", "DSBD"): (31, 30.30),
}
"""(suite, kind) -> per cent right, tokens a second, with Llama-2-13B and Llama-68M."""


_LONG = 60
"""Tokens."""


class Point(NamedTuple):
    """One contestant: how fast, and how good."""

    speed: float
    quality: float


def kind(entry: Entry, records: Sequence[AnswerRecord]) -> str | None:
    """What the paper calls a sampling contestant, given its answers; None: it has no name for it.

    Beams that drafted no layer are beam sampling, whatever drafter they had: a short answer leaves none to draft.
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
    layers = sum(turn.drafted_layers or 0 for turn in record.turns)
    return layers > 0 or (record.passes is not None and record.gained > record.passes)


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


def _pareto(runs: Runs, suite: str, title: str) -> Section | None:
    run = runs.get(RUNS[suite])
    if run is None:
        return None
    name, kinds, scores = f"dsbd-{suite}", _sampled(run), _scores(run, suite)
    rows = []
    with plot(name, 4.8, 3.4) as made:
        axes = made.figure.subplots()
        for at, (what, own) in enumerate(kinds.items()):
            figures = [run.table[e.label][ALL] for e in own]
            points = [Point(f.tokens_per_second, 100 * scores[e.label]) for e, f in zip(own, figures, strict=True)]
            style = line_style(at)
            axes.plot([p.speed for p in points], [p.quality for p in points], label=what, **{**style, "linestyle": ""})
            front = pareto(points)
            axes.plot([p.speed for p in front], [p.quality for p in front], color=style["color"], linewidth=1)
            rows += [[what, _shown(e), _right(run, e), *_cells(f)] for e, f in zip(own, figures, strict=True)]
        axes.set(xlabel="tokens/s", ylabel=f"{MEASURES[suite]}, per cent")
        axes.legend()
        axes.set_ylim(-1, 101)
    text = (
        "Points are contestants, lines the Pareto front of each kind. Beams that drafted no layer count as beam "
        "sampling. The paper: DSBD's front lies above beam sampling's. Points whose intervals overlap cannot be told "
        f"apart. With 5 beams DSBD has {ratio_text(speedup(runs, run.path.name))} of beam sampling's speed, prompts "
        "included."
    )
    grid = Grid(["kind", "contestant", MEASURES[suite], "tokens/s", "MAL"], rows)
    if len({scores[e.label] for own in kinds.values() for e in own}) == 1:
        text = "All contestants are right about as many prompts: there is no front to draw."
        return Section(title, [text], grid, runs=[run])
    return Section(title, [text], grid, (name, made.svg), runs=[run])


def _figure4(runs: Runs) -> Section | None:
    return _pareto(runs, "squad", "Figure 4: SQuAD, exact match")


def _figure5(runs: Runs) -> Section | None:
    return _pareto(runs, "spider", "Figure 5: Spider, execution accuracy")


def _right(run: LoadedRun, entry: Entry) -> str:
    """Share of right answers, with its interval over prompts."""
    measure = MEASURES[run.suite]
    right = [s.score[measure] for s in read_scores(run.path) if s.method == entry.label and measure in s.score]
    return interval(right).text() if right else ""


def _percent(score: float | None) -> str:
    return "" if score is None else f"{score:.2f}"


def _cells(figures: MethodFigures) -> list[str]:
    return [f"{figures.tokens_per_second:.2f}", number(figures.mal)]


def _table1(runs: Runs) -> Section | None:
    run = runs.get(RUNS["mt-bench"])
    if run is None:
        return None
    own = [(what, e) for what, entries in _sampled(run).items() for e in entries]
    rows = [[what, _shown(e), *_cells(run.table[e.label][ALL])] for what, e in own]
    text = (
        "The paper, Llama-2-13B: SpecInfer 21.8 tokens/s, W = 5 beams 12.1, DSBD, which keeps one beam in the cache, "
        "16.5. A judge model gives its scores; none is run here."
    )
    return Section("Table 1: MT-Bench", [text], Grid(["kind", "contestant", "tokens/s", "MAL"], rows), runs=[run])


def _table2(runs: Runs) -> Section | None:
    rows, found = list[list[str]](), of(runs, [RUNS[suite] for suite in SCORED])
    for run in found:
        scores = _scores(run, run.suite)
        for what, own in _sampled(run, one_cache).items():
            paper = PAPERS_TABLE_2.get((run.suite, what))
            theirs = "" if paper is None else f"{paper[0]}%, {paper[1]:.2f}"
            for e in own:
                cells = [_percent(scores.get(e.label)), *_cells(run.table[e.label][ALL])]
                rows.append([f"{run.suite}: {what}", _shown(e), *cells, theirs])
    grid = Grid(["suite: kind", "contestant", "right", "tokens/s", "MAL", "the paper: right, tokens/s"], rows)
    text = (
        "Contestants that keep one beam in the cache: DSBD continues with its best beam after each pass. "
        "`speculative` drafts 3 sampled tokens and verifies by `multi-round`, as in the paper."
    )
    return Section("Table 2: one cache", [text], grid, runs=found) if rows else None


def _settings(runs: Runs) -> Section | None:
    run = runs.get(GRID)
    if run is None:
        return None
    rows, scores, plain = list[list[str]](), _scores(run, run.suite), dict[int, Entry]()
    for e in run.named("beams"):
        beams = e.beams or BeamParams()
        settings = ["not drafted", ""]
        over = ""
        if e.drafter is None:
            plain[beams.width] = e
        else:
            settings = [f"{beams.threshold:g}", str(beams.min_width)]
            base = run.by_method[plain[beams.width].label]
            over = ratio_text(paired(run.by_method[e.label], base, lambda r: r.rate))
        own = [_percent(scores.get(e.label)), *_cells(run.table[e.label][ALL])]
        rows.append([str(beams.width), *settings, *own, over])
    text = (
        "Spider: W_S draft beams in each of 3 layers, of which as many go on as are accepted with probability t, at "
        "least W_min. The paper: t and W_min decide how often a layer is accepted, and so the speed; beam sampling has "
        "converged at a width of 4."
    )
    header = ["W_S", "t", "W_min", "right", "tokens/s", "MAL", "over beam sampling of W_S beams"]
    return Section("The width's settings", [text], Grid(header, rows), runs=[run])


def cpu_a_token(records: Sequence[AnswerRecord]) -> float | None:
    """Seconds of processor time, of all threads, for each token of the answers; None where it was not recorded."""
    seconds = [turn.cpu for record in records for turn in record.turns]
    known = [s for s in seconds if s is not None]
    return sum(known) / sum(r.tokens for r in records) if known and len(known) == len(seconds) else None


def _quality(runs: Runs) -> Section | None:
    rows, found = list[list[str]](), of(runs, QUALITY)
    for run in found:
        plain = next((e for e in run.named("beams") if e.drafter is None), None)
        for e in run.of(lambda e: True):
            own = run.by_method[e.label]
            cpu = cpu_a_token(own)
            over = ratio_text(paired(own, run.by_method[plain.label], lambda r: r.rate)) if plain else ""
            cells = [_right(run, e), f"{sum(r.tokens for r in own) / len(own):.0f}"]
            cells += [*_cells(run.table[e.label][ALL]), "" if cpu is None else f"{cpu:.3f}", over]
            rows.append([f"{run.path.name}: {_shown(e)}", *cells])
    text = (
        "Share of right answers (Spider: execution accuracy; HumanEval: pass@1, in a sandbox; GSM8K: the number) and "
        "cost. CPU s is processor time a token, of all threads, prompts included. `verify=relaxed` is lossy. Sampled "
        "at T = 0.7; `top-k` runs have top-k 10, `top-p` runs top-p 0.9."
    )
    header = ["run: contestant", "right", "tokens", "tokens/s", "MAL", "CPU s", "over beam sampling of 5 beams"]
    return Section("Quality, and its cost", [text], Grid(header, rows), runs=found) if rows else None


def accepted(records: Sequence[AnswerRecord]) -> list[int]:
    """Drafted beams that were accepted, in each layer that was verified."""
    return [width for record in records for turn in record.turns for width in turn.accepted_widths or ()]


def _widths(runs: Runs) -> Section | None:
    rows, found = list[list[str]](), of(runs, (GRID, *WARPED))
    for run in found:
        for e in run.named("beams"):
            if layers := accepted(run.by_method[e.label]):
                mean = f"{sum(layers) / len(layers):.2f}"
                rows.append([f"{run.path.name}: {_shown(e)}", str(len(layers)), mean])
    text = (
        "Mean number of draft beams that are accepted in a verified layer. W_L is at most the number of running "
        "beams; a layer that accepts fewer ends its pass."
    )
    grid = Grid(["run: contestant", "layers", "mean"], rows)
    return Section("Accepted widths", [text], grid, runs=found) if rows else None


def speedup(runs: Runs, name: str) -> Interval | None:
    """DSBD over beam sampling with as many beams in a run; prompts count, since answers may have but four tokens."""
    run = runs.get(name)
    wide = [e for e in run.named("beams") if e.beams and e.beams.width == 5] if run else []
    single = name == RUNS["mt-bench"]  # as in the paper's Table 1
    plain = next((e for e in wide if e.drafter is None), None)
    own = next((e for e in wide if e.drafter and e.beams and e.beams.single_cache is single), None)
    if run is None or plain is None or own is None:
        return None
    return paired(run.by_method[own.label], run.by_method[plain.label], lambda r: r.rate)


def _speedups(runs: Runs) -> dict[str, Interval]:
    """Of each run that the claim is looked at in: one of each suite."""
    return {name: found for name in (*RUNS.values(), *LONG) if (found := speedup(runs, name))}


def _verdict(runs: Runs) -> Verdict | None:
    return Verdict.of([found.low > 1 for found in _speedups(runs).values()])


def _found(runs: Runs) -> str | None:
    parts = list[str]()
    for long, kind_of in ((True, "long"), (False, "short")):
        own = [f"{x.text()} in `{name}`" for name, x in _speedups(runs).items() if _is_long(runs[name]) is long]
        parts += [f"{', '.join(own)} with {kind_of} answers"] * bool(own)
    return f"Of beam sampling's speed, prompts included, DSBD with 5 beams has {'; '.join(parts)}." if parts else None


def _is_long(run: LoadedRun) -> bool:
    """Its plain answers have more than ``_LONG`` tokens in the mean."""
    plain = [r for r in run.records if r.method == AR]
    return sum(r.tokens for r in plain) > _LONG * len(plain)


def _shown(entry: Entry) -> str:
    """A contestant's label, with the name of its draft model's file in place of the path."""
    drafter = entry.drafter or ""
    return entry.label.replace(drafter, Path(drafter).stem) if drafter else entry.label


CHAPTER = Chapter(
    "dsbd",
    "Dynamic-Width Speculative Beam Decoding (DSBD)",
    "1.5 to 1.9 times the speed of beam sampling and 1.8 to 2.5 times less energy at equal quality (Figures 4 and 5; "
    "Llama-2-13B with Llama-68M; [how it works](../how-it-works/beams.md)). This machine has no energy counter; "
    "*Quality* has processor time instead.",
    _found,
    _verdict,
    "The long answers of HumanEval and GSM8K are the best evidence: there DSBD is faster. Answers of SQuAD have four "
    "tokens, which do not repay the draft model's reading of the prompt. A forest of 10 draft beams and 3 layers is "
    "a pass over 31 tokens. On two cores it takes several passes over one token, on the paper's GPU about one, and a "
    "pass of the 0.5B takes a third of one of the target's.",
    (
        Part("figure-4", [RUNS["squad"]], _figure4),
        Part("figure-5", [RUNS["spider"]], _figure5),
        Part("settings", [GRID], _settings),
        Part("table-1", [RUNS["mt-bench"]], _table1),
        Part("table-2", [RUNS[suite] for suite in SCORED], _table2),
        Part("quality", QUALITY, _quality),
        Part("widths", [GRID, *WARPED], _widths),
    ),
)
