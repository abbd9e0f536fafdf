"""The probes of a router that is several processes: each is asked at its own health port.

A process whose port is closed is being started again and gets no connections: it makes nobody unready, as long as
another one answers. One that answers that it is not well, or not ready, does, and so does one that is silent at its
open port, which hangs: both get their part of the connections. One that is being drained counts as little as one that
is gone: it serves whoever reaches it, and leaves the shared ports before it refuses anybody.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from functools import partial
from typing import Final

from diptych.common.health.probes import Probe, Probes, Verdict
from diptych.common.net.reachable import local_host
from diptych.router.process.health import DRAINING

TIMEOUT_S: Final = 1.0


class ProcessProbes:
    """Asks the processes at `ports` of this machine."""

    def __init__(self, host: str, ports: Sequence[int], live: Probe, timeout_s: float = TIMEOUT_S) -> None:
        """`live` is the parent's own: it ends processes that hang, so nobody needs to restart all of them for one."""
        self._host = local_host(host)
        self._ports = ports
        self._timeout_s = timeout_s
        self.probes = Probes(live, *(partial(self._ask_all, name) for name in ("ready", "startup", "answers")))

    def _ask_all(self, name: str) -> Verdict:
        answers = [self._ask(port, name) for port in self._ports]
        return judge([answer for answer in answers if answer is not None], len(self._ports))

    def _ask(self, port: int, name: str) -> Verdict | None:
        """Return None for a process that is gone."""
        connection = http.client.HTTPConnection(self._host, port, timeout=self._timeout_s)
        try:
            connection.request("GET", f"/health/{name}")
            answer = connection.getresponse()
            return Verdict(answer.status == 200, json.load(answer)["reason"])
        except TimeoutError:
            return Verdict(
                False, f"process {self._ports.index(port)} hangs: it has not answered for {self._timeout_s:g} s"
            )
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def judge(answers: Sequence[Verdict], num_processes: int) -> Verdict:
    """Return the first bad answer of those that stay; good ones together are good."""
    staying = [answer for answer in answers if answer != DRAINING]
    bad = next((answer for answer in staying if not answer.is_good), None)
    if bad is not None:
        return bad
    if answers and not staying:
        return DRAINING
    return Verdict(bool(staying), f"{len(staying)} of {num_processes} processes answer")
