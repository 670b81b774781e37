"""Equal token ids and near-ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import SamplingParams
from ..models.base import LanguageModel
from ..models.cpu.quantization import DEFAULT_WEIGHT_FORMAT, STOCK
from ..models.huggingface import HFModel
from ..sampling import Draws, gumbel_noise, warp
from ..verify.schemes import find_scheme
from .contestants import AR, Entry
from .results import AnswerRecord
from .run import encode_turns
from .suites import Item

Key = tuple[str, int, str]
"""Prompt, repeat and method of a record."""
EQUAL, NEAR_TIE, OTHER_DRAW = "equal", "near-tie", "other-draw"
LOSSY, BEAMS = "lossy", "beams"
OTHER_FORMAT, DIFFERENT = "other-format", "different"
"""How ids compare with AR decoding's: the same; they differ from a near-tie on; another draw from the same
distribution; the verification was a lossy one; the best of several beams; a peer computes in float32 and ours in a
cheaper weight format; none of these."""


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """Where an answer first differs from AR decoding's.

    Attributes:
        prompt, repeat, method: whose answer.
        turn: of the conversation.
        index: of the first token that differs.
        gap: by how much the target prefers one of the two there, in logits; None: one is a beginning of the other.
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
    target: Callable[[], HFModel],
) -> tuple[dict[Key, str], list[AnswerDifference]]:
    """Verdicts of all records that have one of AR decoding to compare with, and where answers differ.

    Args:
        records: of a run.
        entries: what took part.
        items: its prompts.
        known: found earlier; they need no target.
        target: returns the target; called only where a difference is new.
    """
    by_label, by_id = {e.label: e for e in entries}, {i.id: i for i in items}
    base = ar_labels(entries)
    ar = {(r.prompt, r.repeat, r.temperature): r for r in records if r.method == base.get(r.temperature)}
    before = {p.key: p for p in known}
    verdicts: dict[Key, str] = {}
    differences: list[AnswerDifference] = []
    for record in records:
        other = ar.get((record.prompt, record.repeat, record.temperature))
        if other is None:
            continue
        turn = _first_turn(record, other)
        if turn is not None:
            found = before.get(record.key)
            if found is None:
                model = target()  # may raise: without it no new difference is compared
                found = _part(record, other, turn, by_label[record.method], by_id[record.prompt], model)
            differences.append(found)
            verdicts[record.key] = found.verdict
        else:
            verdicts[record.key] = EQUAL
    return verdicts, differences


def ar_labels(entries: Sequence[Entry]) -> dict[float, str]:
    """Temperature -> label of AR decoding at it."""
    return {e.temperature: e.label for e in entries if e.method == AR}


def read_differences(values: Sequence[Mapping[str, Any]]) -> list[AnswerDifference]:
    """Read what ``as_json`` wrote."""
    return [AnswerDifference(**value) for value in values]


def as_json(differences: Sequence[AnswerDifference]) -> list[dict[str, Any]]:
    return [asdict(p) for p in differences]


def _first_turn(record: AnswerRecord, other: AnswerRecord) -> int | None:
    pairs = zip(record.ids, other.ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _part(
    record: AnswerRecord, other: AnswerRecord, turn: int, entry: Entry, item: Item, target: HFModel
) -> AnswerDifference:
    before = [x for i in range(turn) for x in (item.turns[i], other.turns[i].text)]
    prompt = encode_turns(target, [*before, item.turns[turn]])
    params = SamplingParams(temperature=record.temperature, seed=record.seed)
    one, two = other.turns[turn].ids, record.turns[turn].ids
    found = first_difference(target, prompt, one, two, params, record.seed)
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
        cheaper = target.capabilities.weight_format not in (STOCK, DEFAULT_WEIGHT_FORMAT)
        verdict = OTHER_FORMAT if entry.is_peer and cheaper else DIFFERENT
    gap = found.gap if found.gap != float("inf") else None
    return AnswerDifference(record.prompt, record.repeat, record.method, turn, found.index, gap, verdict)


LARGEST_GAP = 1e-3
"""Largest gap, in logits, that the rounding of differently shaped passes can explain in float32."""
NEAR_TIES = {"int8": 0.05}
"""Weight formats with another one: in int8 rounding moves the second digit of an activation now and then."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two decodings first differ.

    Attributes:
        index: of the first generated token that differs.
        gap: by how much the target prefers one of the two tokens there, in (warped, noisy) logits; infinite when
            one decoding is a beginning of the other.
        tie: largest gap that rounding explains.
    """

    index: int
    gap: float
    tie: float = LARGEST_GAP

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tie


@torch.inference_mode()
def first_difference(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
) -> Difference | None:
    """The first difference between two decodings of one prompt under one seed; None when they are equal."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if shared == len(one) == len(other):
        return None
    if shared in (len(one), len(other)):
        return Difference(shared, float("inf"))
    ids = [*prompt_ids, *one[:shared]]
    row = target.open(ids)
    draws = Draws([params], [seed], [ids])
    logits = draws.process(row.logits[None].float(), torch.empty((1, 0), dtype=torch.int64, device=row.logits.device))
    target.close(row)
    if params.temperature > 0:
        logits = warp(logits, params) + gumbel_noise([seed], [len(ids)], logits.shape[-1], logits.device)
    gap = float((logits[0, one[shared]] - logits[0, other[shared]]).abs())
    return Difference(shared, gap, NEAR_TIES.get(target.capabilities.weight_format, LARGEST_GAP))
