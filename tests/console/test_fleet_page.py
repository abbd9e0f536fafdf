"""The picture of the fleet, as somebody sees it in a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browsing import Console, Look, Serve, Served, serious_faults
from feed import HOSTILE
from playwright.sync_api import Page, expect

KV = ("owned", "exporting", "importing", "quarantined", "cached", "free")


def worker(page: Page, name: str) -> Any:
    return page.locator(".worker", has=page.get_by_role("link", name=name, exact=True))


def kv_words(pages: dict[str, int]) -> str:
    return ", ".join(f"{pages[state]:,} {state}" for state in KV if pages.get(state))


def sent_links(served: Served) -> list[dict[str, Any]]:
    cards = served.get("fleet")["workers"].values()
    return [link for card in cards if card["role"] == "prefill" for link in card["links"].values()]


def test_cards_tell_what_the_document_tells(console: Console, serve: Serve) -> None:
    served = serve(2, 2, 1)
    page = console.open(served)
    cards = served.get("fleet")["workers"]
    expect(page.locator(".worker")).to_have_count(5)
    for card in cards.values():
        shown = worker(page, card["pod"])
        expect(shown).to_contain_text(f"{card['num_running']} running, {card['num_waiting']} waiting")
        bar = shown.get_by_role("img")
        expect(bar).to_have_attribute("aria-label", f"KV pages, 4,096: {kv_words(card['kv_pages'])}")
        assert shown.get_attribute("data-role") == card["role"]


def test_numbers_follow_the_patches(console: Console, serve: Serve) -> None:
    served = serve()
    page = console.open(served)
    for _ in range(3):
        served.do("tick")
        for card in served.get("fleet")["workers"].values():
            shown = worker(page, card["pod"]).get_by_role("img")
            expect(shown).to_have_attribute("aria-label", re.compile(re.escape(kv_words(card["kv_pages"]))))


def test_each_link_is_a_line_and_a_row_of_the_table(console: Console, serve: Serve) -> None:
    served = serve(3, 3)
    page = console.open(served)
    expect(page.locator(".line")).to_have_count(9)
    page.get_by_text("Links as a table").click()
    links = sent_links(served)
    shown = page.get_by_role("group", name="Links").locator("tbody tr td:nth-child(3)").all_inner_texts()
    assert sorted(shown) == sorted(link["state"] for link in links)


def test_pages_move_along_links_with_traffic_alone(console: Console, serve: Serve) -> None:
    served = serve(3, 3)
    page = console.open(served)
    expect(page.locator(".line")).to_have_count(9)
    for _ in range(2):
        served.do("tick")
    busy = sum(link["state"] == "up" and link["bytes_per_s"] > 0 for link in sent_links(served))
    expect(page.locator(".line .pages")).to_have_count(busy)


def test_what_happens_to_workers_is_seen(console: Console, serve: Serve) -> None:
    served = serve(3, 3)
    names = served.instances
    page = console.open(served)
    expect(page.locator(".worker")).to_have_count(6)
    served.do("drain", instance=names["prefill-0"])
    served.do("freeze", instance=names["decode-0"])
    served.do("hold_back", instance=names["decode-1"], why="loads the weights")
    served.do("silence", instance=names["decode-2"], silent_s="3")
    served.do("flip", instance=names["prefill-1"], role="decode")
    served.do("kill", instance=names["prefill-2"])
    expect(worker(page, "prefill-0")).to_contain_text("draining")
    expect(worker(page, "prefill-0").get_by_role("progressbar")).to_be_visible()
    expect(worker(page, "decode-0")).to_contain_text("left alone")
    expect(worker(page, "decode-0")).to_contain_text("did not answer in 2 s")
    expect(worker(page, "decode-1")).to_contain_text("loads the weights")
    expect(worker(page, "decode-2")).to_contain_text("its scheduler has been silent for 3 s")
    expect(page.locator('.panel[data-role="decode"]')).to_contain_text("Served as prefill until a moment ago")
    expect(worker(page, "prefill-2")).to_have_count(0)


def test_a_selected_worker_tells_all_in_a_drawer_that_escape_closes(console: Console, serve: Serve) -> None:
    served = serve()
    page = console.open(served)
    page.get_by_role("link", name="decode-1", exact=True).focus()
    page.keyboard.press("Enter")
    drawer = page.get_by_role("complementary", name="decode-1")
    card = served.get("fleet")["workers"][served.instances["decode-1"]]
    expect(page.locator("#drawer-name")).to_be_focused()
    for words in (card["address"], card["compat"], served.instances["decode-1"]):
        expect(drawer).to_contain_text(words)
    expect(drawer.locator(".links tbody tr:not(.reason)")).to_have_count(len(card["links"]))
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
    expect(page.get_by_role("link", name="decode-1", exact=True)).to_be_focused()


def test_an_act_is_done_after_a_question_and_its_answer_is_shown(console: Console, serve: Serve) -> None:
    served = serve()
    page = console.open(served, f"#/fleet/{served.instances['prefill-0']}")
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Cancel").click()
    assert served.feed.acts == []
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("spinbutton").fill("30")
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_text("It drains.")).to_be_visible()
    assert served.feed.acts == [{"act": "drain", "instance": served.instances["prefill-0"], "deadline_s": 30}]
    page.get_by_role("button", name="Load adapter", exact=False).first.click()
    page.get_by_label("Name").fill("sql")
    page.get_by_label("Path").fill("adapters/sql")
    page.get_by_role("dialog").get_by_role("button", name="Load adapter").click()
    expect(page.get_by_text("adapters/sql is not an absolute path.")).to_be_visible()


def test_many_workers_are_tiles_and_their_links_a_matrix(console: Console, serve: Serve) -> None:
    served = serve(20, 20)
    page = console.open(served)
    expect(page.locator(".tile")).to_have_count(40)
    expect(page.locator(".line")).to_have_count(0)
    matrix = page.get_by_role("application")
    matrix.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#matrix-words")).to_contain_text("prefill-1 \u2192 decode-1")
    page.keyboard.press("Enter")
    instance = served.instances["prefill-1"]
    expect(page).to_have_url(re.compile(f"#/fleet/{instance}$"))
    links = served.get("fleet")["workers"][instance]["links"]
    expect(page.locator(".line")).to_have_count(len(links))


def test_arrow_keys_move_among_tiles(console: Console, serve: Serve) -> None:
    page = console.open(serve(13, 13))
    page.locator(".panel .tile").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    expect(page.locator(".panel").first.locator(".tile").last).to_be_focused()
    assert page.locator(".panel").first.locator('.tile[tabindex="0"]').count() == 1


@pytest.mark.parametrize("place", ["", "#/steps"])
def test_markup_in_names_is_text(console: Console, serve: Serve, place: str) -> None:
    served = serve()
    served.do("poison")
    page = console.open(served, place)
    expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
    expect(page.locator(".worker, .stream").first).to_be_visible()
    if not place:
        expect(page.locator(".worker").first).to_contain_text(HOSTILE)
    assert page.locator("main img, main script, header img, header script").count() == 0
    assert page.title() != "owned"


@pytest.mark.parametrize("place", ["", "#/steps"])
def test_a_narrow_window_needs_no_sideways_scrolling(console: Console, serve: Serve, place: str) -> None:
    page = console.open(serve(2, 2, 1), place, Look(width=360, height=740))
    expect(page.locator(".worker, .stream").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("place", ["#/fleet/{decode-0}", "#/steps"])
def test_axe_finds_nothing_serious(console: Console, serve: Serve, place: str) -> None:
    served = serve(2, 2, 1)
    served.do("freeze", instance=served.instances["decode-0"])
    page = console.open(served, place.format(**served.instances))
    expect(page.locator(".drawer .fact-list, .stream").first).to_be_visible()
    assert serious_faults(page) == []
