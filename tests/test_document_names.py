"""Names in documents and docstrings are there: calls, options, fields and specifications, by the code that reads them.

Documents kept names whose code was gone: a sampling parameter that nothing had, a method of the stepper, a drafter of
beams, and what a renaming of all "sequences" had made of the end-of-sequence token.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from pydantic import BaseModel
from typer.main import get_command

from draftree import errors
from draftree.bench.entries import BEAMS, PEER, entries
from draftree.cli.main import app
from draftree.drafters.spec import DrafterSpec
from draftree.errors import InputError
from draftree.openai import bad_bodies, chat_api, responses_api, schema
from draftree.policies.methods import METHODS
from draftree.sampling import json_schemas

from .public_names import PublicNames

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = [path for path in DOCUMENTS if path.name not in ("server.md", "traces.md")]
"""These write Python; the others write JSON, and ``test_trace.py`` compares traces with their keys."""
GUIDES = ["bench.md", "choosing.md", "extend.md", "python.md", "quickstart.md", "server.md", "traces.md"]
SOURCES = [path for top in ("src", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))]

OF_OTHERS = {
    *("generate(num_beams=W)", "generate(num_beams=width, do_sample=False)", "num_beams=1"),  # of transformers
    "a(d, r)",  # mathematics
}
"""Expressions that are not ours."""
OPTIONS_OF_OTHERS = {
    *("--no-deps", "--find-links", "--python", "--apply_chat_template"),  # pip, uv, lm-eval
    *("--model", "--model_args", "--tasks"),  # lm-eval
    *("--porcelain", "--nproc-per-node"),  # git, torchrun
}
WORDS_OF_OTHERS = {
    *("LogitsProcessor", "guidance_scale", "return_dict_in_generate"),  # transformers
    *("streamer", "watermarking_config", "langchain"),  # transformers and clients
    *("additionalProperties", "anyOf", "oneOf", "allOf", "uniqueItems", "properties", "if", "not"),  # JSON Schema
    *("least_conn", "upstream", "proxy_next_upstream", "ai", "Dockerfile", "bwrap", "lib", "lib64", "ATTACH", "PRAGMA"),
    "enable_thinking",  # of chat templates
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "FILE", "RUN", "__cause__", "atexit"),
}
_TYPES = Path(openai.__file__).with_name("types").rglob("*.py")
_NAMED = re.compile(r'(?<=")\w+(?=")|(?<=^    )\w+(?=: )', re.MULTILINE)
WORDS_OF_OPENAI = {word for path in _TYPES for word in _NAMED.findall(path.read_text())}
_FILE = r"\.(?:py|md|jsonl?|txt|h|c)$"
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def spans(text: str) -> list[str]:
    """What stands in backticks in a document, blocks of code left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def public() -> PublicNames:
    return PublicNames()


# Python: calls, attributes, arguments.


def wrong_python(text: str) -> list[str]:
    """What expressions in backticks of a document name that is not there."""
    return [fault for span in spans(text) for fault in _python_faults(span)]


def _python_faults(span: str) -> list[str]:
    """None of files, environment variables and other projects' expressions."""
    return [] if span in OF_OTHERS or re.search(rf"{_FILE}|^[A-Z_]+=", span) else public().faults(span)


@pytest.mark.parametrize("document", PYTHON, ids=lambda path: path.name)
def test_expressions_of_documents_fit_signatures(document: Path) -> None:
    assert wrong_python(document.read_text()) == []


def _docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


def test_expressions_of_public_docstrings_fit_signatures() -> None:
    faults, found = list[str](), 0
    for name, kind in public().classes.items():
        own = [each for each in vars(kind).values() if inspect.isroutine(each) or isinstance(each, property)]
        for text in (each.__doc__ for each in (kind, *own)):
            written = re.findall(r"``([^`]+)``", str(text))
            found += len(written)
            faults += [f"{name}: {fault}" for span in written for fault in _python_faults(span)]
    assert faults == []
    assert found > 50


@pytest.mark.parametrize(
    "made_up",
    [
        "`draftree.no_such_name`",
        "`engine.stepper.no_such_name`",
        "`no_such_name()`",
        "`no_such_name=1`",
        "`SamplingParams(no_such_name=1)`",
        "`load_engine(target, no_such_name=1)`",
        "`engine.submit(..., no_such_name=1)`",
        "`draftree.Engine()`",
        "`frontier.likeliest(counts, extend, depth)`",
        "`chunk.logprobs.no_such_name`",
        "`draftree.Engine(draftree.load('x'), draftree.Speculation(no_such_name))`, `Trace(x).no_such_name`",
    ],
)
def test_a_made_up_name_is_found(made_up: str) -> None:
    assert wrong_python(f"Text with {made_up} in it.")


# Words: what a single name in backticks may be.


