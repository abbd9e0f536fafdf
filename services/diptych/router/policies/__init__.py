"""Routing policies, by the name that the configuration uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.router.policies.least_load import least_load
from diptych.router.policies.policy import Policy
from diptych.router.policies.round_robin import round_robin

POLICIES: Final[Mapping[str, Policy]] = {"least_load": least_load, "round_robin": round_robin}
