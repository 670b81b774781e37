"""The C engine's files: short, in no circle of calls, and no name of a type for two things."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

NATIVE = Path(__file__).parents[3] / "native"
FILES = {path.relative_to(NATIVE).as_posix(): path.read_text() for path in sorted(NATIVE.rglob("*.[ch]"))}
_SOURCE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)
_DEFINITION = re.compile(r"^(?!typedef|#)([^\n;={}()]*?)\b(\w+)\([^;{}]*\) \{(.*?)\n\}$", re.MULTILINE | re.DOTALL)
_ONE_LINE = re.compile(r"^(\w.*\) \{)(.*)\}$", re.MULTILINE)
_CALL = re.compile(r"(?<![\w.>])(\w+)\(")
_TYPES = (
    re.compile(r"^(?:struct|union|enum) (\w+) \{", re.MULTILINE),
    re.compile(r"^typedef (?:struct|union|enum)\s*\w* \{.*?^\} (\w+);", re.MULTILINE | re.DOTALL),
    re.compile(r"^typedef (?:struct|union|enum) \{[^\n]*\} (\w+);", re.MULTILINE),
)


def definitions(text: str) -> dict[str, tuple[bool, str]]:
    """Function -> whether only its file sees it, and its body; comments and strings are left out."""
    source = _ONE_LINE.sub(r"\1\2\n}", _SOURCE.sub("", text))
    inner = {"static", "ALWAYS_INLINE"}
    return {name: (bool(inner & set(head.split())), body) for head, name, body in _DEFINITION.findall(source)}


def calls(files: dict[str, str]) -> dict[str, set[str]]:
    """File -> the files whose functions it calls: its own static ones hide those of the same name elsewhere."""
    functions = {file: definitions(text) for file, text in files.items()}
    seen = {
        name: file
        for file, named in functions.items()
        for name, (static, _) in named.items()
        if not static or file.endswith(".h")
    }
    return {
        file: {
            seen[name]
            for _, body in named.values()
            for name in _CALL.findall(body)
            if name in seen and name not in named
        }
        for file, named in functions.items()
    }


def in_circles(files: dict[str, str]) -> set[str]:
    """Files that are left when those that call none of the others are taken away, again and again."""
    left = calls(files)
    while free := [file for file, called in left.items() if not called & left.keys()]:
        for file in free:
            del left[file]
    return left.keys() & set().union(*left.values()) if left else set()


def types_named_twice(files: dict[str, str]) -> set[str]:
    sources = [_SOURCE.sub("", text) for text in files.values()]
    names = Counter(name for source in sources for name in {n for kind in _TYPES for n in kind.findall(source)})
    return {name for name, times in names.items() if times > 1}


def test_a_file_has_at_most_450_lines() -> None:
    assert not {name: n for name, text in FILES.items() if (n := len(text.splitlines())) > 450}


def test_calls_make_no_circle_of_files() -> None:
    engine = {name: text for name, text in FILES.items() if not name.startswith("check/")}
    called = calls(engine)
    assert called["pass.c"] >= {"attention.c", "draft_head.c", "part.c"}
    assert called["draft_scores.c"] >= {"ngram.c", "growth.h"}
    assert not in_circles(engine)


def test_no_type_name_stands_twice() -> None:
    assert not types_named_twice(FILES)


LAYOUT = "typedef struct {\n    int x;\n} Layout;\n"
CIRCLE = {
    "a.c": LAYOUT + "static int twice(int x) { return 2 * x; }\nint up(int x) {\n    return down(twice(x));\n}\n",
    "b.c": LAYOUT + "int down(int x) {\n    return x ? up(x - 1) : 0;\n}\n",
    "c.c": "/* up(1) */\nstatic int up(void) {\n    return 1;\n}\nint alone(void) {\n    return up();\n}\n",
}


def test_circles_and_names_are_seen() -> None:
    assert calls(CIRCLE) == {"a.c": {"b.c"}, "b.c": {"a.c"}, "c.c": set()}
    assert in_circles(CIRCLE) == {"a.c", "b.c"}
    assert not in_circles({**CIRCLE, "b.c": "int down(int x) {\n    return x;\n}\n"})
    assert types_named_twice(CIRCLE) == {"Layout"}
