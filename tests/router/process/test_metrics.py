"""The metrics of a router at its health port."""

from __future__ import annotations

import asyncio
import threading

from diptych.common.health.health import HealthServer, Page
from diptych.common.net.ports import free_ports
from diptych.common.verdicts.probes import Probes, Verdict
from diptych.router.process.health import ProcessMetrics, merged, page_of_process

GOOD = Verdict(True, "fine")


def test_samples_of_all_processes_stand_under_one_head() -> None:
    page = b'# HELP a_total What\n# TYPE a_total counter\na_total{api="chat"} %d\n'
    assert merged([page % 3, b"", page % 4]).decode().splitlines() == [
        "# HELP a_total What",
        "# TYPE a_total counter",
        'a_total{api="chat",process="0"} 3.0',
        'a_total{api="chat",process="2"} 4.0',
    ]


def test_metrics_of_a_router_that_does_not_answer_are_unavailable() -> None:
    assert ProcessMetrics("127.0.0.1", free_ports("127.0.0.1", 2)).pages()["/metrics"]().status == 503


def test_metrics_of_a_process_that_answers_with_an_error_are_missing() -> None:
    ill = {"/metrics": lambda: Page(500, "text/plain", b"Internal Server Error")}
    with HealthServer("127.0.0.1", 0, Probes(*[lambda: GOOD] * 3), ill) as server:
        metrics = ProcessMetrics("127.0.0.1", [0, server.port])
        assert b'a{process="0"} 1.0' in metrics.exposition({0: b"a 1.0\n"})


def test_the_page_is_made_on_the_event_loop_whoever_asks() -> None:
    def exposition() -> bytes:
        return threading.current_thread().name.encode()

    async def run() -> tuple[Page, str]:
        page = page_of_process(asyncio.get_running_loop(), exposition)["/metrics"]
        return await asyncio.to_thread(page), threading.current_thread().name

    page, loops_thread = asyncio.run(run())
    assert (page.status, page.body) == (200, loops_thread.encode())
