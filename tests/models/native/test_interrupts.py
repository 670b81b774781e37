"""Ctrl-C while C works: Python raises it when C has returned, and rows have what C has then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftree.errors import CacheError
from draftree.models.base import Nodes, Row, prefill
from draftree.models.native.native_model import NativeModel
from tests import tiny_gguf

TEXT = [5, 200, 31, 7, 90, 4, 4, 150]
NODES = Nodes([9, 8, 7, 6, 5], [-1, 0, 0, 1, -1])
CALLS: dict[str, tuple[Callable[[NativeModel, Row], object], list[int]]] = {
    "extend": (lambda model, row: model.extend([row], [NODES]), []),
    "commit": (lambda model, row: model.commit(row, [0, 2]), [9, 7]),
    "prune": (lambda model, row: model.prune(row, [0, 1, 2, 3], 1), [9]),
}
"""What is called, and the tokens that the row has then behind its text."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    return NativeModel(tiny_gguf.write(tmp_path_factory.mktemp("model") / "model.gguf", context=256), threads=2)


def interrupted(call: Callable[..., object]) -> Callable[..., None]:
    """A call, and an interrupt when it has returned."""

    def run(*arguments: object) -> None:
        call(*arguments)
        raise KeyboardInterrupt

    return run


@pytest.mark.parametrize("name", CALLS)
def test_a_row_goes_on_behind_an_interrupt(name: str, model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """C had nodes or tokens that Python did not know of: what came next was read behind others."""
    row, (call, gained) = prefill(model, TEXT), CALLS[name]
    if name != "extend":
        model.extend([row], [NODES])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.loaded, name, interrupted(getattr(model.loaded, name)))
        call(model, row)
    assert row.length == model.loaded.length(row.number) == len(TEXT + gained)
    if row.parents:  # so a step begins
        model.commit(row, [])
    found = model.extend([row], [Nodes.chain([11, 12])]).logits([0, 1])
    expected = model.extend([prefill(model, TEXT + gained)], [Nodes.chain([11, 12])]).logits([0, 1])
    assert (found == expected).all()


def test_where_c_fails_rows_are_what_they_were(model: NativeModel) -> None:
    rows = [prefill(model, TEXT[:count]) for count in (3, 8)]
    model.extend(rows, [Nodes.chain([1]), NODES])
    for call in (
        lambda: model.extend(rows, [Nodes.chain([2]), Nodes([1], [9])]),
        lambda: model.extend(rows, [Nodes([2, 3], [0]), Nodes([1], [0])]),
        lambda: model.commit(rows[1], [1]),
        lambda: model.prune(rows[1], [0, 3], 1),
    ):
        with pytest.raises(CacheError):
            call()
        assert [(row.length, row.parents) for row in rows] == [(3, [-1]), (8, NODES.parents)]
