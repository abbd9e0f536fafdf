"""The policies that options name. Who reads options need not have what decides by them, as frontends have not."""

from __future__ import annotations

from typing import Literal

EvictionPolicy = Literal["lru", "lfu"]  # of `cache.eviction`
SchedulePolicy = Literal["fcfs", "lpm", "priority", "deadline"]  # of `schedule.policies`
