"""What one of several processes of a router knows of the others: its number, and where each is reached by itself.

Clients reach any of them at the ports that they share. Who means a certain one reaches it at a port of its own.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from diptych.router.keys.ledger import Ledger
from diptych.router.process.session_link import PoolsOfModel, SessionLink

VARIABLE: Final = "DIPTYCH_ROUTER_SHARE"  # set by the parent


@dataclass(frozen=True, slots=True)
class Share:
    """The place of one process among all."""

    index: int
    ports: Sequence[int]  # for HTTP, of each process
    ledger_descriptor: int  # of the memory in which all count what the holders of keys use
    ledger_identity: int  # by which other routers know that memory
    session_descriptor: int  # of a socket whose other end is the parent, which has the line of sessions

    @property
    def own_port(self) -> int:
        return self.ports[self.index]

    def ledger(self) -> Ledger:
        """Return that memory, as this process sees it."""
        return Ledger(len(self.ports), self.index, self.ledger_descriptor, identity=self.ledger_identity)

    def session_link(self, pools: Sequence[PoolsOfModel]) -> SessionLink:
        """Return the way to that line; `pools`: of each model, as this process sees them."""
        return SessionLink(socket.socket(fileno=self.session_descriptor), pools)

    def environment(self) -> dict[str, str]:
        """Return what tells it to the process."""
        return {VARIABLE: json.dumps(asdict(self))}


def share_of_this_process() -> Share | None:
    """Return what the parent said; None in a router that is one process."""
    told = os.environ.pop(VARIABLE, "")
    return Share(**json.loads(told)) if told else None
