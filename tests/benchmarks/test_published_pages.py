"""The published pages of results and papers, and the code that writes them, have the same prose."""

from __future__ import annotations

from pathlib import Path

from benchmarks.papers import confidence, page, sections, systems
from benchmarks.papers.__main__ import CHAPTERS

DOCS = Path(__file__).parents[2] / "docs"


def test_published_pages_have_the_prose_of_the_report() -> None:
    """Pages are made of runs that not everybody has, so their prose could be edited in one of two places."""

    def lacks(name: str, *prose: str) -> list[str]:
        published = " ".join((DOCS / name).read_text().split())
        return [text for text in prose if " ".join(text.split()) not in published]

    assert lacks("results.md", page.OPENING, sections.MODELS, page.ELSEWHERE) == []
    assert lacks("systems.md", systems.OPENING, systems.SPEED) == []
    assert lacks("exactness.md", systems.EXACT_OPENING, systems.EXACT) == []
    for chapter in CHAPTERS:
        own = (sections.OPENING, sections.MODELS, chapter.claim, chapter.why)
        assert lacks(f"papers/{chapter.name}.md", *own) == []
    assert lacks("papers/c2t.md", confidence.HEAD.read_text(), "No such sentence.") == ["No such sentence."]
