"""The metrics of a router at its health port: of this process, or of all its processes as one page.

What is counted changes on the event loop, so the page is made there, whoever asks for it.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from diptych.common.health.health import Page, Pages
from diptych.common.net.reachable import local_host

TIMEOUT_S: Final = 2.0  # for the page of one process
PATH: Final = "/metrics"
TEXT: Final = CONTENT_TYPE_PLAIN_0_0_4
NO_PAGE: Final = (503, "text/plain")


def page_of_process(loop: asyncio.AbstractEventLoop, exposition: Callable[[], bytes]) -> Pages:
    """Return the page of this process, made on `loop` for askers in other threads."""

    async def made() -> bytes:
        return exposition()

    def page() -> Page:
        try:
            return Page(200, TEXT, asyncio.run_coroutine_threadsafe(made(), loop).result(TIMEOUT_S))
        except TimeoutError:
            return Page(*NO_PAGE, b"the event loop does not come round\n")

    return {PATH: page}


class ProcessMetrics:
    """Asks the processes at `ports` of this machine for theirs. Blocks while it does: call it in a thread."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._host = local_host(host)
        self._ports = ports

    def pages(self) -> Pages:
        """Return the page of all of them."""
        return {PATH: self._page}

    def exposition(self, known: Mapping[int, bytes]) -> bytes:
        """Return one page, with those that are `known` by their index; who does not answer, or ill, is missing."""
        return merged(self._ask_all(known))

    def _page(self) -> Page:
        pages = self._ask_all({})
        if not any(pages):
            return Page(*NO_PAGE, b"no process of this router answers\n")
        return Page(200, TEXT, merged(pages))

    def _ask_all(self, known: Mapping[int, bytes]) -> list[bytes]:
        return [known.get(index) or _ask(self._host, port) for index, port in enumerate(self._ports)]


def _ask(host: str, port: int) -> bytes:
    """Return the page; nothing where there is none: what is no page of metrics would spoil those of all."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        page = answer.read()
        return page if answer.status == 200 else b""
    except (OSError, http.client.HTTPException):
        return b""
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
