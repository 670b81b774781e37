"""The pictures of the methods' trees: each method has one, and they are what the methods draft today."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from draftree.policies.methods import METHODS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tree-figures"
GROUP = "{http://www.w3.org/2000/svg}g"


def _boxes(picture: str) -> list[tuple[str, str, list[str]]]:
    """Kind, place and texts of every box."""
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own file
    groups = [group for group in root.iter(GROUP) if "transform" in group.attrib]
    return [(group.attrib["class"], group.attrib["transform"], list(group.itertext())) for group in groups]


def test_every_method_has_a_small_picture_beside_it() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "how-it-works").iterdir())
    shown = re.findall(r"\]\(\.\./tree-figures/([\w-]+)\.svg\)", pages)
    assert sorted(shown) == sorted(METHODS) == sorted(path.stem for path in FOLDER.iterdir())
    for path in FOLDER.iterdir():
        assert path.stat().st_size < 15_000
        kinds = [kind for kind, _, _ in _boxes(path.read_text())]
        assert kinds.count("root") == kinds.count("own") == 1 and 3 <= len(kinds) <= 16
        assert "@import" not in path.read_text() and "url(" not in path.read_text()


@pytest.mark.real
@pytest.mark.browser
@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium: apt-get install chromium")
def test_the_pictures_are_what_the_methods_draft() -> None:
    from benchmarks.pictures import pictures

    made = dict(pictures(METHODS))
    assert {name: _boxes(picture) for name, picture in made.items()} == {
        name: _boxes((FOLDER / f"{name}.svg").read_text()) for name in METHODS
    }
