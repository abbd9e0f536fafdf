"""Which scheduler group of one frontend computes a request: policies by the name that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from diptych.engine.embedded.dispatch.cache_aware import CacheAware
from diptych.engine.embedded.dispatch.policy import DispatchPolicy
from diptych.engine.embedded.dispatch.round_robin import RoundRobin
from diptych.engine.embedded.dispatch.shortest_queue import ShortestQueue

DispatchName = Literal["round_robin", "shortest_queue", "cache_aware"]

_POLICIES: Final[Mapping[str, Callable[[int], DispatchPolicy]]] = {
    "round_robin": lambda page_size: RoundRobin(),
    "shortest_queue": lambda page_size: ShortestQueue(),
    "cache_aware": CacheAware,
}


def new_policy(name: DispatchName, page_size: int) -> DispatchPolicy:
    """Return a fresh policy; `page_size` is that of the groups' prefix caches, in tokens."""
    return _POLICIES[name](page_size)
