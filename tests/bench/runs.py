"""Runs that were never decoded: records with figures that are known, in the files of a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from draftree.bench.entries import AR, Entry, entries
from draftree.bench.results import BINS, AnswerRecord, Parts, RunFolder, StepColumns, Turn

MACHINE = {"processor": "abacus", "cores": 2, "system": "Linux"}


def turn(gained: Sequence[int], seconds: float, *, nodes: int = 4, drafts: bool = True) -> Turn:
    """An answer of ``1 + sum(gained)`` tokens in as many steps, whose prefill takes a tenth of the time."""
    accepted = [g - 1 for g in gained]
    depth = [max(2, a) if drafts else 0 for a in accepted]
    hits = sum(accepted)
    steps = StepColumns(
        gained=list(gained),
        accepted=accepted,
        nodes=[nodes if drafts else 0] * len(gained),
        depth=depth,
        expected=[1.0 + 0.5 * a for a in accepted],
        drafted_by_depth=[2 * len(gained), 2 * len(gained)] if drafts else [],
        accepted_by_depth=[hits] if drafts else [],
        accepted_entropies=[0.5] * hits,
        rejected_entropies=[1.5] * len(gained) if drafts else [],
        reached_by_probability=[10] * BINS if drafts else [0] * BINS,
        accepted_by_probability=list(range(BINS // 2)) * 2 if drafts else [0] * BINS,
        target_seconds=0.6 * seconds,
        drafter_seconds=0.1 * seconds,
    )
    tokens = 1 + sum(gained)
    drafted = [0, *(int(i < g - 1) for g in gained for i in range(g))]
    parts = Parts(seconds, 0.1 * seconds, 0.2 * seconds, 0.6 * seconds, 0.1 * seconds)
    pieces = [f"w{i} <b> " for i in range(tokens)]
    return Turn(5, list(range(tokens)), "".join(pieces), "length", parts, len(gained), steps, drafted, pieces)


def record(entry: Entry, prompt: int, answer: Turn, **more: object) -> AnswerRecord:
    """A line of ``entry`` about a prompt; categories "a" and "b" alternate."""
    return AnswerRecord(
        prompt=f"p{prompt}",
        category="ab"[prompt % 2],
        method=entry.label,
        drafter=entry.drafter,
        temperature=entry.temperature,
        seed=11,
        turns=[answer],
        **more,
    )


def save(folder: Path, made: Sequence[Entry], records: Sequence[AnswerRecord], suite: str = "humaneval") -> Path:
    """A run's folder, without a summary."""
    config = {
        "suite": suite,
        "prompts": len({r.prompt for r in records}),
        "methods": [e.label for e in made],
        "entries": [asdict(e) for e in made],
        "drafters": ["lookup"],
        "max_tokens": 13,
        "commit": "0abc",
        "nodes": 8,
        "target": "tiny",
        "machine": MACHINE,
        "versions": {"draftree": "0"},
        "command": f"draftree bench --suite {suite}",
        "date": "2026-01-01T00:00:00",
    }
    made_folder = RunFolder(folder, config, [])
    for line in records:
        made_folder.append(line)
    return folder


METHODS = (
    "chain,static,early-stop,naive-width,dynamic-width,dynamic-width-depth,binary,eagle,opt-tree,"
    "opt-tree:nodes=4,opt-tree:delta=0.2,opt-tree:delta=0.5,peer:hf-generate"
)


def full_run(folder: Path, temperatures: Sequence[float] = (0.0, 1.0)) -> Path:
    """All that the papers' figures need but scores: every drafting method is twice as fast as AR decoding."""
    made = entries(METHODS.split(","), ["lookup"], temperatures, 8)
    records = []
    for prompt in range(4):
        for entry in made:
            slow = 1.0 + 0.1 * prompt
            if entry.method == AR:
                answer = turn([1] * 12, 2 * slow, drafts=False)
            elif entry.is_peer:
                answer = Turn(5, list(range(13)), "x", None, Parts(4 * slow, 0.2 * slow), 13)
            else:
                answer = turn([3, 2, 1, 4, 2], slow, nodes=entry.nodes)
            records.append(record(entry, prompt, answer))
    return save(folder, made, records)
