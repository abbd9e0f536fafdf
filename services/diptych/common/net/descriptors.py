"""Raises and reads the number of files and sockets that this process may have open.

A shell's usual limit is 1,024, for programs that use select(); nothing here does, so a server takes what it may have.
Without a free descriptor no connection can be accepted, and none be opened to a worker: so connections get a part only.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS: Final = 1 << 20  # some systems allow a thousand times that, and tables are made for it
FEW_DESCRIPTORS: Final = 1024  # an idle process takes 30; a connection one, an open answer two
PORT_SHARE: Final = 3  # clients of a port may take one part in so many: a router has two such ports, and workers


def use_all_descriptors() -> None:
    """Raise this process's limit of open files to the highest it may set, and say so where that is little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEW_DESCRIPTORS:
        logger.warning("only %d files may be open: connections beyond that wait; raise the limit (ulimit -Hn)", wanted)


def connections_within(wanted: int) -> int:
    """Return how many connections a port may have that would like to have `wanted`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // PORT_SHARE))
