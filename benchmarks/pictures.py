"""How does each method's tree look in the same place of the same text?

    python -m benchmarks.pictures docs/tree-figures [--methods opt-tree,auto,...]

Decodes one text with SmolLM2 and its head by every method, at most 14 nodes a tree, and saves the first step's tree as
the inspector draws it, METHOD.svg. Needs Chromium. The same on every machine: what is learned from measured seconds is
not learned before the first step, ``auto`` reckons with the cost table of one tier, and
``sequoia`` has its best tree for one table of acceptance. ``hsddw`` has ``cap`` = 5, to fit a page.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import draftree
from draftree.drafters.grow import TreeDrafter
from draftree.drafters.registry import load_drafter
from draftree.engine.speculation import Speculation, SpeculationParams
from draftree.models.base import LanguageModel
from draftree.models.cost_profile import Identity, Point, Profile
from draftree.models.cost_table import shipped_table
from draftree.policies.auto import AutoTree
from draftree.policies.fixed import RankTree, best_tree
from draftree.policies.methods import METHODS
from draftree.request import Generation
from draftree.text.encoding import Conversation

from .commands import command_parser, one_line_errors

QUESTION = "List five rivers of Europe, one a line, then the same list again."
RIVERS = "1. Danube River\n2. Rhine River\n3. Nile River\n4. Amazon River\n5. Danube River\n\n"
BEGUN = f"{RIVERS}These five rivers are all connected by a single line, which is the"
PROMPT = Conversation([*draftree.user(QUESTION), {"role": "assistant", "content": BEGUN}], continued=True)
NODES = 14
TIER, THREADS = "avx512-vnni", 2
SIZES = (*range(1, 33),)
ACCEPTANCE = np.array([[0.6, 0.15, 0.08, 0.05]] * 6)
"""That of the head is near it, by rank, at each depth."""

_PICTURE = """() => {
  const picture = document.querySelector("#step svg.tree");
  const rules = [...document.styleSheets[0].cssRules].filter((rule) => /^(:root$|svg|\\.tree)/.test(rule.selectorText));
  for (const title of picture.querySelectorAll("title")) title.remove();
  const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
  style.textContent = rules.map((rule) => rule.cssText).join("\\n") + "\\nsvg { background: var(--bg); }";
  picture.prepend(style);
  return new XMLSerializer().serializeToString(picture);
}"""


def _policy(name: str, models: Iterable[LanguageModel]) -> draftree.GrowthPolicy:
    if name == "sequoia":
        return RankTree(best_tree(ACCEPTANCE, NODES))
    policy = METHODS[name].policy({"cap": 5} if name == "hsddw" else None)
    if isinstance(policy, AutoTree):
        policy.target, policy.drafter = (_profile(model) for model in models)
    return policy


def _profile(model: LanguageModel) -> Profile:
    """Costs by the table of a tier, whatever this machine is."""
    can, table = replace(model.capabilities, tier=TIER, threads=THREADS), shipped_table(TIER)
    seconds = tuple(table.seconds(can, tokens, 64) for tokens in SIZES)
    return Profile(Identity.of(model), (Point(1, 64, SIZES, seconds),))


def decoded(methods: Iterable[str]) -> Iterator[tuple[str, Generation]]:
    """Each method with the first steps of the text by it."""
    target = draftree.load("smollm2")
    spec = SpeculationParams(drafter="head").spec
    any_of_it = load_drafter(spec, target, METHODS["chain"].policy())
    assert isinstance(any_of_it, TreeDrafter) and any_of_it.source.model is not None  # noqa: S101 - it is a head
    for name in methods:
        drafter = load_drafter(spec, target, _policy(name, (target, any_of_it.source.model)))
        engine = draftree.Engine(target, Speculation(drafter, NODES))
        yield name, engine.generate([PROMPT], draftree.SamplingParams(max_tokens=24), trace=True)[0]


def pictures(methods: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each method with the picture (SVG) of its first tree."""
    with sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for name, generation in decoded(methods):
            page.set_content(draftree.show(generation).html)
            page.locator("#steps .block").first.dispatch_event("click")
            page.get_by_text("Step 1 of").wait_for()
            yield name, page.evaluate(_PICTURE)
        browser.close()


@one_line_errors()
def main() -> None:
    """Save them."""
    parser = command_parser("benchmarks.pictures", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures(args.methods.split(",")):
        path = args.folder / f"{name}.svg"
        path.write_text(picture + "\n")
        print(f"{path}: {len(picture)} bytes")


if __name__ == "__main__":
    main()
