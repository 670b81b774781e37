"""The card of a trained head: what it is for, what it learned from and how, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .head_eval import DEPTH, RANKS, STRIDE, Figures


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts.

    Attributes:
        name: without its folder.
        count: prompts in it.
        digest: SHA-256 of its bytes.
        licence: as the user states it, or None.
    """

    name: str
    count: int
    digest: str
    licence: str | None = None


def card(
    *,
    target: str,
    sources: Sequence[PromptFile],
    recipe: Mapping[str, object],
    greedy: Figures | None,
    sampled: Figures | None,
) -> str:
    """Markdown.

    Args:
        target: name of the target.
        sources: files of the prompts.
        recipe: what the head was trained with, in words and numbers.
        greedy, sampled: figures of the responses kept apart, where there are any.
    """
    lines = [
        f"# Draft head for {target}",
        "",
        f'Drafts for `{target}` alone: `draftree generate "..." --target {target} --drafter FOLDER`.',
        "One decoder layer in the line of EAGLE (Li et al., ICML 2024) that reads the target's hidden states;",
        "embeddings and output layer are the target's own and are not in the files.",
        "",
        "## Data",
        "",
        "It learned from the target's own responses to the prompts of:",
        "",
        "| file | prompts | licence | SHA-256 |",
        "|---|---|---|---|",
        *(f"| {s.name} | {s.count} | {s.licence or 'not stated'} | `{s.digest[:16]}` |" for s in sources),
        "",
        "The prompts themselves are not in the head. Their licences and the target's are those of what it was made",
        "from: mind them when you pass it on.",
        "",
        "## Recipe",
        "",
        *(f"- {name}: {value}" for name, value in recipe.items()),
        "",
        "## Figures",
        "",
        "On responses to prompts kept apart, drafted along with what the target said; acceptance lengths count the",
        f"bonus token. Acceptance: every {STRIDE} tokens, share of drafts whose true token is among the most probable",
        "1, 2 and 4, given that the tokens above it were true.",
    ]
    for name, figures in (("Greedy responses", greedy), ("Sampled responses", sampled)):
        if figures is not None and figures.tokens:
            lines += ["", f"{name} ({figures.responses} responses, {figures.tokens} tokens):", "", *_table(figures)]
    return "\n".join(lines) + "\n"


def _table(figures: Figures) -> list[str]:
    return [
        "| depth | " + " | ".join(f"top {k}" for k in RANKS) + " | drafts |",
        "|---|" + "---|" * len(RANKS) + "---|",
        *(
            f"| {d + 1} | " + " | ".join(f"{a:.3f}" for a in figures.acceptance[d]) + f" | {figures.trials[d]} |"
            for d in range(DEPTH)
        ),
        "",
        "| tree | acceptance length |",
        "|---|---|",
        *(f"| {name} | {mal:.2f} |" for name, mal in figures.mal.items()),
    ]
