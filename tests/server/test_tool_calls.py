"""Texts with calls, taken apart: the same however they come in pieces, and sensible where they are cut off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.openai.tools import CallParser
from draftree.request import Chunk
from draftree.text.encoding import call_text

Call = tuple[str, dict[str, Any]]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["}\n</tool_call>", '"}}', "{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["f", "get_weather", "a.b/c-1"])
calls_ = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=4), values)))
said_ = st.text(st.sampled_from("a <tol_c>\n/"), max_size=12).filter(lambda text: "<tool_call>" not in text)


def written(said: str, calls: Sequence[Call]) -> str:
    return said + "\n".join(call_text(name, arguments) for name, arguments in calls)


def parsed(text: str, cuts: Sequence[int], held: bool = False) -> tuple[CallParser, str, list[str]]:
    """The parser after a text in pieces, and what the pieces brought, put together: content, arguments of each call.

    Args:
        held: the last piece is what was held back.
    """
    parser, content, arguments = CallParser({}), "", list[str]()
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    *pieces, last = (text[a:b] for a, b in zip(edges, edges[1:], strict=False))
    brought = [parser.push(Chunk(0, piece, False, 0)) for piece in (pieces if held else [*pieces, last])]
    for part in [part for found in [*brought, parser.end(last if held else "")] for part in found]:
        if part.call is None:
            content += part.text
        elif part.begins:
            assert part.call.index == len(arguments)
            arguments.append(part.text)
        else:
            arguments[part.call.index] += part.text
    return parser, content, arguments


@given(said=said_, calls=calls_, cuts=st.lists(st.integers(0, 999), max_size=30), held=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_what_was_said_and_called_comes_back_in_any_pieces(
    said: str, calls: list[Call], cuts: list[int], held: bool
) -> None:
    parser, content, arguments = parsed(written(said, calls), cuts, held)
    assert content == (said.rstrip() if calls else said)
    assert [call.name for call in parser.calls] == [name for name, _ in calls]
    assert [json.loads(each) for each in arguments] == [given for _, given in calls]
    assert parser.called == bool(calls)
    assert len({call.key for call in parser.calls}) == len(calls)


@given(said=said_, calls=calls_.filter(bool), cuts=st.lists(st.integers(0, 999), max_size=9), end=st.integers(0, 9999))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_text_that_is_cut_off_has_what_came(said: str, calls: list[Call], cuts: list[int], end: int) -> None:
    text = written(said, calls)
    text = text[: end % len(text)]
    parser, content, arguments = parsed(text, cuts)
    assert len(arguments) == len(parser.calls)
    assert said.startswith(content) or content.startswith(said)  # a tag that has begun is text until it is whole
    for call, came, (name, whole) in zip(parser.calls, arguments, calls, strict=False):
        assert call.name == name
        if call.whole:
            assert json.loads(came) == whole
        else:
            assert json.dumps(whole, ensure_ascii=False).startswith(came)


def test_arguments_are_given_as_they_come() -> None:
    """A client that shows them need not wait for the end."""
    text = written("sure. ", [("f", {"a": "b" * 40})])
    parser, pieces = CallParser({}), list[str]()
    for character in text:
        pieces += [part.text for part in parser.push(Chunk(0, character, False, 0)) if part.text]
    assert pieces[:5] == list("sure.") and pieces[5:10] == list('{"a":')
    assert len(pieces) > 40


def test_tags_that_are_special_tokens_give_no_text_but_are_seen() -> None:
    parser = CallParser({7: "<tool_call>", 8: "</tool_call>"})
    pieces = [(1, "so"), (7, ""), (2, '\n{"name": "f", "arguments": {}}\n'), (8, ""), (0, "")]
    parts = [part for token, text in pieces for part in parser.push(Chunk(token, text, False, 0))]
    assert parser.called and parser.end("") == []
    assert [(part.text, part.call and part.call.name) for part in parts if part.text] == [("so", None), ("{}", "f")]


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>\n{"name": "f', '<tool_call>\n{"name": "f", "argu'])
def test_a_call_without_a_name_is_none(text: str) -> None:
    parser, content, arguments = parsed(text, range(0, 40, 3))
    assert (content, arguments, parser.calls, parser.called) == ("", [], [], False)
