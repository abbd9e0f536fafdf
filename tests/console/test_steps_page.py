"""The step stream, as somebody sees it in a browser."""

from __future__ import annotations

from typing import Any

from browsing import Console, Serve, Served
from playwright.sync_api import expect

LAST_MS = 30_000


def last_steps(served: Served, instance: str) -> list[Any]:
    """The steps of which a part lies in the last half minute of all."""
    workers = served.get("steps?since_ms=0")["workers"]
    head_ms = max(step[0] + step[1] for steps in workers.values() for step in steps)
    return [step for step in workers[instance] if step[0] + step[1] >= head_ms - LAST_MS]


HAS_COLOUR = """async (name) => {
  const { colour } = await import("/console/theme.js");
  const [r, g, b] = colour(name).match(/\\d+/g).map(Number);
  const { width, height } = document.querySelector(".stream");
  const { data } = document.querySelector(".stream").getContext("2d").getImageData(110, 0, width - 110, height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at] === r && data[at + 1] === g && data[at + 2] === b;
  return count > 1000;
}"""


def test_the_table_sums_the_last_steps_of_each_worker(console: Console, serve: Serve) -> None:
    served = serve(2, 2, 1)
    page = console.open(served, "#/steps")
    page.get_by_text("as a table").click()
    for name, instance in served.instances.items():
        steps = last_steps(served, instance)
        cells = page.get_by_role("row", name=name).get_by_role("cell")
        expect(cells.nth(1)).to_have_text(f"{len(steps):,}")
        for column, value in ((3, sum(step[2] for step in steps)), (4, sum(step[3] for step in steps))):
            expect(cells.nth(column)).to_have_text(f"{value:,}" if value < 10_000 else f"{value / 1000:.3g} k")


def test_bars_have_the_colours_of_what_steps_did(console: Console, serve: Serve) -> None:
    page = console.open(serve(2, 2), "#/steps")
    expect(page.locator(".stream")).to_be_visible()
    for colour in ("--prefill", "--decode"):
        page.wait_for_function(HAS_COLOUR, arg=colour)


def test_the_keyboard_chooses_a_step_and_tells_of_it(console: Console, serve: Serve) -> None:
    served = serve(2, 2)
    page = console.open(served, "#/steps")
    page.get_by_text("as a table").click()
    expect(page.get_by_role("row", name="prefill-0").get_by_role("cell").nth(1)).not_to_have_text("0")
    steps = last_steps(served, served.instances["prefill-0"])
    stream = page.get_by_role("application")
    stream.focus()
    page.keyboard.press("ArrowDown")
    words = page.locator("#step-words")
    expect(words).to_contain_text("prefill-0")
    expect(words).to_contain_text(f"{steps[-1][2]:,} prompt tokens, {steps[-1][4]} request")
    page.keyboard.press("ArrowLeft")
    expect(words).to_contain_text(f"{steps[-2][2]:,} prompt tokens, {steps[-2][4]} request")
    expect(page.get_by_role("button", name="Follow")).to_be_visible()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_a_hand_off_is_known_from_the_step_that_ended_the_prompt_to_the_one_that_joined(
    console: Console, serve: Serve
) -> None:
    page = console.open(serve(1, 1), "#/steps")
    arrows = page.evaluate(
        """async () => {
          const { StepLog } = await import("/console/step_log.js");
          const log = new StepLog();
          log.add({ workers: { d: [[150, 10, 0, 4, 4, [], ["r"]]] } });
          log.add({ workers: { p: [[100, 40, 512, 0, 1, ["r"], []], [141, 40, 512, 0, 1, ["other"], []]] } });
          return log.arrows;
        }"""
    )
    assert arrows == [{"room": "r", "from": "p", "fromMs": 140, "to": "d", "toMs": 150}]


def test_steps_that_come_twice_or_late_are_kept_once_and_for_five_minutes(console: Console, serve: Serve) -> None:
    page = console.open(serve(1, 1), "#/steps")
    begun = page.evaluate(
        """async () => {
          const { StepLog } = await import("/console/step_log.js");
          const log = new StepLog();
          const step = (ms) => [ms, 10, 1, 0, 1, [], []];
          log.add({ workers: { w: [step(1000), step(1020), step(200000)] } });
          log.add({ workers: { w: [step(1020), step(200000), step(301015)] } });
          const { begunMs, first, end } = log.workers.get("w");
          return [...begunMs.subarray(first, end)];
        }"""
    )
    assert begun == [1020, 200_000, 301_015]
