"""Tests name the values of errors, not their sentences, which may be written anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 2
WORDS = re.compile(r"(?<![\w.'/\\-])[a-z]+(?: (?!nan\b)[a-z]+)*(?![\w'/-]|\.\w)")


def words(pattern: str) -> int:
    """Lower-case words of the longest run of them."""
    return max((run.count(" ") + 1 for run in WORDS.findall(pattern)), default=0)


def strings(node: ast.expr) -> Iterator[str]:
    """Literals in an expression; those of an f-string are one, with a placeholder for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from strings(child)


def cases(function: ast.FunctionDef, name: str) -> Iterator[ast.expr]:
    """What ``pytest.mark.parametrize`` gives an argument."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize") and len(mark.args) > 1:
            names, values = list(strings(mark.args[0])), mark.args[1]
            names = names[0].replace(" ", "").split(",") if len(names) == 1 else names
            for case in values.elts if name in names and isinstance(values, ast.List) else ():
                yield case.elts[names.index(name)] if isinstance(case, ast.Tuple) else case


def patterns(source: str) -> Iterator[str]:
    """Literals that ``match`` compares with the message of an error or a warning."""
    nodes = list(ast.walk(ast.parse(source))) if "match=" in source else []
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test")):
        for call in ast.walk(function):
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                if keyword.arg == "match":
                    yield from strings(keyword.value)
                    if isinstance(keyword.value, ast.Name):
                        for case in cases(function, keyword.value.id):
                            yield from strings(case)


def test_errors_are_known_by_their_values() -> None:
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    found = {(path.name, text) for path in paths for text in patterns(path.read_text()) if words(text) > MOST_WORDS}
    assert not found


def test_a_sentence_is_noticed() -> None:
    """Controls: without them the test above could pass with nothing looked at."""
    one = "def test() -> None:\n    with pytest.raises(ValueError, match={}):\n        f()\n"
    case = '@pytest.mark.parametrize(("n", "named"), [(1, "{}")])\ndef test(n, named):\n    raises(E, match=named)\n'
    sentence = "width is 0: use at least 1"
    for source in (
        one.format(f'"{sentence}"'),
        one.format('f"{n} is not there, but elsewhere"'),
        case.format(sentence),
    ):
        assert max(map(words, patterns(source))) > MOST_WORDS, source
    for value in (
        "width is 0",
        "width is nan",
        r"llama\.block_count is -3",
        "--out .*hf.co/org/a",
        "no 'static' .*match",
    ):
        assert max(map(words, patterns(one.format(repr(value))))) <= MOST_WORDS, value
