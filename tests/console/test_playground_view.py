"""The playground in a browser, against the feed's API."""

from __future__ import annotations

import json
from typing import Any

from browsing import Site
from feed import HOSTILE
from feed_api import ANSWER, PROMPT_TOKENS, chunks
from playwright.sync_api import Page, Request, expect

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "celsius": {"type": "integer"}}}


def _send(page: Page, prompt: str) -> Any:
    """Return the body that the API got."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    return asked.value.post_data_json


def _tools(page: Page, name: str, value: Any) -> None:
    page.get_by_text("Tools and JSON schema").click()
    page.locator(f"[name={name}]").fill(value if isinstance(value, str) else json.dumps(value))


def test_an_answer_shows_tokens_by_likelihood_their_times_and_who_served_it(site: Site) -> None:
    page = site.open("playground")
    body = _send(page, "What is it?")
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert body["logprobs"] is True
    expect(page.get_by_text(f"ended by itself: {PROMPT_TOKENS} tokens in")).to_be_visible()
    tokens = page.locator(".tokens[tabindex] span")
    assert page.locator(".tokens[tabindex]").inner_text() == ANSWER
    assert [each.get_attribute("class") for each in tokens.all()[:5]] == ["l0 ", "l1 ", "l2 ", "l3 ", "l4 "]
    page.locator(".tokens[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-facts")).to_contain_text("Token 2 ·diptych probability 74.1 %")
    expect(page.locator(".token-facts .is-taken")).to_have_text("·diptych 74.1 % taken")
    row = list(site.feed.platform.rows.values())[-1]
    expect(page.locator(".served b")).to_have_text(f"{site.pod(row['prefill'])} → {site.pod(row['decode'])}")
    expect(page.locator(".beside .wf-table")).to_be_visible()
    page.get_by_role("link", name="Why there").click()
    expect(page.locator("h1")).to_contain_text(row["id"])


def test_a_call_of_a_tool_is_shown_and_its_result_goes_into_the_next_turn(site: Site) -> None:
    page = site.open("playground")
    _tools(page, "tools", [TOOL])
    assert _send(page, "Weather?")["tools"] == [TOOL]
    expect(page.locator(".tool-call")).to_contain_text("Calls weather with")
    expect(page.locator(".tool-call pre")).to_have_text('{"city": "Paris"}')
    expect(page.get_by_text("wants its calls answered")).to_be_visible()
    page.get_by_label("Its result").fill("18 degrees")
    said, call, result, _ = _send(page, "And?")["messages"]
    assert said == {"role": "user", "content": "Weather?"}
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}


def test_two_settings_answer_one_prompt_side_by_side_one_of_them_by_a_schema(site: Site) -> None:
    page, asked = site.open("playground"), list[Request]()
    page.on("request", lambda request: asked.append(request))
    page.get_by_label("Two settings side by side").check()
    side = page.locator(".side").nth(1)
    side.get_by_text("Tools and JSON schema").click()
    side.locator("[name=schema]").fill(json.dumps(SCHEMA))
    side.locator("[name=temperature]").fill("0.3")
    _send(page, "Where is it warm?")
    expect(page.get_by_text("ended by itself")).to_have_count(2)
    bodies: list[Any] = [request.post_data_json for request in asked if request.url.endswith("/v1/chat/completions")]
    assert [body["temperature"] for body in bodies] == [0.7, 0.3]
    assert bodies[1]["response_format"]["json_schema"]["schema"] == SCHEMA
    first, second = page.locator(".tokens[tabindex]").all_inner_texts()
    assert first == ANSWER
    assert json.loads(second) == {"city": "Paris", "celsius": 18}


def test_an_answer_can_be_stopped_and_errors_are_told_in_words(site: Site) -> None:
    page = site.open("playground")
    page.locator("[name=max_tokens]").fill("500")
    _send(page, "Go on forever")
    expect(page.locator(".tokens[tabindex] span").nth(3)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped by you")).to_be_visible()
    page.locator("[name=key]").fill("wrong")
    _send(page, "Hello")
    words = "The API refused (401, invalid_api_key): This API key is not known. Enter an API key above."
    expect(page.get_by_role("alert")).to_have_text(words)
    _tools(page, "schema", "{nonsense")
    page.get_by_label("Prompt", exact=True).fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").last).to_contain_text("JSON schema: this is no JSON")


def test_markup_in_prompts_tools_models_and_tenants_is_text_everywhere(site: Site) -> None:
    site.feed.poison()
    page = site.open("playground")
    page.locator("[name=model]").fill(HOSTILE)
    _send(page, f"say: {HOSTILE}")
    expect(page.locator(".tokens[tabindex]")).to_have_text(HOSTILE)
    expect(page.locator(".turn .prompt")).to_contain_text(HOSTILE)
    expect(page.get_by_text("ended by itself")).to_be_visible()
    _tools(page, "tools", [{"type": "function", "function": {"name": HOSTILE}}])
    _send(page, "Call it")
    expect(page.locator(".tool-call code")).to_have_text(HOSTILE)
    site.open("requests")
    expect(page.locator(".c-tenant").first).to_have_text(HOSTILE)
    name = next(iter(site.feed.platform.rows))
    site.open(f"requests/{name}")
    expect(page.locator(".call-facts")).to_contain_text(HOSTILE)
    assert page.title() != "owned"
    assert page.locator("main img, main script").count() == 0


def test_the_feed_streams_whole_answers() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(body) if chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
