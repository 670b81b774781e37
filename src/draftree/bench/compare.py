"""Equal token ids and near-ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import SamplingParams
from ..engine.replay import first_difference
from ..models.base import STOCK, LanguageModel
from ..verify.schemes import find_scheme
from .contestants import AR, Entry
from .results import AnswerRecord, read_summary
from .run import encode_turns
from .suites import Item

Key = tuple[str, int, str]
"""Prompt, repeat and method of a record."""
EQUAL, NEAR_TIE, OTHER_DRAW = "equal", "near-tie", "other-draw"
LOSSY, BEAMS = "lossy", "beams"
OTHER_FORMAT, DIFFERENT, UNCOMPARED = "other-format", "different", "not-compared"
"""How ids compare with AR decoding's: the same; they differ from a near-tie on; another draw from the same
distribution; the verification was a lossy one; the best of several beams; a peer computes in float32 and ours in a
cheaper weight format; none of these; not compared, in a run that is not finished."""


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """Where an answer first differs from AR decoding's.

    Attributes:
        turn: of the conversation.
        index: of the first token that differs.
        gap: as in ``Difference``.
        verdict: one of those above.
    """

    prompt: str
    repeat: int
    method: str
    turn: int
    index: int
    gap: float | None
    verdict: str

    @property
    def key(self) -> Key:
        return self.prompt, self.repeat, self.method


def compare(
    records: Sequence[AnswerRecord],
    entries: Sequence[Entry],
    items: Sequence[Item],
    known: Sequence[AnswerDifference],
    target: Callable[[], LanguageModel] | None,
) -> tuple[dict[Key, str], list[AnswerDifference]]:
    """Verdicts of all records that have one of AR decoding to compare with, and where answers differ.

    Args:
        known: found earlier; they need no target.
        target: returns the target, called only where a difference is new; without one that is not compared.
    """
    by_label, by_id = {e.label: e for e in entries}, {i.id: i for i in items}
    base = ar_labels(entries)
    ar = {(r.prompt, r.repeat, r.temperature): r for r in records if r.method == base.get(r.temperature)}
    before = {d.key: d for d in known}
    verdicts: dict[Key, str] = {}
    differences: list[AnswerDifference] = []
    for record in records:
        other = ar.get((record.prompt, record.repeat, record.temperature))
        if other is None:
            continue
        verdicts[record.key] = EQUAL
        turns = enumerate(zip(record.turns, other.turns, strict=False))
        turn = next((i for i, (one, two) in turns if one.ids != two.ids), None)
        if turn is not None:
            found = before.get(record.key)
            if found is None:
                if target is None:
                    verdicts[record.key] = UNCOMPARED
                    continue
                found = _difference(record, other, turn, by_label[record.method], by_id[record.prompt], target())
            differences.append(found)
            verdicts[record.key] = found.verdict
    return verdicts, differences


def ar_labels(entries: Sequence[Entry]) -> dict[float, str]:
    """Temperature -> label of AR decoding at it."""
    return {e.temperature: e.label for e in entries if e.method == AR}


def read_differences(folder: Path) -> list[AnswerDifference]:
    """Those in the summary of a run; none where there is no summary yet."""
    return [AnswerDifference(**values) for values in read_summary(folder).get("differences", [])]


def _difference(
    record: AnswerRecord, other: AnswerRecord, turn: int, entry: Entry, item: Item, target: LanguageModel
) -> AnswerDifference:
    before = [text for i in range(turn) for text in (item.turns[i], other.turns[i].text)]
    prompt = encode_turns(target, [*before, item.turns[turn]])
    params = SamplingParams(temperature=record.temperature, seed=record.seed)
    found = first_difference(target, prompt, other.turns[turn].ids, record.turns[turn].ids, params)
    if found is None:
        raise ValueError(f"turn {turn} of prompt {record.prompt} does not differ")
    if entry.beams is not None:
        verdict = BEAMS
    elif find_scheme(entry.verify).lossy:
        verdict = LOSSY
    elif not entry.draws_as_ar:
        verdict = OTHER_DRAW
    elif found.near_tie:
        verdict = NEAR_TIE
    else:
        cheaper = target.capabilities.weight_format != STOCK
        verdict = OTHER_FORMAT if entry.is_peer and cheaper else DIFFERENT
    return AnswerDifference(record.prompt, record.repeat, record.method, turn, found.index, found.gap, verdict)
