"""The schedule policies by the name that selects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from diptych.engine.policies.deadline import EarliestDeadline
from diptych.engine.policies.fcfs import FirstComeFirstServed
from diptych.engine.policies.lpm import LongestPrefixMatch
from diptych.engine.policies.policy import Policy
from diptych.engine.policies.priority import Priority
from diptych.engine.request import Request

POLICIES: Final[Mapping[str, Callable[[Callable[[Request], int]], Policy]]] = {
    "fcfs": lambda cached_len: FirstComeFirstServed(),
    "lpm": LongestPrefixMatch,
    "priority": lambda cached_len: Priority(),
    "deadline": lambda cached_len: EarliestDeadline(),
}
