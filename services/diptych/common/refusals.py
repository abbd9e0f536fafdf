"""Counts the calls that were refused because the caller is not trusted, and logs at most one a second for a peer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

REASONS: Final = ("no_token", "wrong_token", "not_permitted")
LOG_INTERVAL_S: Final = 1.0
MAX_PEERS: Final = 256  # remembered for the log


class Refusals(Collector):
    """The refusals of one process, by reason."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = Counter(dict.fromkeys(REASONS, 0))  # shown before the first: its rate would not count that one
        self._logged_s: dict[str, float] = {}  # by host of the peer

    def note(self, reason: str, peer: str, method: str) -> None:
        """Count a refusal. `peer` is as gRPC writes it, "ipv4:10.0.0.1:2345"."""
        self._counts[reason] += 1
        if self._may_log(peer.rpartition(":")[0]):
            logger.warning("refused %s of %s: %s", method, peer, reason)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "diptych_auth_refusals", "Calls refused because the caller did not prove to belong here", labels=["reason"]
        )
        for reason, count in list(self._counts.items()):  # another thread may count
            family.add_metric([reason], count)
        yield family

    def _may_log(self, host: str) -> bool:
        now_s = self._clock()
        if now_s - self._logged_s.get(host, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        if len(self._logged_s) >= MAX_PEERS:
            self._logged_s.clear()
        self._logged_s[host] = now_s
        return True
