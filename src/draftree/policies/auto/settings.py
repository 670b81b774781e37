"""Every constant of ``auto``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """Seconds are counted in passes of AR decoding, so that no constant depends on the machine.

    Attributes:
        bins: upper bounds of the bins of draft probability in which acceptance is counted.
        pseudo_count: observations that a prior stands for: trials of a bin, passes, tokens.
        slow_decay: share of a count that each further observation leaves, of what holds for all texts.
        fast_decay: the same of what holds for the text and the load at hand.
        max_shift: largest correction of a drafter's log-odds.
        context_step: costs are looked up for contexts rounded to so many tokens.
        most_nodes: a pass over several requests verifies no more in all, so that looking for how many stays quick.
        layer_nodes: mean nodes of a drafted layer, whose seconds a draft model's profile gives.
        max_drift: a pass that took so many times as long beside its profile as others, or longer, counts as so many.
        min_probability: candidates that are less likely to be accepted are not drafted.
        learning_share: part of the time of AR decoding that may be lost to learning what a drafter gains.
        first_balance: AR passes that new drafters may lose together before they are disabled.
        max_balance: the same of a drafter that has gained.
    """

    bins: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
    pseudo_count: float = 6.0
    slow_decay: float = 0.998
    fast_decay: float = 0.95
    max_shift: float = 4.0
    context_step: int = 64
    most_nodes: int = 512
    layer_nodes: float = 1.5
    max_drift: float = 4.0
    min_probability: float = 0.01
    learning_share: float = 0.02
    first_balance: float = 0.2
    max_balance: float = 16.0


DEFAULTS = AutoSettings()
