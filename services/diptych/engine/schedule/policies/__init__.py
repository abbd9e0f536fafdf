"""The schedule policies by the name that selects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from diptych.engine.schedule.policies.deadline import EarliestDeadline
from diptych.engine.schedule.policies.fcfs import FirstComeFirstServed
from diptych.engine.schedule.policies.lpm import LongestPrefixMatch
from diptych.engine.schedule.policies.policy import Policy
from diptych.engine.schedule.policies.priority import Priority
from diptych.engine.values.request import Request

POLICIES: Final[Mapping[str, Callable[[Callable[[Request], int]], Policy]]] = {
    "fcfs": lambda cached_len: FirstComeFirstServed(),
    "lpm": LongestPrefixMatch,
    "priority": lambda cached_len: Priority(),
    "deadline": lambda cached_len: EarliestDeadline(),
}
