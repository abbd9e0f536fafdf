"""A request of a scheduler, whose account and life are said field by field."""

from __future__ import annotations

import math
from typing import Any

from diptych.common.arrays import I64
from diptych.engine.values.request import Request, new_request
from diptych.generation.request_groups import Account, Life
from diptych.generation.sampling_params import SamplingParams


def flat_request(
    room: int,
    prompt: I64,
    params: SamplingParams,
    *,
    tenant: str = "",
    priority: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    **others: Any,
) -> Request:
    """Without `deadline_s` it has none."""
    life = Life(arrival_s=arrival_s, deadline_s=math.inf if deadline_s is None else deadline_s)
    return new_request(room, prompt, params, account=Account(tenant, priority), life=life, **others)
