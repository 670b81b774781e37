"""Errors about a caller's input or a failed run. Each message names the offending value and a way out.

DraftreeError
├── InputError               the caller's input is wrong; found before any work is lost (exit code 2)
│   ├── ConfigError          a setting is out of range or two settings exclude each other
│   │   ├── MissingPackageError  a package is missing that an extra of draftree installs
│   │   └── FieldError       one field of a request, which has its name
│   │       └── PromptError  the prompt is empty or no text
│   │           ├── ChatTemplateError  no chat template takes the conversation
│   │           └── ContextError  it does not fit the context, or the tokens to generate behind it do not
│   ├── UnknownNameError     no such method, drafter, model or file
│   ├── ModelFileError       a model file or folder cannot be read
│   ├── VocabularyError      drafter and target share neither token ids nor text
│   └── UnsupportedModelError  the model cannot be run, or does not do what it is wanted for
│       ├── NotNativeError     the native engine does not run it; another backend may
│       └── NoTreesError       its rows cannot branch: it decodes without drafts
└── RunError                 something failed while running (exit code 1)
    ├── CacheError           a KV cache was used against its contract
    │   └── CacheFullError   it has no room for more tokens or rows
    └── QueueFullError       as many requests wait as may: come back later
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from .installation import install_command

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST_WORD, _LONGEST_MESSAGE = 300, 1200
"""Characters of an echoed path or name, and of a message, that a terminal shows without burying the way out."""


class DraftreeError(Exception):
    """Base of all errors that draftree raises on purpose; long values in the message are ``shortened``."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class InputError(DraftreeError, ValueError):
    """The caller's input is wrong."""


class ConfigError(InputError):
    """A setting is out of range, or two settings exclude each other."""


class FieldError(ConfigError):
    """A field of a request has a value that does not do.

    Attributes:
        field: its name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def rename(self, field: str) -> None:
        """Name the field as whoever sent the request does; so does a message that begins with it."""
        if (message := str(self)).startswith(self.field):
            self.args = (field + message[len(self.field) :],)
        self.field = field


class PromptError(FieldError):
    """The prompt is empty or no text."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(field, message)


class ChatTemplateError(PromptError):
    """The model has no chat template, or one that does not take the conversation."""


class ContextError(PromptError):
    """The prompt does not fit the model's context, or the tokens to generate behind it do not (``max_tokens``)."""


class MissingPackageError(ConfigError):
    """A package is missing that an extra of draftree installs."""


class UnknownNameError(InputError):
    """No such method, drafter, model or file."""


class ModelFileError(InputError):
    """A model file or folder cannot be read."""


class VocabularyError(InputError):
    """Drafter and target have other token ids, and one of them has no tokenizer to translate by."""


class UnsupportedModelError(InputError):
    """The model cannot be run, or does not do what it is wanted for, such as verifying draft trees."""


class NotNativeError(UnsupportedModelError):
    """The native engine does not run the model; another backend may.

    Attributes:
        reason: why, in a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}: use backend llama.cpp ({install_command('draftree[llama]')}) or transformers "
            f"({install_command('draftree[torch]')})"
        )
        self.reason = reason


class NoTreesError(UnsupportedModelError):
    """The model's rows cannot branch: it decodes without drafts.

    Attributes:
        reason: why, in a sentence.
    """

    def __init__(self, name: str, what: str, reason: str, advice: str = "") -> None:
        super().__init__(f"{name} cannot {what}: {reason}{': ' * bool(advice)}{advice}")
        self.reason = reason


class RunError(DraftreeError, RuntimeError):
    """Something failed while running."""


class CacheError(RunError):
    """A KV cache was used against its contract."""


class CacheFullError(CacheError):
    """A KV cache has no room for more tokens or rows."""


class QueueFullError(RunError):
    """As many requests wait as may.

    Attributes:
        retry_after: seconds after which to come back.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait, as many as may: come back in {retry_after:.0f} s")
        self.retry_after = retry_after


class DraftreeWarning(UserWarning):
    """Something went on in another way than asked for; the message says how and why."""


def unknown_name(what: str, name: str, names: Iterable[str]) -> UnknownNameError:
    """The error of a name that is none of ``names``, with the nearest of them and all."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return UnknownNameError(f"no {what} {name!r}: {hint}choose from {', '.join(names)}")


def shortened(message: str) -> str:
    """A message whose long words, and then whose middle, are replaced by an ellipsis: its two ends say what to do."""
    message = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: _ends(word[0], _LONGEST_WORD), message)
    return _ends(message, _LONGEST_MESSAGE)


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


_NAMED = 3
"""Names that a message lists."""


def listed(names: Iterable[str], what: str) -> str:
    """How many there are of something, and the first ones by name: "4 weights (a, b, c, ...)"."""
    every = sorted(names)
    more = ", ..." if len(every) > _NAMED else ""
    return f"{len(every)} {what}{'s' * (len(every) > 1)} ({', '.join(every[:_NAMED])}{more})"


def first_line(error: BaseException) -> str:
    """The first line of an error, and what it announces with a colon, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:shown]).rstrip(".: ") or type(error).__name__


def call_named(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call what users plug in; draftree's own exceptions and want of memory pass.

    Raises:
        RunError: it raised another exception; the message has ``name``.
    """
    try:
        return function(*args, **kwargs)
    except (DraftreeError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise RunError(f"{name} raised {type(error).__name__}: {first_line(error)}") from error


def check_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    """Raise ConfigError unless these are tokens of a vocabulary."""
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(f"{name} gave token {token}: the target has 0 to {vocab - 1}")


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """A context for imports of packages that an extra of draftree installs.

    Args:
        what: what needs them, as the message names it.

    Raises:
        MissingPackageError: one is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == __package__:
            raise
        raise MissingPackageError(f"{what} needs {package}: {install_command(f'draftree[{extra}]')}") from None
