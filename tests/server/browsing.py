"""A real browser, and the inspector's page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from draftree.engine.speculation import SpeculationParams

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
"""The marks of a module whose tests need it."""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TREES = SpeculationParams(drafter="lookup", method="static")
QUESTION = "the cat in the hat the cat in the hat"
TOKENS = 24
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
"""What the page asks of the API, with ``QUESTION``."""

expect.set_options(timeout=300_000)  # nothing is said of how long a busy machine takes

CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb(text).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const rect = e.tagName === "g" ? e.querySelector(":scope > rect") : null;
      const colour = rect ? getComputedStyle(rect).fill : getComputedStyle(e).backgroundColor;
      if (rgb(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || e.disabled || !e.checkVisibility() || e.closest("title")) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(e instanceof SVGElement ? style.fill : style.color), light(behind(e))];
    const what = `${e.tagName}.${e.getAttribute("class")} ${e.textContent.slice(0, 30)}`;
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), what]);
  }
  return found;
}"""
"""Contrast ratio (WCAG 2.2) of each element that has text, and what it is."""


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that runs."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """A page, which has no error until it is closed."""
    with browser.new_context(color_scheme="light") as context:
        found, problems = context.new_page(), list[str]()
        found.on("pageerror", lambda error: problems.append(str(error)))
        found.on("console", lambda said: problems.append(said.text) if _is_problem(said) else None)
        found.goto(url)
        yield found
        assert problems == []


def _is_problem(said: ConsoleMessage) -> bool:
    """An error of the page, such as one of its content policy; not an answer of the server that is an error."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")


def ask(page: Page, limit: int = TOKENS, *, beside: bool = False) -> None:
    """Type ``QUESTION`` and send it; the settings are closed before.

    Args:
        limit: most tokens of an answer.
        beside: it is answered without drafts, too.
    """
    page.locator("#settings summary").click()
    page.fill("#limit", str(limit))
    page.locator("#beside").set_checked(beside)
    page.fill("#question", "")
    page.locator("#question").click()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")


def text_of(page: Page, answer: int = 0) -> str:
    """The tokens of an answer together."""
    return page.locator(".tokens").nth(answer).text_content() or ""
