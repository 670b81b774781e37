"""The inspector's page in a real browser: chats, trees by keyboard, themes, narrow screens, trace files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Frame, Page, Request, Route, expect

import draftree
from draftree.config import SamplingParams
from draftree.engine.engine import Engine
from draftree.engine.speculation import SpeculationParams
from draftree.engine.trace import Trace
from draftree.request import Generation

from .browsing import ASKED, CHAT, CONTRAST, IN_CHROMIUM, QUESTION, TOKENS, TREES, ask, browsing, opened, text_of
from .running import Running, posted, running, slow_target, streamed, target

pytestmark = IN_CHROMIUM
TRACED = "lookup+self"
"""The drafter of traces."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(speculation=TREES) as found:
        yield found


@pytest.fixture
def page(browser: Browser, served: Running) -> Iterator[Page]:
    with opened(browser, served.url) as found:
        expect(found.locator("#about")).to_contain_text("lookup")
        yield found


def _answered(page: Page) -> None:
    ask(page)
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".token")).to_have_count(TOKENS)
    expect(page.locator("#step svg.tree")).to_be_visible()


def _steps(served: Running) -> list[dict[str, Any]]:
    events = streamed(served, CHAT, {**ASKED, "stream_options": {"include_trace": True}})
    return [record for event in events for record in event.get("trace", []) if record["kind"] == "step"]


def test_a_typed_question_is_answered_with_the_text_of_the_api(page: Page, served: Running) -> None:
    _answered(page)
    expected = posted(served, CHAT, ASKED)[1]["choices"][0]["message"]["content"]
    assert text_of(page) == expected
    steps = _steps(served)
    accepted = sum(min(step["taken"], len(step["path"])) for step in steps)
    assert accepted and page.locator(".token.s0").count() == accepted
    expect(page.locator(".legend").first).to_contain_text(f"lookup {accepted}")
    expect(page.locator("#depth")).to_contain_text(f"of {sum(1 for s in steps if s['tree']['tokens'])} steps")
    expect(page.locator("#phases")).to_contain_text("verify")
    assert page.locator("#cost circle.pass:not(.open)").count() == len(steps)


def test_the_tree_of_any_token_opens_by_keyboard(page: Page, served: Running) -> None:
    _answered(page)
    steps, at, first = _steps(served), 0, 1
    page.locator("#question").focus()
    page.keyboard.press("Shift+Tab")
    for number, step in enumerate(steps, start=1):
        while at < first:
            page.keyboard.press("ArrowRight")
            at += 1
        page.keyboard.press("Enter")
        expect(page.locator("#step-title")).to_have_text(f"Step {number} of {len(steps)}")
        assert page.locator("svg.tree g > g.accepted").count() == len(step["path"])
        assert page.locator("svg.tree g > g").count() == len(step["tree"]["tokens"]) + 2  # the root, the target's own
        assert page.locator(".token.open").count() == step["taken"]
        first += step["taken"]
    page.locator("#previous").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#step-title")).to_have_text(f"Step {len(steps) - 1} of {len(steps)}")


