"""What the console costs, and how soon it shows things: bytes and first paint, event to pixel, the router's CPU time.

A real router before simulated workers (`router_rig`), which tell of themselves as real ones do, and Debian's Chromium.
The router is measured with and without viewers in turns, at fixed rates of requests: CPU time is that of its threads
alone. How long the console keeps its event loop at a time is measured on a loop that times each piece of work. A
waterfall is compared with what the client measured of its own request.

    python bench/console.py [--quick] [--json] [--workers 64] [--viewers 5] [--rates 100,200] [--only pieces]
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import report
from playwright.sync_api import Page, Request, sync_playwright
from router_rig.load import NUMBER
from router_rig.platform import BENCH as FOLDER
from router_rig.platform import Cast, Platform, percentile, platform
from router_rig.timed_router import OTHERS
from router_rig.viewers import Viewers

from diptych.router.console.hub import LINGER_S

BENCH: Final = "console"
CHROMIUM: Final = "/usr/bin/chromium"
NUM_TOKENS: Final = 16
BODY: Final[Mapping[str, Any]] = {
    "messages": [{"role": "user", "content": f"{NUMBER}: who looks at this?"}],
    "max_tokens": NUM_TOKENS,
    "stream": True,
    "ignore_eos": True,
}
FIRST_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
SEE: Final = """id => new Promise(resolve => {
  const name = `a[href="#/requests/${id}"]`;
  const seen = () => document.querySelector(name) && (observer.disconnect(), resolve(Date.now() / 1000));
  const observer = new MutationObserver(seen);
  observer.observe(document.body, {childList: true, subtree: true, attributes: true});
  seen();
})"""


class Cost:
    """What a rate of requests took of a router."""

    def __init__(self, cpu_s: float, seconds: float, ttft_s: Sequence[float]) -> None:
        self.cpu_share = cpu_s / seconds  # of a core
        self.request_s = cpu_s / max(1, len(ttft_s))  # of processor time; the warm-up is part of it
        self.ttft_s = ttft_s


@contextmanager
def looking(running: Platform, num_viewers: int, seconds: float) -> Iterator[None]:
    """Have so many viewers look while the block runs."""
    if not num_viewers:
        yield
        return
    command = [sys.executable, "-m", "router_rig.viewers"]
    process = subprocess.Popen(command, cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asdict(Viewers(running.port, num_viewers, seconds))).encode())
    process.stdin.close()
    if process.stdout.readline().strip() != b"ready":
        raise SystemExit("the viewers saw nothing")
    try:
        yield
    finally:
        process.kill()
        process.wait()


def cost(running: Platform, num_viewers: int, rate: float, seconds: float, number: int) -> Cost:
    if not num_viewers:
        time.sleep(LINGER_S)  # what is gathered for viewers goes on for so long after them
    with looking(running, num_viewers, seconds + 60):
        began_s, before_s = time.monotonic(), _cpu_s(running)
        fates = running.arrivals(BODY, rate, seconds, first_number=number)
        took_s = time.monotonic() - began_s
        if fates.failures or fates.refused_s:
            raise SystemExit(f"{len(fates.refused_s)} were refused, {fates.failures[:3]} failed")
        return Cost(_cpu_s(running) - before_s, took_s, fates.ttft_s)


def _cpu_s(running: Platform) -> float:
    """Return the time that the kernel gave the threads of the router."""
    files = (file for pid in running.pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure_router(running: Platform, options: Any, rate: float, out: report.Report) -> None:
    """In turns, nobody and the viewers: the medians of their differences, and the first tokens of all rounds."""
    rounds, seconds = (2, 3.0) if options.quick else (options.rounds, options.seconds)
    costs: dict[int, list[Cost]] = {0: [], options.viewers: []}
    for index in range(rounds):
        for num_viewers in sorted(costs, reverse=bool(index % 2)):
            number = int(NUMBER) + 1_000_000 * (2 * index + bool(num_viewers)) + 100_000 * round(rate)
            costs[num_viewers].append(cost(running, num_viewers, rate, seconds, number))
    alone, seen = costs.values()
    out.row(BENCH, f"router's CPU, nobody looks, {rate:g} requests/s", 100 * _median(alone, "cpu_share"), "% of a core")
    out.row(BENCH, "  a request", 1e3 * _median(alone, "request_s"), "ms")
    words = f"{options.viewers} viewers, {options.workers} workers"
    added = [after.cpu_share - before.cpu_share for before, after in zip(alone, seen, strict=True)]
    out.row(BENCH, f"  added, {words}", 100 * median(added), "% of a core", 1.0, "wanted")
    for share in (0.5, 0.9, 0.99):
        before_s, after_s = (
            percentile([ttft_s for each in those for ttft_s in each.ttft_s], share) for those in (alone, seen)
        )
        out.row(BENCH, f"  first token p{100 * share:.0f}, nobody looks", 1e3 * before_s, "ms")
        out.row(BENCH, f"  added, {words}", 1e3 * (after_s - before_s), "ms", 1.0, "wanted")


def _median(costs: Sequence[Cost], name: str) -> float:
    return float(median(getattr(each, name) for each in costs))


def measure_pieces(options: Any, rate: float, out: report.Report) -> None:
    """How long the console keeps the router's loop from all else at a time, and requests from their first byte."""
    seconds = 5.0 if options.quick else 20.0
    with TemporaryDirectory() as folder:
        file = Path(folder, "pieces.json")
        with platform(_cast(options, router=("router_rig.timed_router", str(file)))) as running:
            taken(running, file)
            running.arrivals(BODY, rate, seconds)
            tell_pieces(taken(running, file), f"{rate:g} requests/s, nobody has looked", out)
            with looking(running, options.viewers, seconds + 60):
                tell_pieces(taken(running, file), "viewers come", out)
                running.arrivals(BODY, rate, seconds)
                tell_pieces(taken(running, file), f"{rate:g} requests/s, {options.viewers} viewers", out)


