"""A run: contestants over a suite, resumable; and how their answers compare with AR decoding's."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from ..config import SamplingParams
from ..engine.replay import first_difference, shared_length
from ..errors import PromptError
from ..models.base import STOCK, LanguageModel
from ..progress import complain
from ..text.encoding import Prompt, encode
from .contestants import Contestant, Models
from .entries import AR, Entry
from .results import AnswerRecord, RunFolder, Turn, read_summary
from .suites import Item

_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run decodes: an answer of each contestant to each prompt.

    Attributes:
        max_tokens: most tokens of an answer.
        sampling: of all answers, but for their temperature and length.
    """

    items: Sequence[Item]
    entries: Sequence[Entry]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(seed=11))

    @property
    def answers(self) -> int:
        return len(self.items) * len(self.entries)

    def missing(self, done: Collection[tuple[str, str]]) -> list[tuple[Item, Entry]]:
        """Prompt and contestant of the answers that are left, in order; each contestant is first in turn."""
        turns = (
            (item, self.entries[(at + turn) % len(self.entries)])
            for at, item in enumerate(self.items)
            for turn in range(len(self.entries))
        )
        return [(item, entry) for item, entry in turns if (item.id, entry.label) not in done]


def decode(plan: RunPlan, models: Models, folder: RunFolder, notify: Callable[[int], None]) -> None:
    """Decode all that a folder lacks of a plan.

    Each contestant warms up on a few tokens that do not count: memory is allocated, kernels are chosen.

    Args:
        notify: called after each answer with how many are done in all.

    Raises:
        RunError: a line cannot be written.
        ConfigError: the folder has answers with other models behind them.
        PromptError: a prompt does not fit the model.
    """
    missing = plan.missing({r.key for r in folder.records})
    contestants: dict[str, Contestant] = {}
    for entry in {entry.label: entry for _, entry in missing}.values():
        contestants[entry.label] = models.contestant(entry)
        warm = replace(plan.sampling, max_tokens=_WARM_TOKENS, temperature=entry.temperature)
        contestants[entry.label].decode(encode_turns(models.target, ["Hello"]), warm)
    folder.use_models({label: str(contestant.made_of) for label, contestant in contestants.items()})
    for item, entry in missing:
        record = AnswerRecord(
            prompt=item.id,
            category=item.category,
            method=entry.label,
            drafter=entry.drafter,
            temperature=entry.temperature,
            seed=plan.sampling.seed or 0,
            turns=_answered(contestants[entry.label], models.target, item, entry, plan),
        )
        folder.append(record)
        notify(len(folder.records))


def _answered(contestant: Contestant, target: LanguageModel, item: Item, entry: Entry, plan: RunPlan) -> list[Turn]:
    turns: list[Turn] = []
    texts: list[str] = []
    for question in item.turns:
        prompt = encode_turns(target, [*texts, question])
        left = target.capabilities.max_length - len(prompt)
        if left < 1 and turns:
            break  # the conversation has outgrown the model
        most = max(1, min(left, plan.max_tokens))
        params, began = replace(plan.sampling, max_tokens=most, temperature=entry.temperature), time.process_time()
        turn = contestant.decode(prompt, params)
        turns.append(replace(turn, cpu=time.process_time() - began))
        texts += [question, turns[-1].text]
    return turns


def encode_turns(target: LanguageModel, texts: Sequence[str]) -> list[int]:
    """Token ids of a conversation that the user began: through the chat template, or as plain text without one."""
    tokenizer = target.tokenizer
    prompt: Prompt = "\n\n".join(texts)
    if tokenizer is not None and tokenizer.chat_template:
        prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return encode(tokenizer, prompt)


def fitting(target: LanguageModel, items: Sequence[Item]) -> list[Item]:
    """The items whose first turn fits the model; a line says how many do not.

    Raises:
        PromptError: none does.
    """
    limit = target.capabilities.max_length
    fit = [item for item in items if len(encode_turns(target, item.turns[:1])) < limit]
    if not fit:
        raise PromptError(f"no prompt of the suite fits the {limit} tokens of {target.capabilities.name}")
    if left := len(items) - len(fit):
        complain(f"{left} of {len(items)} prompts are left out: {target.capabilities.name} takes {limit} tokens")
    return fit


Key = tuple[str, str]
"""Prompt and method of a record."""
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
        gap: as in ``Difference``; None too where such an answer may differ anyway.
        verdict: one of those above.
    """

    prompt: str
    method: str
    turn: int
    index: int
    gap: float | None
    verdict: str


def compare(
    records: Sequence[AnswerRecord],
    plan: RunPlan,
    known: Sequence[AnswerDifference],
    target: Callable[[], LanguageModel] | None,
) -> tuple[dict[Key, str], list[AnswerDifference]]:
    """Verdicts of all records that have one of AR decoding to compare with, and where answers differ.

    Args:
        plan: that they were decoded by; without a target its contestants count alone.
        known: found earlier; they need no target.
        target: returns the target, called only where a difference is new; without one that is not compared.
    """
    entries = {e.label: e for e in plan.entries}
    ar = {(r.prompt, r.temperature): r for r in records if entries[r.method].method == AR}
    before = {(d.prompt, d.method): d for d in known}
    verdicts: dict[Key, str] = {}
    differences: list[AnswerDifference] = []
    for record in records:
        if (ar_record := ar.get((record.prompt, record.temperature))) is None:
            continue
        turns = enumerate(zip(record.turns, ar_record.turns, strict=False))
        turn, difference = next((i for i, (one, two) in turns if one.ids != two.ids), None), before.get(record.key)
        if turn is not None and difference is None and target is not None:
            difference = _difference(record, ar_record, turn, plan, target)
        if turn is None:
            verdicts[record.key] = EQUAL
        elif difference is None:
            verdicts[record.key] = UNCOMPARED
        else:
            verdicts[record.key] = difference.verdict
            differences.append(difference)
    return verdicts, differences


def read_differences(folder: Path) -> list[AnswerDifference]:
    """Those in the summary of a run; none where there is no summary yet."""
    return TypeAdapter(list[AnswerDifference]).validate_python(read_summary(folder).get("differences", []))


def _difference(
    record: AnswerRecord, ar_record: AnswerRecord, turn: int, plan: RunPlan, load: Callable[[], LanguageModel]
) -> AnswerDifference:
    entry = next(e for e in plan.entries if e.label == record.method)
    ids, ar_ids = record.turns[turn].ids, ar_record.turns[turn].ids
    other = BEAMS if entry.beams else LOSSY if entry.scheme.lossy else None if entry.draws_as_ar else OTHER_DRAW
    if other is not None:  # whatever the target says there
        return AnswerDifference(record.prompt, record.method, turn, shared_length(ids, ar_ids), None, other)
    target = load()
    item = next(i for i in plan.items if i.id == record.prompt)
    before = [text for i in range(turn) for text in (item.turns[i], ar_record.turns[i].text)]
    prompt = encode_turns(target, [*before, item.turns[turn]])
    params = replace(plan.sampling, temperature=record.temperature, seed=record.seed)
    difference = first_difference(target, prompt, ar_ids, ids, params)
    assert difference is not None  # noqa: S101 - the turn is one that differs
    if difference.near_tie:
        verdict = NEAR_TIE
    else:
        cheaper = target.capabilities.weight_format != STOCK
        verdict = OTHER_FORMAT if entry.is_peer and cheaper else DIFFERENT
    return AnswerDifference(record.prompt, record.method, turn, difference.index, difference.gap, verdict)