def test_the_theme_is_the_systems_until_it_is_switched(browser: Browser, page: Page, served: Running) -> None:
    def background(of: Page) -> str:
        return str(of.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = background(page)
    with browser.new_context(color_scheme="dark") as context:
        other = context.new_page()
        other.goto(served.url)
        dark = background(other)
    assert light != dark
    page.get_by_role("button", name="Dark theme").press("Enter")
    assert background(page) == dark
    page.reload()
    assert background(page) == dark
    page.get_by_role("button", name="Light theme").press("Enter")
    assert background(page) == light


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_of_wcag_aa(page: Page, theme: str) -> None:
    _answered(page)
    page.locator(".token.s0").first.click()
    page.locator("#step summary").click()
    if theme == "dark":
        page.locator("#theme").click()
    found = page.evaluate(CONTRAST)
    assert len(found) > 80
    assert [what for ratio, what in found if ratio < 4.5] == []


def test_nothing_is_wider_than_a_narrow_screen(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    ask(page, beside=True)
    expect(page.locator(".verdict")).to_be_visible()
    page.locator(".token.s0").first.click()
    page.locator("#step summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    reach = page.evaluate(
        "Math.max(...[...document.querySelectorAll('button, input, select, textarea, .token')]"
        ".filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect().right))"
    )
    assert reach <= 360


def test_ar_decoding_beside_trees_has_the_same_text(page: Page) -> None:
    page.locator("#settings summary").click()
    page.fill("#temperature", "1")
    page.locator("#settings summary").click()
    ask(page, beside=True)
    expect(page.locator(".verdict")).to_contain_text("The texts are equal.")
    assert text_of(page, 0) == text_of(page, 1) != ""
    assert page.locator(".tokens").nth(1).locator(".s0").count() == 0
    assert all(re.search(r"\d a second", text) for text in page.locator(".figures").all_text_contents())


def test_the_next_question_has_the_conversation_before_it(page: Page, served: Running) -> None:
    _answered(page)
    page.fill("#question", "and then?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".token")).to_have_count(2 * TOKENS)
    said = [
        *ASKED["messages"],
        {"role": "assistant", "content": text_of(page, 0)},
        {"role": "user", "content": "and then?"},
    ]
    found = posted(served, CHAT, {**ASKED, "messages": said})[1]
    assert text_of(page, 1) == found["choices"][0]["message"]["content"]


def test_a_question_whose_prompt_is_read_has_no_step(page: Page) -> None:
    """The former answer's stayed there, and an arrow opened step -1: nothing was drawn any more."""
    _answered(page)
    held = list[Route]()
    page.route(f"**{CHAT}", lambda route: held.append(route))
    page.fill("#question", "and then?")
    _click_at_once(page, ["send", "previous", "next"])
    while not held:
        page.wait_for_timeout(10)
    _check_no_step(page)
    held[0].continue_()
    expect(page.locator("#step-title")).to_have_text(re.compile(r"Step \d+ of \d+"))
    expect(page.locator(".token")).to_have_count(2 * TOKENS)
    expect(page.locator("#stop")).to_be_hidden()


def _click_at_once(page: Page, ids: list[str]) -> None:
    """Nothing is drawn between the clicks."""
    page.evaluate("(ids) => ids.forEach((id) => document.getElementById(id).click())", ids)


def _check_no_step(page: Page) -> None:
    expect(page.locator("#step-title")).to_have_text("Step")
    expect(page.locator("#step svg, #steps svg, #cost svg, .token.open")).to_have_count(0)
    for arrow in ("#previous", "#next"):
        expect(page.locator(arrow)).to_be_disabled()


def test_arrows_end_at_the_first_and_the_last_step(page: Page, served: Running) -> None:
    """Clicks before the next drawing, which disables an arrow, went on to steps that are none."""
    _answered(page)
    count = len(_steps(served))
    for arrow, end in (("previous", 1), ("next", count)):
        _click_at_once(page, [arrow] * (count + 2))
        expect(page.locator("#step-title")).to_have_text(f"Step {end} of {count}")


def _traced(path: Path) -> tuple[Engine, list[Generation]]:
    """A trace of two requests."""
    with Trace(path) as trace:
        engine = Engine(target(), SpeculationParams(drafter=TRACED, method="static", nodes=6), observers=[trace])
        return engine, engine.generate(["a b a b a b a b", QUESTION], SamplingParams(max_tokens=TOKENS), trace=True)


def _check_trace(page: Page | Frame, engine: Engine, found: list[Generation]) -> None:
    """The requests of a trace, with their tokens, steps and drafters."""
    expect(page.locator(".token")).to_have_count(TOKENS)
    options = page.get_by_label("Request of the trace").locator("option")
    assert [re.match(r"request (\d)", text) is not None for text in options.all_text_contents()] == [True, True]
    names = dict(zip(engine.speculation.drafter.parts, TRACED.split("+"), strict=True))  # the page's are as written
    for number, generation in enumerate(found):
        page.get_by_label("Request of the trace").select_option(str(number))
        expect(page.locator(".tokens")).to_have_text(_spelled(engine, generation.token_ids))
        expect(page.locator("#step-title")).to_contain_text(f"of {generation.stats.steps}")
        expect(page.locator("#steps .block")).to_have_count(generation.stats.steps)
        for name, did in generation.stats.drafters.items():
            if did.accepted:
                expect(page.locator(".legend").first).to_contain_text(f"{names[name]} {did.accepted}")


def test_a_trace_file_opens(page: Page, tmp_path: Path) -> None:
    engine, found = _traced(tmp_path / "run.jsonl")
    page.set_input_files("#file", tmp_path / "run.jsonl")
    _check_trace(page, engine, found)


@pytest.mark.parametrize("alone", [False, True])
def test_a_request_without_steps_shows_none_of_another(
    browser: Browser, served: Running, tmp_path: Path, alone: bool
) -> None:
    """As a page of its own, and in the inspector: what was chosen before stayed beside its text."""
    path, limits = tmp_path / "run.jsonl", (TOKENS, 1)
    with Trace(path) as trace:
        engine = Engine(target(), TREES, observers=[trace])
        engine.generate([QUESTION] * 2, [SamplingParams(max_tokens=limit) for limit in limits])
    with opened(browser, "about:blank" if alone else served.url) as page:
        if alone:
            page.set_content(draftree.show(path).html)
        else:
            page.set_input_files("#file", path)
        for _ in range(2):
            page.get_by_label("Request of the trace").select_option("0")
            expect(page.locator("#step svg.tree")).to_be_visible()
            page.get_by_label("Request of the trace").select_option("1")
            expect(page.locator(".token")).to_have_count(1)
            _check_no_step(page)
            expect(page.locator("#step")).to_contain_text("ended with its first token")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("framed", [False, True])
def test_what_show_draws_is_what_the_inspector_shows(
    browser: Browser, tmp_path: Path, theme: Literal["light", "dark"], framed: bool
) -> None:
    """As a page of its own, and as a notebook has it: both without a server, and with nothing to load."""
    engine, found = _traced(tmp_path / "run.jsonl")
    problems: list[str] = []
    with browser.new_context(color_scheme=theme, viewport={"width": 360, "height": 740}, offline=True) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text))
        page.on("request", lambda request: problems.append(request.url))
        for shown in (draftree.show(found), draftree.show(tmp_path / "run.jsonl")):
            page.set_content(shown._repr_html_() if framed else shown.html)
            inner = page.frames[-1] if framed else page
            _check_trace(inner, engine, found)
            inner.locator("#steps .block").nth(0).click()
            expect(inner.locator("#step-title")).to_contain_text("Step 1 of")
            assert inner.evaluate("document.documentElement.scrollWidth") <= 360
            assert [what for ratio, what in inner.evaluate(CONTRAST) if ratio < 4.5] == []
    assert problems == []


def test_the_first_message_is_there_and_its_answer_shows_trees_steps_and_both_rates(page: Page) -> None:
    page.locator("#settings summary").click()
    page.fill("#limit", str(TOKENS))
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".verdict")).to_contain_text(
        re.compile(r"\d tokens a second with trees, [\d.]+ by AR decoding")
    )
    expect(page.locator(".forced")).to_have_count(0)
    expect(page.locator("svg.tree")).to_be_visible()
    blocks = page.locator("#steps .block")
    assert blocks.count() > 1
    blocks.nth(0).locator("rect").nth(1).click()
    expect(page.locator("#step-title")).to_have_text(f"Step 1 of {blocks.count()}")


