"""What people write and see: a prompt, a request as it runs, steps and their figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from ..engine import Engine
from ..errors import PromptError, shortened
from ..progress import err, out
from ..request import Chunk, Outcome, Request, Stats
from ..trace import Observer, Setup
from ..tree import ROOT


def complain(message: str) -> None:
    """Print one line to standard error."""
    err.print(f"draftree: {shortened(' '.join(message.split()))}", style="red", markup=False)


DRAFTED, OWN = "green", "yellow"
LEGEND = Text.assemble(("drafted and accepted", DRAFTED), "  ", ("drawn by the target", OWN))


def token(chunk: Chunk) -> Text:
    """A streamed token in the colour of its origin."""
    return Text(chunk.text, style=DRAFTED if chunk.drafted else OWN)


def figures(stats: Stats, lossy: bool = False) -> str:
    """One line of figures, and a note where the scheme is lossy."""
    s = stats.seconds
    return (
        f"{stats.tokens} tokens in {s.total:.2f} s ({stats.tokens_per_second:.1f} tokens/s) · "
        f"{stats.steps} target passes · MAL {stats.mal:.2f} (bonus included) · "
        f"{sum(stats.drafted)} nodes drafted, {sum(stats.accepted)} accepted · "
        f"prefill {s.prefill:.2f} s, draft {s.draft:.2f} s, verify {s.verify:.2f} s, other {s.other:.2f} s"
        + (" · lossy: the text does not follow the target's distribution" if lossy else "")
    )


def stages(stats: Stats) -> str:
    """A line for each stage of a cascade: tokens proposed, accepted by the next stage, and emitted."""
    own = stats.tokens - sum(level.emitted for level in stats.stages)
    lines = [
        f"stage {level.name}: {level.rounds} rounds, {level.passes} model passes, {level.proposed} tokens proposed, "
        f"{level.accepted} accepted by the next stage, {level.emitted} emitted, {level.seconds:.2f} s"
        for level in stats.stages
    ]
    return "\n".join([*lines, f"stage target: {stats.steps} passes, {own} tokens of its own"])


def as_json(stats: Stats) -> dict[str, object]:
    """The figures for ``--json``; seconds are wall-clock, ``mal`` includes the bonus token."""
    s = stats.seconds
    return {
        "tokens": stats.tokens,
        "steps": stats.steps,
        "mal": stats.mal,
        "drafted": sum(stats.drafted),
        "accepted": sum(stats.accepted),
        "drafted_by_depth": stats.drafted,
        "accepted_by_depth": stats.accepted,
        "draft_passes": stats.draft_passes,
        "seconds": {
            "prefill": s.prefill,
            "draft": s.draft,
            "verify": s.verify,
            "other": s.other,
            "total": s.total,
        },
        "tokens_per_second": stats.tokens_per_second,
        "stages": [asdict(stage) for stage in stats.stages],
    }


class Trees(Observer):
    """Prints every step's draft tree."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def begin(self, setup: Setup) -> None:
        """Learn how tokens are spelt."""
        self._tokenizer = setup.tokenizer

    def stepped(self, outcomes: Sequence[Outcome], learned: float) -> None:
        """Print one tree for each request."""
        for outcome in outcomes:
            self._console.print(tree(outcome, outcome.request.stats.steps, self._text_of))

    def _text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token])) if self._tokenizer else str(token)


def tree(outcome: Outcome, step: int, text_of: Callable[[int], str]) -> Tree:
    """One step's draft tree: each node's token and path probability, the accepted path in colour.

    Args:
        outcome: the step's outcome.
        step: its number.
        text_of: text of a token.
    """
    drafted, path, gained = outcome.tree, set(outcome.path), outcome.tokens[: outcome.taken]
    root = Tree(
        Text.assemble(
            f"step {step}: {len(drafted)} drafted, {len(path)} accepted, gained ",
            *((repr(text_of(t)) + " ", DRAFTED if i < len(path) else OWN) for i, t in enumerate(gained)),
        )
    )
    branches = {ROOT: root}
    probabilities = drafted.path_logprobs.exp().tolist()
    for node, (parent, t) in enumerate(zip(drafted.parents.tolist(), drafted.tokens.tolist(), strict=True)):
        style = DRAFTED if node in path else "dim"
        mark = "✓ " if node in path else ""
        branches[node] = branches[parent].add(
            Text(f"{mark}{text_of(t)!r} {probabilities[node]:.2f}", style=style), guide_style="dim"
        )
    return root


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-".

    Raises:
        PromptError: it is empty or not valid UTF-8.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise PromptError("the prompt is not valid UTF-8: convert it, for example with iconv") from None
    if not text.strip():
        raise PromptError("the prompt is empty: give it at least one character")
    return text


def run(engine: Engine, request: Request, *, silent: bool = False, stream: bool = True) -> bool:
    """Run a request to its end and print its text, as it comes or at the end; true when Ctrl-C ended it."""
    try:
        for chunk in engine.follow(request):
            if stream and not silent:
                _print(chunk)
    except KeyboardInterrupt:
        return True
    finally:
        engine.close(request)
        if not silent:
            out.out("" if stream else request.text, highlight=False)
    return False


def _print(chunk: Chunk) -> None:
    """Coloured in a terminal; byte for byte elsewhere (a console would expand tabs)."""
    if out.is_terminal:
        out.print(token(chunk), end="")
    else:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
