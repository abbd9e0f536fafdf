"""What a client may say about where its request goes: a policy, a session, and how soon it wants its first token. Pure.

The same names over HTTP, as headers, and over gRPC, as metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.router.choose.policies import POLICIES

POLICY_HEADER: Final = "x-diptych-policy"
SESSION_HEADER: Final = "x-diptych-session"
TTFT_SLO_HEADER: Final = "x-diptych-ttft-slo-ms"
MAX_SESSION_LEN: Final = 256


@dataclass(frozen=True, slots=True)
class Routing:
    """What one request asks for. Empty: the router decides."""

    policy: str = ""  # one of `POLICIES`, instead of the configured one
    session: str = ""  # requests of one session go to the same workers, where the policy heeds it
    ttft_slo_s: float | None = None  # a first token that comes later than this is worth nothing


DEFAULT_ROUTING: Final = Routing()


def routing_of(headers: Mapping[str, str]) -> Routing:
    """Read a request's headers or metadata. Raises `InvalidRequest`."""
    policy, session = headers.get(POLICY_HEADER, ""), headers.get(SESSION_HEADER, "")
    slo_ms = headers.get(TTFT_SLO_HEADER, "")
    if not (policy or session or slo_ms):
        return DEFAULT_ROUTING
    if policy and policy not in POLICIES:
        text = f"there is no policy {policy!r}: use one of {', '.join(sorted(POLICIES))}"
        raise InvalidRequest(text, param=POLICY_HEADER)
    if len(session) > MAX_SESSION_LEN:
        raise InvalidRequest(f"a session's name has at most {MAX_SESSION_LEN} characters", param=SESSION_HEADER)
    return Routing(policy, session, _seconds(slo_ms) if slo_ms else None)


def _seconds(milliseconds: str) -> float:
    try:
        value = float(milliseconds)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        text = f"{TTFT_SLO_HEADER} must be a positive number of milliseconds, not {milliseconds!r}"
        raise InvalidRequest(text, param=TTFT_SLO_HEADER)
    return value / 1000