@cache
def code_words() -> tuple[frozenset[str], frozenset[str]]:
    """Whole texts in the code, such as keys of answers and values, and its names; docstrings do not count."""
    texts, names = set[str](), set[str]()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant(str(text)) if id(node) not in alone:
                    texts.add(text)
                case ast.FunctionDef(name) | ast.ClassDef(name) | ast.arg(name) | ast.Name(name) | ast.alias(name):
                    names.add(name)
                case ast.keyword(str(name)) | ast.Attribute(_, name):
                    names.add(name)
    return frozenset(texts), frozenset(names)


def wrong_words(name: str, text: str) -> list[str]:
    """Single names, and those of paths such as ``messages[0].role`` and keys of JSON, that are not known.

    In the guides to Python these are public names and values, in the others all names of the code.
    """
    texts, names = code_words()
    known = texts | public().words | set(vars(errors)) | WORDS_OF_OTHERS | EXTRAS | set(dir(builtins))
    if name not in ("extend.md", "python.md"):
        known |= names | WORDS_OF_OPENAI | {*bad_bodies._REFUSED, *json_schemas._UNENFORCED}
    words = list[str]()
    for span in spans(text):
        if re.fullmatch(r"[A-Za-z_]\w*(?:\.[a-z_]\w*|\[\d*\])*", span) and not re.search(_FILE, span):
            words += [span] if span in known else re.findall(r"[A-Za-z_]\w*", span)
        words += re.findall(r'"(\w+)"\s*:', span) + re.findall(r"^(\w+): ", span)
    return [word for word in words if word not in known]


@pytest.mark.parametrize("name", GUIDES)
def test_words_of_guides_are_in_the_code(name: str) -> None:
    assert wrong_words(name, (ROOT / "docs" / name).read_text()) == []


@pytest.mark.parametrize("name", GUIDES)
def test_a_made_up_word_is_found(name: str) -> None:
    made_up = '`no_such_name`, `prompt[0].no_such_name`, `{"no_such_name": 1}`, `no_such_name: true`, `seed`'
    wrong = wrong_words(name, made_up)
    assert wrong.count("no_such_name") == 4 and "seed" not in wrong


# Fields of requests.


def _fields(model: Any) -> set[str]:
    """Names of a body's fields as clients write them, those of its parts included."""
    found = set[str]()
    for name, field in model.model_fields.items():
        found.add(field.alias or name)
        kinds = [field.annotation]
        while kinds:
            kind = kinds.pop()
            kinds += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _fields(kind)
    return found


def wrong_fields(text: str) -> list[str]:
    """What the paragraphs on parameters name that no body has as a field, and no refused field is called."""
    begin = text.index("\n### Parameters\n")
    paragraphs = text[begin : text.index("\n### Chat templates\n", begin)]
    bodies = (chat_api.ChatRequest, schema.CompletionRequest, responses_api.ResponsesRequest)
    known = (
        set().union(*map(_fields, bodies))
        | {*bad_bodies._REFUSED, *json_schemas._UNENFORCED}
        | {"code", "param", "bytes", "grammar", "finish_reason"}
    )
    fields = [span for span in spans(paragraphs) if re.fullmatch(r"[a-z_]+", span)]
    codes = re.findall(r"`(\w+)`", re.search(r"OpenAI's `code` \(([^)]*)\)", paragraphs)[1])  # type: ignore[index]
    return [field for field in fields if field not in known and field not in codes]


def test_fields_of_the_server_page_are_fields_of_bodies() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    assert wrong_fields(page) == []
    assert wrong_fields(page.replace("`top_k`", "`no_such_field`")) == ["no_such_field"]


# Options of commands.


def _options(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return own.union(*(_options(command.commands[name]) for name in getattr(command, "commands", ())))


@cache
def options() -> frozenset[str]:
    """Of all commands, and of the benchmarks."""
    arguments = (re.findall(r'"(--[a-z][a-z-]*)"', path.read_text()) for path in (ROOT / "benchmarks").rglob("*.py"))
    return frozenset(_options(get_command(app)) | OPTIONS_OF_OTHERS | {name for each in arguments for name in each})


def wrong_options(texts: list[str]) -> list[str]:
    """Options that no command has; of ``draftree COMMAND --option`` those that this command has not."""
    faults, commands = list[str](), get_command(app).commands  # type: ignore[attr-defined]
    for text in texts:
        named = re.match(r"(?:draftree )?([a-z]+) ", text)
        known = _options(commands[named[1]]) if named and named[1] in commands else options()
        faults += [name for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text) if name not in known]
    return faults


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_of_documents_are_there(document: Path) -> None:
    assert wrong_options(spans(document.read_text())) == []


def test_options_that_texts_of_the_package_name_are_there() -> None:
    """Errors, help and docstrings."""
    for path in SOURCES:
        if path.is_relative_to(ROOT / "src"):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            found = [text for text in constants if isinstance(text, str) and not text.startswith("draftree")]
            assert (path, wrong_options(found)) == (path, [])


