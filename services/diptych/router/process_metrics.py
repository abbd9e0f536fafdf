"""The metrics of all processes of a router as one page, each sample with the number of its process."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from diptych.common.health import Page, Pages
from diptych.common.reachable import local_host
from diptych.router.share import Share

TIMEOUT_S: Final = 2.0
SCRAPE_S: Final = 8.0  # of the health port: that of all processes, one after another
PATH: Final = "/metrics"
TEXT: Final = CONTENT_TYPE_PLAIN_0_0_4


class ProcessMetrics:
    """Asks the other processes for theirs. Blocks while it does: call it in a thread."""

    def __init__(self, share: Share, host: str) -> None:
        self._share = share
        self._host = local_host(host)

    def exposition(self, own: bytes) -> bytes:
        """Return the page; a process that does not answer, or only with an error, is missing."""
        pages = {self._share.index: own}
        for index, port in enumerate(self._share.ports):
            if index != self._share.index and (page := _ask(self._host, port)) is not None:
                pages[index] = page
        return merged([pages.get(index, b"") for index in range(len(self._share.ports))])


def pages_for_health(listening: str, port: int) -> Pages:
    """Return the page of metrics for the health port, where no client comes: what the HTTP port says now."""

    def page() -> Page:
        found = _ask(local_host(listening), port, timeout_s=SCRAPE_S)
        return Page(503, "text/plain", b"the HTTP port does not answer\n") if found is None else Page(200, TEXT, found)

    return {PATH: page}


def _ask(host: str, port: int, timeout_s: float = TIMEOUT_S) -> bytes | None:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        page = answer.read()
        return page if answer.status == 200 else None  # what is no page of metrics would spoil those of all
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def merged(pages: Sequence[bytes]) -> bytes:
    """Return one page for those of processes 0, 1, ..., with a label `process`."""
    registry = CollectorRegistry()
    registry.register(_Families(pages))
    return generate_latest(registry)


class _Families:
    """A collector of what is on the pages."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process, page in enumerate(self._pages):
            for found in text_string_to_metric_families(page.decode()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    labels = {**sample.labels, "process": str(process)}
                    family.add_sample(sample.name, labels, sample.value, sample.timestamp)
        yield from families.values()