def tell_pieces(pieces: Mapping[str, Any], when: str, out: report.Report) -> None:
    kinds, waited_s = dict(pieces["kinds"]), pieces["waited_s"]
    others_s, garbage_s = kinds.pop(OTHERS)["long_s"], pieces["garbage"]["long_s"]
    long_s = [*itertools.chain.from_iterable(kind["long_s"] for kind in kinds.values())]
    out.row(BENCH, f"longest piece of the console, {when}", 1e3 * max(long_s, default=0.0), "ms", 0.5, "wanted")
    out.row(BENCH, "  pieces of more than 0.5 ms", sum(each > 5e-4 for each in long_s), "")
    out.row(BENCH, "  longest piece of all else", 1e3 * max(others_s, default=0.0), "ms")
    out.row(BENCH, "  longest search for garbage, in any piece", 1e3 * max(garbage_s, default=0.0), "ms")
    for share in (0.5, 0.99, 1.0) if waited_s else ():
        words = f"  pieces of the console before a request's first byte, p{100 * share:.0f} of {len(waited_s)}"
        out.row(BENCH, words, 1e3 * percentile(waited_s, share), "ms", 1.0, "wanted")


def taken(running: Platform, file: Path) -> dict[str, Any]:
    """Return what the router's loop did since this was asked last."""
    file.unlink(missing_ok=True)
    os.kill(running.pids[0], signal.SIGUSR2)
    while not file.exists():
        time.sleep(0.01)
    pieces: dict[str, Any] = json.loads(file.read_text())
    return pieces


def measure_page(running: Platform, page: Page, out: report.Report) -> None:
    sizes: dict[str, int] = {}

    def note(request: Request) -> None:
        sizes[request.url] = request.sizes()["responseBodySize"]

    page.on("requestfinished", note)
    page.goto(f"http://127.0.0.1:{running.port}/console/", wait_until="load")
    page.wait_for_function(FIRST_PAINT)
    foreign = [url for url in sizes if not url.startswith(f"http://127.0.0.1:{running.port}/")]
    static = sum(size for url, size in sizes.items() if "/console/api/" not in url)
    out.row(BENCH, "bytes of the page, as sent", static / 1000, "kB", 150, "wanted", 150 / (static / 1000))
    out.row(BENCH, "requests to others", len(foreign), "")
    paints = [_first_paint_ms(page) for _ in range(5)]
    out.row(BENCH, "first paint", median(paints), "ms", 300, "wanted", 300 / median(paints))