def test_a_made_up_option_is_found() -> None:
    made_up = ["--no-such-option", "draftree generate --suite x", "bench --suite x", "generate --explain"]
    assert wrong_options(made_up) == ["--no-such-option", "--suite"]


# Methods and drafters with settings.

_NAMES = "|".join([BEAMS, PEER + r"[\w.-]+", *sorted(METHODS, key=len, reverse=True)])
_METHOD = re.compile(rf"(?<![\w:@>=-])(?:{_NAMES})(?::[a-z]+=[^\s:,`'\"|@]+(?::[A-Z]\w*)?)+")
_CASCADE = re.compile(r"(?<=['`,])[\w.:=+-]+>[\w.:=+-]+(?=['`,])")


def wrong_specifications(text: str) -> list[str]:
    """Methods, contestants and drafters whose parser refuses them."""
    faults = list[str]()
    checks: list[tuple[re.Pattern[str], Callable[[str], object]]] = [
        (_METHOD, _read_method),
        (_CASCADE, DrafterSpec.parse),
    ]
    for pattern, read in checks:
        for found in pattern.findall(text):
            try:
                read(found.rstrip(".;)"))
            except InputError as error:
                faults.append(f"{found}: {error}")
    return faults


def _read_method(text: str) -> None:
    """As ``draftree bench`` reads it, but for files and modules: they are the reader's."""
    text = re.sub(r":(classifier|tree)=[^:]*\.json|:verify=\w+:[A-Z]\w*", "", text)
    if text != "sequoia" and not text.startswith("sequoia:"):
        entries([text], ["x.gguf"], [0.0 if text.startswith(PEER) else 1.0])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_specifications_of_documents_are_read(document: Path) -> None:
    assert wrong_specifications(document.read_text()) == []


def test_specifications_of_docstrings_are_read() -> None:
    """``beams:drafter=head`` stood where contestants are described, after heads had ceased to draft beams."""
    faults = [fault for path in SOURCES for _, text in _docstrings(path) for fault in wrong_specifications(text)]
    assert faults == []


def test_a_made_up_specification_is_found() -> None:
    made_up = (
        "`opt-tree:no_such=1`? `opt-tree:nosuch=1`, `beams:width=4:drafter=head`, `'a>b:nosuch=1'`, `chain:depth=2`"
    )
    assert len(wrong_specifications(made_up)) == 3


# Docstrings: sections.


def test_sections_of_docstrings_name_what_is_there() -> None:
    classes = {node.name: node for path in SOURCES for node, _ in _docstrings(path) if isinstance(node, ast.ClassDef)}
    faults = list[str]()
    for path in SOURCES:
        for node, text in _docstrings(path):
            if isinstance(node, ast.ClassDef):
                made = [each for each in node.body if getattr(each, "name", "") in ("__init__", "__new__")]
                arguments = set().union(*map(_arguments, made)) if made else _attributes(node, classes)
                wrong = _section(text, "Attributes") - _attributes(node, classes) | _section(text, "Args") - arguments
            else:
                wrong = _section(text, "Args") - _arguments(node)
            faults += [f"{path.name}: {getattr(node, 'name', '')}: {name}" for name in sorted(wrong)]
    assert faults == []


def test_a_made_up_argument_of_a_section_is_found() -> None:
    text = '"""Do.\n\nArgs:\n    x, no_such_name: one.\n        more: of it.\n    y: two.\n\nRaises:\n    z: none.\n"""'
    (node,) = ast.parse(f"def f(x, *, y):\n    {text}").body
    assert _section(ast.literal_eval(text), "Args") - _arguments(node) == {"no_such_name"}


def _section(text: str, title: str) -> set[str]:
    found = re.search(rf"^{title}:\n((?: {{4}}.*\n?|\n)+)", text, re.MULTILINE)
    names = re.findall(r"^    ([A-Za-z_*][\w*, ]*):", found[1] if found else "", re.MULTILINE)
    return {name.strip().lstrip("*") for group in names for name in group.split(",")}


def _arguments(node: ast.AST) -> set[str]:
    return {each.arg for each in ast.walk(getattr(node, "args", node)) if isinstance(each, ast.arg)}


def _attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Of a class and its bases: fields, methods, and what its methods set."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    found |= {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
    return found.union(*(_attributes(classes[base], classes) for base in bases if base in classes))


# Words of the field.


@pytest.mark.parametrize("path", [*DOCUMENTS, *SOURCES], ids=lambda path: path.name)
def test_the_end_of_a_sequence_has_its_name(path: Path) -> None:
    """A renaming of all sequences to requests had renamed the end-of-sequence token as well."""
    assert re.findall(r"(?i)\b(?:end|begin\w*|start)[ -]of[ -]request\b", path.read_text()) == []
