"""What the console costs, and how soon it shows things: bytes and first paint, event to pixel, the router's CPU time.

A real router before simulated workers (`router_rig`), which tell of themselves as real ones do, and Debian's Chromium.
The router is measured with and without viewers in turns, while requests come at a fixed rate over connections that
stay, so that each of its processes has the same share of them all the time: CPU time is that of its threads alone. How
long the console keeps its event loop at a time is measured on a loop that times each piece of work. A waterfall is
compared with what the client measured of its own request.

    python bench/console.py [--quick] [--json] [--workers 64] [--viewers 5] [--rates 100,200] [--only pieces]

Where there are cores for it, so that each process and thread is told of by itself:

    python bench/console.py --only router --rates 500 --processes 8 --worker-processes 8 --model sim --rounds 8
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, stdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import report
from router_rig.load import NUMBER
from router_rig.platform import BENCH as FOLDER
from router_rig.platform import Cast, Platform, percentile, platform
from router_rig.steady import Answers, Steady
from router_rig.threads import Reading, read
from router_rig.timed_router import OTHERS
from router_rig.viewers import Viewers

from diptych.router.console.hub import LINGER_S

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request  # only the page needs it

BENCH: Final = "console"
CHROMIUM: Final = "/usr/bin/chromium"
NUM_TOKENS: Final = 16
SETTLE_S: Final = 1.5  # until streams have begun, or ended
MOST_FAILURES: Final = 0.001  # of all requests
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


@dataclass(frozen=True, slots=True)
class Turn:
    """A span of time, in which the same went on."""

    begun_s: float  # on the monotonic clock
    spent: Reading

    def has(self, at_s: float) -> bool:
        return self.begun_s <= at_s < self.begun_s + self.spent.at_s


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


@contextmanager
def asking(running: Platform, rate: float) -> Iterator[Callable[[], Answers]]:
    """Have requests come at a rate while the block runs; call what it gets at the end of it for what came of them."""
    words = json.dumps(asdict(Steady(running.port, json.dumps(BODY), rate)))
    command = [sys.executable, "-m", "router_rig.steady", words]
    with subprocess.Popen(command, cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, stop = process.stdout, process.stdin.close
        if told.readline().strip() != b"ready":
            raise SystemExit("the client did not begin")

        def answers() -> Answers:
            stop()
            return Answers(**json.loads(told.readline()))

        yield answers


def measure_router(running: Platform, options: Any, rate: float, out: report.Report) -> None:
    """In turns nobody and the viewers, while requests go on over the same connections: what is added, and to whom."""
    rounds, seconds = (2, 3.0) if options.quick else (options.rounds, options.seconds)
    alone, seen = list[Turn](), list[Turn]()
    with asking(running, rate) as answers:
        time.sleep(SETTLE_S)
        alone.append(turn(running, seconds))
        for _ in range(rounds):
            with looking(running, options.viewers, seconds + 60):
                time.sleep(SETTLE_S)
                seen.append(turn(running, seconds))
            time.sleep(LINGER_S + SETTLE_S)  # what is gathered for viewers goes on for so long after them
            alone.append(turn(running, seconds))
        asked = answers()
    if len(asked.failures) > MOST_FAILURES * len(asked.ttft_s):
        raise SystemExit(f"{len(asked.failures)} failed: {asked.failures[:3]}")
    words = f"{rate:g} requests/s, {options.viewers} viewers, {options.workers} workers"
    out.row(BENCH, f"router's CPU, nobody has looked, {words}", 100 * alone[0].spent.share, "% of a core")
    out.row(BENCH, "  nobody looks", 100 * median(each.spent.share for each in alone[1:]), "% of a core")
    tell_added(alone, seen, out)
    tell_first_tokens(alone, seen, asked, out)


def turn(running: Platform, seconds: float) -> Turn:
    before = read(running.pids)
    time.sleep(seconds)
    return Turn(before.at_s, read(running.pids).since(before))


def tell_added(alone: Sequence[Turn], seen: Sequence[Turn], out: report.Report) -> None:
    """Tell what the viewers add to all, to each process, and to the threads of each name."""

    def tell(what: str, of: Callable[[Reading], float], unit: str = "% of a core", scale: float = 100.0) -> None:
        added = _added(*([scale * of(each.spent) / each.spent.at_s for each in turns] for turns in (alone, seen)))
        out.row(BENCH, f"{what}; {_spread(added)}", median(added), unit)

    threads = {thread for each in seen for thread in each.spent.cpu_s}
    tell("  added", _cpu_s)
    tell("  added in the kernel, to a hundredth of a second", lambda spent: sum(spent.kernel_s.values()))
    tell("  added times that a thread waits", lambda spent: sum(spent.waits.values()), "a second", 1.0)
    for process in sorted({thread.process for thread in threads}):
        tell(f"  added to process {process} (0: the parent)", partial(_cpu_s, process=process))
    for name in sorted({thread.name for thread in threads}):
        tell(f"  added to threads {name}", partial(_cpu_s, name=name))


def tell_first_tokens(alone: Sequence[Turn], seen: Sequence[Turn], asked: Answers, out: report.Report) -> None:
    """Quantiles of each turn, so that one bad moment of the machine is in one of them."""
    pairs = sorted(zip(asked.due_s, asked.ttft_s, strict=True))
    for share in (0.5, 0.9, 0.99):
        quiet, looked_at = (
            [1e3 * percentile([ttft_s for due_s, ttft_s in pairs if each.has(due_s)], share) for each in turns]
            for turns in (alone, seen)
        )
        out.row(BENCH, f"  first token p{100 * share:.0f}, nobody looks, median of turns", median(quiet), "ms")
        added = _added(quiet, looked_at)
        out.row(BENCH, f"  added; {_spread(added)}", median(added), "ms", 1.0, "wanted")


def _cpu_s(spent: Reading, process: int | None = None, name: str = "") -> float:
    """Return that of the threads of a process, or of a name; without both, of all."""
    mine = (thread for thread in spent.cpu_s if process in (None, thread.process) and name in ("", thread.name))
    return sum(spent.cpu_s[thread] for thread in mine)


def _added(alone: Sequence[float], seen: Sequence[float]) -> Sequence[float]:
    """Return how much more each turn with viewers has than the two beside it, without them."""
    return [each - (old + new) / 2 for old, each, new in zip(alone[:-1], seen, alone[1:], strict=True)]


def _spread(values: Sequence[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{min(values):.2f} to {max(values):.2f}, standard error {error:.2f}"


def measure_pieces(options: Any, rate: float, out: report.Report) -> None:
    """How long the console keeps the router's loop from all else at a time, and requests from their first byte."""
    seconds = 5.0 if options.quick else 20.0
    with TemporaryDirectory() as folder:
        file = Path(folder, "pieces.json")
        with platform(_cast(options, 1, router=("router_rig.timed_router", str(file)))) as running:
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
    parser.add_argument("--processes", type=int, default=1, help="of the router, where all of them are measured")
    parser.add_argument("--worker-processes", type=int, default=1, help="that the simulated workers are spread over")
    parser.add_argument("--model", default="smollm2", help="`sim` needs no file")
    parser.add_argument("--only", choices=("pieces", "router", "page"), help="a part")
    options = parser.parse_args()
    with report.Report(as_json=options.json) as out:
        for rate in options.rates if options.only in (None, "pieces") else ():
            measure_pieces(options, rate, out)
        if options.only != "pieces":
            with platform(_cast(options, options.processes)) as running:
                _measure_running(running, options, out)


def _measure_running(running: Platform, options: Any, out: report.Report) -> None:
    for rate in options.rates if options.only != "page" else ():
        measure_router(running, options, rate, out)
    if options.only == "router":
        return
    measure_waterfall(running, 20, out)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        measure_page(running, browser.new_context(bypass_csp=True).new_page(), out)
        measure_event_to_pixel(running, browser.new_page(), 10 if options.quick else 40, out)
        browser.close()


def _cast(options: Any, processes: int, **fields: Any) -> Cast:
    pairs = options.workers // 2
    return Cast(
        num_pairs=pairs,
        pairs_a_process=-(-pairs // options.worker_processes),
        model=options.model,
        router_options={"workers": processes} if processes > 1 else {},
        **fields,
    )


def _rates(text: str) -> Sequence[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
