"""The runs that the report is made of, by name: what each decodes, and about how long that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftree.config import MAX_NODES

SMOLLM2, CODER = "smollm2", "coder"
"""SmolLM2-135M-Instruct with its head; Qwen2.5-Coder-1.5B-Instruct with the 0.5B."""
WHO = "auto,peer:llama.cpp"
"""What users choose from."""
DYNAMIC = (
    f"chain,static,early-stop:nodes=4,early-stop,naive-width:depth=4:nodes=7,dynamic-width:nodes={MAX_NODES},"
    f"dynamic-width-budget,dynamic-width-depth:nodes={MAX_NODES},dynamic-width:nodes=4"
)
"""The paper's methods, and ours. Its chain has 4 tokens; of the length of its other chains it says nothing, so they are
within 4 levels here (naive width: three tokens and four leaves), and early stopping is also within 31. Two methods have
no node budget, as there."""
MOVED = ("sure=0.1", "sure=0.3", "unsure=0.5", "unsure=2", "slope=2", "slope=6")
"""Settings of B(H), one moved at a time."""
STEPS = ",".join(("dynamic-width-budget", *(f"dynamic-width-budget:{setting}" for setting in MOVED)))
BEST = "opt-tree:nodes=25:delta={delta}"
"""OPT-Tree with the threshold that was fastest on prompts kept apart."""
SEQUOIAS = (8, 16, 32, 64, 128, 256)
SMALL = (4, 8)
"""Node budgets that pay on two cores."""
TREES = f"eagle:nodes=25,{BEST}," + ",".join(
    f"binary:nodes={n},sequoia:tree={{sequoia}}-{n}.json:nodes={n},eagle2:nodes={n}"
    + f",opt-tree:nodes={n}:delta={{delta}}" * (n in SMALL)
    for n in (25, *SMALL)
)
"""EAGLE's own tree has 25 nodes. The paper chooses the others' number for speed, of 25, 50 and 60: here it is small."""
PAYING = ",".join(
    (
        "auto,static:nodes=4:width=4:depth=1,static:nodes=8:width=2:depth=2",
        "eagle2:nodes=4:width=2:depth=3,eagle2:nodes=8:width=3:depth=4",
        *(
            f"chain:depth={n},early-stop:nodes={n},binary:nodes={n},eagle:nodes={n},"
            f"sequoia:tree={{sequoia}}-{n}.json:nodes={n},opt-tree:nodes={n},dynamic-width:nodes={n},"
            f"c2t:classifier={{classifier}}:nodes={n},hsddw:cap={n}"
            for n in SMALL
        ),
    )
)
"""Every method at these sizes."""
SIZES = ",".join(
    (
        *(f"opt-tree:nodes={nodes}:delta={{delta}}" for nodes in (8, 16, 32, 64, 128, 256)),
        *(f"sequoia:tree={{sequoia}}-{nodes}.json:nodes={nodes}" for nodes in SEQUOIAS),
    )
)
TREE_SIZES = sorted({25, *SMALL, *SEQUOIAS})
"""Of Sequoia's trees."""
DELTAS = ",".join(f"opt-tree:nodes=25:delta={delta}" for delta in (0.05, 0.1, 0.2, 0.4, 0.8))
BY_COSTS = "opt-tree:nodes=25"
"""With the threshold that its own figures choose, the default."""
WINDOWS = ",".join(
    (*(f"chain:depth={depth}" for depth in (2, 4, 7, 10, 20)), *(f"hsddw:cap={cap}" for cap in (5, 10, 20)))
)
TOPS = (15, 20, 25, 30, "none")
BETAS = (0.3, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)
CONFIDENCE = ",".join(
    (
        *(f"eagle2:nodes={nodes}:depth=10" for nodes in (4, 8, 16, 32, 64)),
        *(f"opt-tree:nodes={nodes}:delta=0.001" for nodes in (4, 8, 16, 32, 64, 96, 128)),
        *(f"c2t:classifier={{{net}}}:nodes=256:beta={beta}" for net in ("classifier", "other") for beta in BETAS),
        *(f"c2t:classifier={{classifier}}:nodes=256:beta=0.01:top={top}" for top in TOPS),
    )
)
"""Of C2T's: EAGLE-2 at C2T's depth, OPT-Tree, for SmolLM2 the coder's classifier too, and the second top-K."""
LEVELS = "lookup>{upper},lookup>{upper}:pending=1,lookup>{upper}:rejected=on,{upper}"
THREE = f"head>{{upper}},head,{LEVELS}"
"""Of drafters: as published, their ablation and ours, and each middle or lower model alone."""
FOREST = ",".join(
    (
        "beams:width=5:drafter=none,beams:width=2:drafter=none",
        *(f"beams:width=5:drafter={{draft}}:depth=3:{s}" for s in ("threshold=0.9", "threshold=0.7:least=2")),
        "beams:width=2:drafter={draft}:depth=3:threshold=0.9",
        "beams:width=5:drafter={draft}:depth=3:single=yes",
        "chain:depth=3:verify=multi-round,static:depth=3:verify=multi-round-replacement",
    )
)
"""Sampled beams with and without a drafter, and what the paper sets beside them: W is 5, gamma 3."""
GRID = ",".join(
    (
        *(f"beams:width={w}:drafter=none" for w in (3, 5)),
        *(
            f"beams:width={w}:draft={w}:drafter={{draft}}:depth=3:threshold={t}:least={least}"
            for w in (3, 5)
            for t in (0.7, 0.9)
            for least in (1, 3)
        ),
    )
)
"""The paper's settings of a dynamic width: W_S, t and W_min."""
QUALITY = ",".join(
    (
        "chain:depth=3:verify=relaxed,chain:depth=3:verify=multi-round",
        "static:depth=3:verify=multi-round-replacement",
        "beams:width=5:drafter=none",
        *(f"beams:width={w}:draft={w}:drafter={{draft}}:depth=3:threshold=0.9" for w in (3, 5)),
    )
)
"""What may change answers, or keep better ones: the lossy scheme, beam sampling, and DSBD with W_S 3 and 5; beside
them what the paper compares with."""
SCHEMES = (
    "chain,static,chain:verify=multi-round,static:verify=multi-round,static:verify=multi-round-replacement,"
    "static:verify=top1-residual,static:verify=relaxed"
)
DRAFTERS = "lookup,head,lookup+head,lookup>head"
"""Kinds of drafters."""
EDITS = "edits"
"""The suite that ``benchmarks.edits`` writes."""
PROGRAMS = "programs"
"""Tasks of MBPP's test part, whose answers begin with prose and not with a copy of the prompt."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of ``draftree bench``.

    Attributes:
        models: ``SMOLLM2`` or ``CODER``.
        suite: a published one, or ``EDITS``.
        limit, tokens: prompts of the suite, and most tokens of an answer.
        methods, drafters: as ``draftree bench`` takes them; names in braces are those of ``Plan.names``.
        options: more of its arguments.
        scored: answers are scored, and the target's entropy along them is measured.
        minutes: about, on 2 cores.
    """

    name: str
    models: str
    suite: str
    limit: int
    tokens: int
    methods: str
    minutes: float
    drafters: str = "{head}"
    temperature: str = "0"
    options: tuple[str, ...] = ()
    scored: bool = False

    def quick(self) -> PlannedRun:
        """The same run, small."""
        limit, tokens = min(self.limit, 3), min(self.tokens, 24)
        share = limit / self.limit * tokens / self.tokens
        return replace(self, limit=limit, tokens=tokens, minutes=self.minutes * share)


