"""What people write and see: a prompt, a request as it runs, steps and their figures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from ..artifacts import read_text, reason, user_path
from ..engine.engine import Handle
from ..engine.speculation import Observer, Speculation
from ..engine.trace import plain
from ..errors import PromptError
from ..models.base import LanguageModel
from ..progress import out, write
from ..request import Chunk, Outcome, Stats
from ..text.encoding import THINK_TAGS
from ..tree import ROOT

if TYPE_CHECKING:
    from ..openai.tools import Parsed, Parser

DRAFTED, OWN = "green", "yellow"
LEGEND = Text.assemble(("drafted and accepted", DRAFTED), "  ", ("drawn by the target", OWN))


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


def as_json(stats: Stats) -> dict[str, object]:
    """The figures for ``--json``: those of a trace (docs/traces.md), and two that follow from them."""
    return {**plain(stats), "mal": stats.mal, "tokens_per_second": stats.tokens_per_second}


class Trees(Observer):
    """Prints every step's draft tree: each node's token and path probability, the accepted path in colour."""

    def built(self, target: LanguageModel, speculation: Speculation) -> None:
        """Learn how tokens are spelt."""
        self._tokenizer = target.tokenizer

    def stepped(self, outcomes: Sequence[Outcome]) -> None:
        """Print one tree for each request."""
        for outcome in outcomes:
            out.print(self._tree(outcome))

    def _tree(self, outcome: Outcome) -> Tree:
        drafted, path, gained = outcome.tree, set(outcome.path), outcome.tokens[: outcome.taken]
        root = Tree(
            Text.assemble(
                f"step {outcome.request.stats.steps}: {len(drafted)} drafted, {len(path)} accepted, gained ",
                *((self._text_of(t) + " ", DRAFTED if i < len(path) else OWN) for i, t in enumerate(gained)),
            )
        )
        branches = {ROOT: root}
        columns = drafted.parents, drafted.tokens, map(math.exp, drafted.path_logprobs)
        for node, (parent, t, probability) in enumerate(zip(*columns, strict=True)):
            mark, style = ("✓ ", DRAFTED) if node in path else ("", "dim")
            text = Text(f"{mark}{self._text_of(t)} {probability:.2f}", style=style)
            branches[node] = branches[parent].add(text, guide_style="dim")
        return root

    def _text_of(self, token: int) -> str:
        return repr(str(self._tokenizer.decode([token])) if self._tokenizer else str(token))


_MOST_READ = 1 << 24
"""Characters of a prompt on standard input."""


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-".

    Raises:
        PromptError: it is empty, endless or not valid UTF-8.
    """
    try:
        text = sys.stdin.read(_MOST_READ + 1) if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise PromptError("the prompt is not valid UTF-8: convert it, for example with iconv") from None
    if len(text) > _MOST_READ:
        raise PromptError(f"the prompt has more than {_MOST_READ} characters: shorten it")
    if not text.strip():
        raise PromptError("the prompt is empty: give it at least one character")
    return text


def read_file(name: str, flag: str) -> str:
    """The text of a file that an option names.

    Raises:
        PromptError: it cannot be read, is not valid UTF-8, or empty.
    """
    try:
        text = read_text(user_path(name))
    except (OSError, UnicodeError) as error:
        raise PromptError(f"{flag} {name} cannot be read: {reason(error)}: give a text file in UTF-8") from None
    if not text.strip():
        raise PromptError(f"{flag} {name} is empty: give it at least one character")
    return text


def read_json(name: str, flag: str) -> Any:
    """The value of a JSON file that an option names.

    Raises:
        PromptError: it cannot be read (``read_file``), or is no JSON.
    """
    text = read_file(name, flag)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{flag} {name} is no JSON: {error}") from None


_APART = "\n\n"
"""Between what is said and thoughts."""


class ShownAnswer:
    """An answer as people see it: its text as it is, or its thoughts between tags and what is said.

    Attributes:
        text: all that is seen of it so far.
        said: of it, what is no thought.

    Args:
        parser: of the answer; None: it is text alone.
    """

    def __init__(self, parser: Parser | None) -> None:
        self.text, self.said = "", ""
        self._parser, self._thought = parser, False

    def push(self, chunk: Chunk) -> str:
        """What more is seen of it."""
        return self._seen(chunk.text) if self._parser is None else self._parsed(self._parser.push(chunk))

    def end(self, rest: str) -> str:
        """What is seen at its end.

        Args:
            rest: ``Request.rest``.
        """
        return self._seen(rest) if self._parser is None else self._parsed(self._parser.end(rest))

    def _parsed(self, parts: Sequence[Parsed]) -> str:
        return "".join([self._seen(part.text, part.thought) for part in parts])

    def _seen(self, text: str, thought: bool = False) -> str:
        tag = ""
        if thought != self._thought:
            opens, closes = THINK_TAGS
            tag = f"{_APART if self.text else ''}{opens}\n" if thought else f"\n{closes}{_APART}"
            text, self._thought = text.lstrip(), thought
        self.text += tag + text
        self.said += "" if thought else text
        return tag + text


def run(handle: Handle, parser: Parser | None = None, *, silent: bool = False, stream: bool = True) -> ShownAnswer:
    """Run a request to its end and print its text, as it comes or at the end.

    Args:
        parser: of the answer; None: it is text alone.
    """
    answer, held = ShownAnswer(parser), ""  # held: of an end of line, of which more may come
    try:
        for chunk in handle:
            seen = answer.push(chunk)
            if stream and not silent:
                text = held + seen
                held = "\r" if text.endswith("\r") else ""
                write(text.removesuffix("\r"), DRAFTED if chunk.drafted else OWN)
    finally:
        rest = answer.end(handle.request.rest)
        if not silent:
            write(f"{held}{rest}\n" if stream else f"{answer.text}\n")
    return answer