def _first_paint_ms(page: Page) -> float:
    page.reload(wait_until="load")
    page.wait_for_function(FIRST_PAINT)
    return float(page.evaluate(FIRST_PAINT))


def measure_event_to_pixel(running: Platform, page: Page, num_events: int, out: report.Report) -> None:
    """From the moment that a request is sent to that when a viewer has its row on the screen."""
    page.goto(f"http://127.0.0.1:{running.port}/console/#/requests")
    delays_s = []
    for index in range(num_events):
        request_id = f"seen-{index}-{int(time.time())}"
        with ThreadPoolExecutor(1) as asking:
            began_s = time.time()
            asking.submit(ask, running, request_id)
            delays_s.append(page.evaluate(SEE, request_id) - began_s)
        page.wait_for_timeout(37 * index % 500)  # the stream has a rhythm: requests come at any time of it
    for share in (0.5, 0.95):
        value = 1e3 * percentile(delays_s, share)
        out.row(BENCH, f"event to pixel p{100 * share:.0f}", value, "ms", 500, "wanted", 500 / value)


def ask(running: Platform, request_id: str) -> float:
    """Return how long a request takes its client, in seconds."""
    headers = {"content-type": "application/json", "x-request-id": request_id}
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    began_s = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(BODY).encode(), headers), timeout=30) as answer:
        answer.read()
    return time.monotonic() - began_s


def measure_waterfall(running: Platform, num_requests: int, out: report.Report) -> None:
    """The whole of the bars, as a part of what the client measured, and what of it has no name."""
    named, off_ms = [], []
    with looking(running, 1, 600.0):
        for index in range(num_requests):
            request_id = f"story-{index}"
            took_s = ask(running, request_id)
            time.sleep(0.05)  # the last words of a leg may come behind the answer
            url = f"http://127.0.0.1:{running.port}/console/api/requests/{request_id}"
            story = json.load(urllib.request.urlopen(url, timeout=10))
            whole_s = sum(bar["duration_s"] for bar in story["bars"])
            named.append(1 - story["unnamed_s"] / story["row"]["duration_s"])
            off_ms.append(1e3 * (abs(took_s - whole_s) - 0.01 * took_s))
    out.row(BENCH, "time of a call that has a name, least of all", min(named), "", 0.97, "wanted", min(named) / 0.97)
    out.row(BENCH, "bars against the client's clock, beyond 1 %, p95", percentile(off_ms, 0.95), "ms", 1.0, "wanted")


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=64, help="simulated ones, half of each role")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--rates", type=_rates, default=(200.0,), help="requests/s, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--only", choices=("pieces", "router", "page"), help="a part")
    options = parser.parse_args()
    with report.Report(as_json=options.json) as out:
        for rate in options.rates if options.only in (None, "pieces") else ():
            measure_pieces(options, rate, out)
        if options.only != "pieces":
            with platform(_cast(options)) as running:
                _measure_running(running, options, out)


def _measure_running(running: Platform, options: Any, out: report.Report) -> None:
    for rate in options.rates if options.only != "page" else ():
        measure_router(running, options, rate, out)
    if options.only == "router":
        return
    measure_waterfall(running, 20, out)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        measure_page(running, browser.new_context(bypass_csp=True).new_page(), out)
        measure_event_to_pixel(running, browser.new_page(), 10 if options.quick else 40, out)
        browser.close()


def _cast(options: Any, **fields: Any) -> Cast:
    return Cast(num_pairs=options.workers // 2, pairs_a_process=options.workers // 2, **fields)


def _rates(text: str) -> Sequence[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