Size = tuple[int, int, float]
"""Prompts, tokens of an answer, minutes."""


def _both(name: str, suite: str, methods: str, smollm2: Size, coder: Size, **more: object) -> list[PlannedRun]:
    """A run of each pair of models."""
    sizes = ((SMOLLM2, smollm2), (CODER, coder))
    return [PlannedRun(f"{name}-{m}", m, suite, n, most, methods, each, **more) for m, (n, most, each) in sizes]  # type: ignore[arg-type]


FIRST, PLAIN = ("--turns", "1"), ("--candidates", "plain")
TOP_K, TOP_P = ("--top-k", "10"), ("--top-p", "0.9")
_BEAMS: Mapping[str, Any] = {"drafters": "{draft}", "temperature": "0.7"}
RUNS: Sequence[PlannedRun] = (
    *_both("who", "spec-bench", WHO, (39, 80, 3), (13, 80, 4), drafters="auto", options=FIRST),
    *_both("who-humaneval", "humaneval", WHO, (10, 96, 1), (10, 96, 3), drafters="auto"),
    *_both("who-gsm8k", "gsm8k", WHO, (10, 96, 1), (10, 96, 3), drafters="auto"),
    *_both("who-edits", EDITS, WHO, (12, 150, 1), (12, 150, 4), drafters="auto", options=FIRST),
    *_both("small", "spec-bench", PAYING, (40, 80, 4), (40, 80, 32), options=FIRST),
    *_both("small-gsm8k", "gsm8k", PAYING, (40, 80, 4), (40, 80, 32)),
    PlannedRun("widths-smollm2", SMOLLM2, "mbpp", 45, 64, DYNAMIC, 9, temperature="0.4", options=PLAIN),
    PlannedRun("programs-coder", CODER, PROGRAMS, 45, 128, DYNAMIC, 28, "{draft}", "0.4", PLAIN),
    *_both("trees", "mt-bench", TREES, (32, 128, 7), (12, 64, 8), options=FIRST),
    *_both("gsm8k", "gsm8k", TREES, (32, 64, 4), (10, 64, 5)),
    *_both("levels", "mt-bench", "hsddw:nodes=60", (32, 64, 2), (16, 64, 4), drafters="{levels}", options=FIRST),
    *_both("gsm8k-levels", "gsm8k", "hsddw:nodes=60", (32, 64, 2), (16, 64, 4), drafters="{levels}"),
    *_both("windows", "mt-bench", WINDOWS, (32, 64, 2), (16, 64, 5), drafters="{draft}", options=FIRST),
    *_both("confidence", "mt-bench", CONFIDENCE, (24, 64, 14), (16, 48, 35), options=FIRST),
    PlannedRun("spider-beams-coder", CODER, "spider", 60, 48, FOREST, 45, scored=True, **_BEAMS),
    PlannedRun("squad-beams-coder", CODER, "squad", 60, 32, FOREST, 15, scored=True, **_BEAMS),
    *_both("sizes", "mt-bench", SIZES, (12, 64, 4), (5, 48, 6), options=FIRST),
    PlannedRun("spider-widths-coder", CODER, "spider", 24, 64, GRID, 6, scored=True, **_BEAMS),
    PlannedRun("spider-quality-coder", CODER, "spider", 16, 64, QUALITY, 2, scored=True, **_BEAMS),
    PlannedRun("spider-top-k-coder", CODER, "spider", 16, 64, QUALITY, 2, options=TOP_K, scored=True, **_BEAMS),
    PlannedRun("spider-top-p-coder", CODER, "spider", 16, 64, QUALITY, 2, options=TOP_P, scored=True, **_BEAMS),
    PlannedRun("humaneval-quality-coder", CODER, "humaneval", 20, 256, QUALITY, 10, scored=True, **_BEAMS),
    PlannedRun("gsm8k-quality-coder", CODER, "gsm8k", 12, 320, QUALITY, 9, scored=True, **_BEAMS),
    PlannedRun("mt-bench-beams-coder", CODER, "mt-bench", 12, 128, FOREST, 8, options=FIRST, **_BEAMS),
    PlannedRun("answers-coder", CODER, "gsm8k", 200, 320, "ar", 27, "lookup", scored=True),
    *_both("plain", "mt-bench", TREES, (32, 64, 4), (12, 48, 4), temperature="1", options=(*FIRST, *PLAIN)),
    *_both("deltas", "mt-bench", f"{DELTAS},{BY_COSTS}", (12, 64, 1), (5, 48, 1), options=FIRST),
    *_both(
        "temperatures",
        "mt-bench",
        BEST,
        (12, 64, 1),
        (5, 48, 1),
        temperature="0,0.25,0.5,0.75,1",
        options=(*FIRST, *PLAIN),
    ),
    PlannedRun("steps-smollm2", SMOLLM2, "mt-bench", 16, 64, STEPS, 2, temperature="0.4", options=(*FIRST, *PLAIN)),
    PlannedRun("schemes-smollm2", SMOLLM2, "spec-bench", 13, 48, SCHEMES, 1, temperature="1", options=FIRST),
    PlannedRun("drafters-smollm2", SMOLLM2, "spec-bench", 13, 64, "auto,opt-tree:nodes=8", 2, DRAFTERS, options=FIRST),
)
"""In the order of measuring: those of a paper's main claim come first."""
