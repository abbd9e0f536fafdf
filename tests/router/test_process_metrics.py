"""The metrics of a router of several processes."""

from __future__ import annotations

from diptych.common.health import HealthServer, Page
from diptych.common.ports import free_ports
from diptych.common.probes import Probes, Verdict
from diptych.router.process_metrics import ProcessMetrics, merged, pages_for_health
from diptych.router.share import Share

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
    (port,) = free_ports("127.0.0.1", 1)
    assert pages_for_health("127.0.0.1", port)["/metrics"]().status == 503


def test_metrics_of_a_process_that_answers_with_an_error_are_missing() -> None:
    ill = {"/metrics": lambda: Page(500, "text/plain", b"Internal Server Error")}
    with HealthServer("127.0.0.1", 0, Probes(*[lambda: GOOD] * 3), ill) as server:
        metrics = ProcessMetrics(Share(0, [0, server.port]), "127.0.0.1")
        assert b'a{process="0"} 1.0' in metrics.exposition(b"a 1.0\n")
