"""Decides what a caller is to the platform, and what it may call. Pure, and the only place that decides it.

Rule: a call that is not listed is only for callers that are every party, such as holders of a token without a party.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final


class Party(enum.Enum):
    """What a member is. Tokens and certificates name it by these words."""

    WORKER = "worker"
    ROUTER = "router"
    OPERATOR = "operator"  # changes what members do
    VIEWER = "viewer"  # sees how they are


Parties = frozenset[Party]

NOBODY: Final[Parties] = frozenset()
EVERY: Final[Parties] = frozenset(Party)

_OPERATOR: Final = frozenset({Party.OPERATOR})
_READERS: Final = frozenset({Party.ROUTER, Party.OPERATOR, Party.VIEWER})  # commands run in a router's pod, too

MAY_CALL: Final[Mapping[str, Parties]] = MappingProxyType(
    {
        "/diptych.v1.Bootstrap/Register": frozenset({Party.WORKER, Party.ROUTER}),  # each as what it is
        "/diptych.v1.Bootstrap/Watch": EVERY,  # link keys are for workers only
        "/diptych.v1.Worker/Session": frozenset({Party.ROUTER}),
        "/diptych.v1.Worker/GetStatus": _READERS,
        "/diptych.v1.Worker/Watch": _READERS,
        "/diptych.v1.WorkerAdmin/ListLoras": _READERS,
        "/diptych.v1.WorkerAdmin/LoadLora": frozenset({Party.ROUTER, Party.OPERATOR}),  # a router's --runtime-lora
        "/diptych.v1.WorkerAdmin/UnloadLora": frozenset({Party.ROUTER, Party.OPERATOR}),
        "/diptych.v1.WorkerAdmin/UpdateWeights": _OPERATOR,
        "/diptych.v1.WorkerAdmin/Drain": _OPERATOR,
        "/diptych.v1.WorkerAdmin/SetRole": _OPERATOR,
        "/diptych.v1.WorkerAdmin/SetLogLevel": _OPERATOR,
        "/diptych.v1.WorkerAdmin/FlushCache": _OPERATOR,
        "/diptych.v1.WorkerAdmin/StartProfile": _OPERATOR,
        "/diptych.v1.WorkerAdmin/StopProfile": _OPERATOR,
        "/diptych.v1.NodeGroup/Join": frozenset({Party.WORKER}),
        "/diptych.v1.KvBench/Join": frozenset({Party.WORKER, Party.OPERATOR}),  # a command, run where workers run
        "/diptych.v1.KvBench/Digest": frozenset({Party.WORKER, Party.OPERATOR}),
        "/grpc.health.v1.Health/Watch": EVERY,
        "/grpc.health.v1.Health/List": EVERY,
        "GET /drain": _READERS,
        "POST /drain": _OPERATOR,
        "GET /role": _READERS,
        "POST /role": _OPERATOR,
        "GET /weight_version": _READERS,
        "POST /update_weights_from_disk": _OPERATOR,
        "POST /update_weights_from_tensor": _OPERATOR,
        "POST /update_weights_from_distributed": _OPERATOR,
        "POST /init_weights_update_group": _OPERATOR,
        "POST /destroy_weights_update_group": _OPERATOR,
        "POST /release_memory_occupation": _OPERATOR,
        "POST /resume_memory_occupation": _OPERATOR,
        "POST /pause_generation": _OPERATOR,
        "POST /continue_generation": _OPERATOR,
        "GET /admin/drain": _READERS,
        "POST /admin/drain": _OPERATOR,
        "GET /admin/declared": _READERS,
        "POST /admin/declared": _OPERATOR,
        "GET /admin/workers": _READERS,
        "GET /admin/explain/{request_id:path}": _READERS,
        "GET /get_server_info": _READERS,  # in the words of other servers, as the next ones
        "GET /server_info": _READERS,
        "GET /get_load": _READERS,
        "POST /flush_cache": _OPERATOR,
        "POST /start_profile": _OPERATOR,
        "POST /stop_profile": _OPERATOR,
        "POST /abort_request": _OPERATOR,  # of others: clients abort their own
        "GET /console/api/me": _READERS,
        "GET /console/api/stream": _READERS,
        "GET /console/api/fleet": _READERS,
        "GET /console/api/requests": _READERS,  # routers ask each other
        "GET /console/api/requests/{request_id:path}": _READERS,
        "GET /console/api/cache": _READERS,
        "GET /console/api/charts": _READERS,
        "GET /console/api/steps": _READERS,
        "POST /console/api/acts/drain": _OPERATOR,
        "POST /console/api/acts/role": _OPERATOR,
        "POST /console/api/acts/load-adapter": _OPERATOR,
        "POST /console/api/acts/unload-adapter": _OPERATOR,
        "POST /console/api/acts/log-level": _OPERATOR,
    }
)

BY_ITSELF: Final[Mapping[str, Parties]] = MappingProxyType(  # from its own host, as it leaves: a `preStop` hook
    {
        "/diptych.v1.Worker/GetStatus": frozenset({Party.WORKER}),
        "/diptych.v1.WorkerAdmin/Drain": frozenset({Party.WORKER}),
        "POST /drain": frozenset({Party.WORKER}),
        "POST /admin/drain": frozenset({Party.ROUTER}),
    }
)


def certified(names: Iterable[str], platform: str) -> Parties:
    """Return what a certificate with these DNS names makes of its holder: all, unless it names parties."""
    given = frozenset(names)
    return frozenset(party for party in Party if f"{party.value}.{platform}" in given) or EVERY


def may_call(parties: Parties, action: str) -> bool:
    """Whether one of these parties may make a call: of a gRPC method, or of an HTTP method and path."""
    return parties == EVERY or not parties.isdisjoint(MAY_CALL.get(action, NOBODY))


def may_call_itself(parties: Parties, action: str) -> bool:
    """Whether one of these parties may make a call that comes from the host of the member that it calls."""
    return not parties.isdisjoint(BY_ITSELF.get(action, NOBODY))


def words_for(parties: Parties, action: str) -> str:
    """Return why a call is refused, and what it takes."""
    wanted = MAY_CALL.get(action, NOBODY)
    takes = f"it takes that of {_any_of(wanted)}" if wanted else "it takes one that is for every party"
    return f"{action} is not for the token or certificate of {_any_of(parties) or 'nobody'}: {takes}"


def _any_of(parties: Parties) -> str:
    ordered = (party for party in Party if party in parties)
    return " or ".join(f"{'an' if party is Party.OPERATOR else 'a'} {party.value}" for party in ordered)
