"""The inspector's page with models that think aloud."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Request, expect

from ..scripted import OPENED, THINKING, ScriptedModel, thinking_tokenizer
from .browsing import ASKED, CHAT, IN_CHROMIUM, TREES, ask, browsing, opened, text_of
from .running import posted, running

pytestmark = IN_CHROMIUM


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.mark.parametrize("limit", [2, 9, 15, 21, 200])
@pytest.mark.parametrize(("template", "begun"), [(THINKING, "<think>"), (OPENED, "")])
def test_thoughts_are_shown_and_compared_and_left_out_of_the_conversation(
    browser: Browser, template: str, begun: str, limit: int
) -> None:
    """Their tokens were empty, and answers that ended within them equal whatever they were, and forgotten."""
    model = ScriptedModel(f"{begun}a <b> a <b> </th</think>the cat", thinking_tokenizer(template))
    with running(model, TREES) as served, opened(browser, served.url) as page:
        message = posted(served, CHAT, {**ASKED, "max_tokens": limit})[1]["choices"][0]["message"]
        ask(page, limit, beside=True)
        expect(page.locator(".verdict")).to_contain_text("The texts are equal.")
        assert text_of(page, 0) == text_of(page, 1) == message.get("reasoning_content", "") + message["content"] != ""
        with page.expect_request(f"**{CHAT}") as asked:
            page.fill("#question", "and then?")
            page.get_by_role("button", name="Send").click()
        said = [*ASKED["messages"], {"role": "assistant", "content": message["content"]}]
        assert json.loads(asked.value.post_data or "")["messages"] == [*said, {"role": "user", "content": "and then?"}]
        expect(page.locator(".verdict")).to_have_count(2)


def test_thoughts_that_differ_are_texts_that_differ(browser: Browser) -> None:
    model = ScriptedModel("a <b> a <b></think>the cat", thinking_tokenizer(OPENED))
    with running(model, TREES) as served, opened(browser, served.url) as page:
        page.route(f"**{CHAT}", lambda route: route.continue_(post_data=_shorter_alone(route.request)))
        ask(page, 9, beside=True)
        expect(page.locator(".verdict")).to_contain_text("The texts differ.")


def _shorter_alone(request: Request) -> str:
    """The body; without drafts the answer has fewer tokens."""
    body = json.loads(request.post_data or "")
    alone = body.get("draftree") == {"drafter": "none"}
    return json.dumps({**body, "max_tokens": body["max_tokens"] - 3 * alone})
