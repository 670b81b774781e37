"""The lines of ``results.jsonl``: what one contestant did with one prompt. Knows no files and no engine.

A line's keys are the attributes below (``docs/bench.md``). Seconds are wall-clock; acceptance lengths count the bonus
token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

BINS = 20
"""Of draft probabilities, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one turn; None where a peer does not tell.

    Attributes:
        total: from the prompt's token ids to the answer's.
        prefill: until the first token is there; with transformers' assisted decoding its first draft is in it.
        draft: proposing trees.
        verify: the target's passes, the draws and their transfer to the host.
        other: the rest of the total.
    """

    total: float
    prefill: float | None = None
    draft: float | None = None
    verify: float | None = None
    other: float | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """What each step of a turn did: columns of one length, and sums over them.

    Attributes:
        gained: tokens taken.
        accepted: nodes on the accepted path.
        nodes: nodes verified.
        depth: depth of the tree.
        expected: E(A) of the tree, root counted as 1.
        drafted_by_depth, accepted_by_depth: [d] nodes at depth d + 1 that were drafted, and accepted.
        accepted_entropies, rejected_entropies: nats, as in ``Stats``.
        judged, passed: [BINS] nodes whose parent was accepted, by their draft probability, and those accepted of them.
        draft_passes: passes of a drafting model.
        target_seconds, drafter_seconds: inside the passes of the target and of drafting models and heads.
    """

    gained: list[int]
    accepted: list[int]
    nodes: list[int]
    depth: list[int]
    expected: list[float]
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    accepted_entropies: list[float]
    rejected_entropies: list[float]
    judged: list[int]
    passed: list[int]
    draft_passes: int
    target_seconds: float
    drafter_seconds: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    Attributes:
        prompt_tokens: tokens before it.
        ids: its tokens, end-of-request included.
        text: its text.
        finish: why it ended; None where a peer does not tell.
        seconds: what it took.
        passes: target passes after the prefill; a peer that drafts before its prefill has that pass in it; None: not
            known.
        steps: None for peers.
        drafted: for each token whether it was drafted and accepted; None for peers.
        pieces: the text that became final with each token; None for peers.
        entropy: mean entropy (nats) of the target's law at the answer's tokens, where it was asked for.
        first: tokens that were there when the prefill ended: more than one where the first draft is in it.
        layers: of beams, which the passes gave; None: they gave the answer's tokens.
        drafted_layers: of beams, which were drafted in all steps together; None: no beams, or not recorded.
    """

    prompt_tokens: int
    ids: list[int]
    text: str
    finish: str | None
    seconds: Parts
    passes: int | None
    steps: Steps | None = None
    drafted: list[int] | None = None
    pieces: list[str] | None = None
    entropy: float | None = None
    first: int = 1
    layers: int | None = None
    drafted_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One line: one contestant, one prompt, one repeat.

    Attributes:
        prompt, category: the item's id and category.
        method: the contestant's label (``Entry.label``).
        drafter, temperature: its own.
        repeat: from 0.
        seed: of sampling.
        turns: the answers, in order.
        peak_memory: most bytes in use while it decoded: of the accelerator, or resident bytes of the whole process, the
            models of all contestants included; None where the system does not tell.
        joules: energy that the accelerator, or the processor packages, took while it decoded; None: no meter.
        score: what the answer is worth (``bench.quality``), by name of the measure; None: not scored.
    """

    prompt: str
    category: str
    method: str
    drafter: str | None
    temperature: float
    repeat: int
    seed: int
    turns: list[Turn]
    peak_memory: int | None = None
    joules: float | None = None
    score: dict[str, float] | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """No other record of a run has it."""
        return self.prompt, self.repeat, self.method

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(t.ids) for t in self.turns)

    @property
    def seconds(self) -> float:
        """All of the time."""
        return sum(t.seconds.total for t in self.turns)

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the prefill; None where it is not told apart, or nothing came after it."""
        prefills = [t.seconds.prefill for t in self.turns]
        if any(p is None for p in prefills):
            return None
        seconds = self.seconds - sum(p for p in prefills if p is not None)
        tokens = self.tokens - sum(t.first for t in self.turns)
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def passes(self) -> int | None:
        """Target passes after the prefills."""
        counts = [t.passes for t in self.turns]
        return None if None in counts else sum(c for c in counts if c is not None)

    @property
    def gained(self) -> int:
        """Tokens, or layers of beams, that these passes gave: our prefill gives one more."""
        return sum((t.layers or len(t.ids)) - (t.seconds.draft is not None) for t in self.turns)

    @property
    def drafted_layers(self) -> int:
        """Layers of beams that were drafted, as far as it is recorded."""
        return sum(t.drafted_layers or 0 for t in self.turns)

    @property
    def ids(self) -> list[list[int]]:
        """Of every turn."""
        return [t.ids for t in self.turns]


def encode(record: Record) -> bytes:
    """A line of the file; floats with 6 significant digits, but the temperature as it is: it is part of a name."""
    line = {**_short(asdict(record)), "temperature": record.temperature}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def decode(line: Mapping[str, Any]) -> Record:
    """The record of a parsed line; keys that it does not know are left out.

    Raises:
        ValueError: it is not one.
    """
    try:
        turns = [_turn(turn) for turn in line["turns"]]
        record: Record = _known(Record, {**line, "turns": turns})
        if not turns or not all(t.ids and t.seconds.total > 0 for t in turns):
            raise ValueError("no turns, or one without tokens or time")
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    return record


def _turn(values: Mapping[str, Any]) -> Turn:
    steps = values.get("steps")
    read = {"seconds": _known(Parts, values["seconds"]), "steps": None if steps is None else _known(Steps, steps)}
    turn: Turn = _known(Turn, {**values, **read})
    return turn


def _known(kind: type[Any], values: Mapping[str, Any]) -> Any:
    names = {f.name for f in fields(kind)}
    return kind(**{key: value for key, value in values.items() if key in names})


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_short(x) for x in value]
    return value