@pytest.mark.real
def test_of_the_default_model_the_first_message_shows_trees_steps_and_both_rates(browser: Browser) -> None:
    with running(draftree.load("smollm2"), SpeculationParams()) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".verdict")).to_contain_text("The texts are equal.")
        expect(page.locator(".verdict")).to_contain_text("a second with trees")
        assert page.locator("#steps .block").count() > 1
        assert page.locator("svg.tree g > g.accepted, svg.tree g > g.rejected").count() > 0


def test_where_auto_hardly_drafts_trees_are_drafted_all_the_same_and_the_page_says_so(browser: Browser) -> None:
    with running(speculation=SpeculationParams(drafter="lookup")) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        page.route(f"**{CHAT}", lambda route: route.continue_(post_data=_undrafted(route.request)))
        ask(page, beside=True)
        expect(page.locator(".verdict")).to_contain_text("The texts are equal.")
        expect(page.locator(".forced")).to_contain_text(re.compile("drafted in 0 of .* opt-tree with 8 nodes"))
        assert page.locator(".answer").count() == 3
        expect(page.locator("svg.tree")).to_be_visible()
        assert page.locator("svg.tree g > g").count() > 2


def _undrafted(request: Request) -> str:
    """The body, where the server would choose how to draft: without drafts, as ``auto`` may choose."""
    return json.dumps({"draftree": {"drafter": "none"}, **json.loads(request.post_data or "{}")})


def _spelled(engine: Engine, ids: list[int]) -> str:
    assert engine.inputs.tokenizer is not None
    return "".join(str(engine.inputs.tokenizer.decode([token])) for token in ids)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ("hello\nworld\n", "not a draftree trace"),
        ('{"kind":"run","format":"draftree-trace","version":1}\n', "version 1"),
        ('{"kind":"run","format":"draftree-trace","version":4}\n{"kind":"step","request":0}\n', "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error_in_plain_words(
    page: Page, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "other.txt").write_text(content)
    page.set_input_files("#file", tmp_path / "other.txt")
    expect(page.get_by_role("alert")).to_contain_text(said)
    assert page.locator(".turn").count() == 0


def test_errors_of_the_server_are_shown(page: Page) -> None:
    page.route(f"**{CHAT}", lambda route: route.abort())
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute(f"**{CHAT}")
    page.fill("#limit", "1000")
    page.fill("#question", QUESTION)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens is 1000")


def test_a_key_is_asked_for_and_kept_for_the_session(browser: Browser) -> None:
    with running(keys=("secret",)) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        expect(page.get_by_role("alert")).to_contain_text("wants a key")
        page.get_by_label("Key").fill("secret")
        page.get_by_label("Key").press("Tab")
        expect(page.locator("#about")).to_contain_text("lookup")
        page.reload()
        expect(page.locator("#about")).to_contain_text("lookup")
        assert page.evaluate("Object.values(localStorage).join()") == ""


def test_a_stopped_answer_keeps_what_is_there_and_frees_its_row(browser: Browser) -> None:
    with running(slow_target()) as served, browser.new_context() as context:
        page = context.new_page()
        page.goto(served.url)
        ask(page, 64)
        expect(page.locator(".token").nth(3)).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_have_text("stopped")
        served.settle()
        assert 4 <= page.locator(".token").count() < 64
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
