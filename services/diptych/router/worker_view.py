"""Workers as the deciding modules see them: values, taken at the moment of a decision."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.common.membership import State


class Role(enum.Enum):
    """Which half of a request a worker serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What decides whether a worker may serve, and with whom."""

    instance_id: int
    role: Role
    state: State
    model_id: str  # that it was started with: its weights may have been updated since
    compat: str  # pairs need equal ones
    session_open: bool
    linked: frozenset[int]  # peers to which it has a transfer endpoint
    adapters: Mapping[str, str] = field(default_factory=dict)  # loaded: name to fingerprint
    paused: bool = False  # takes no new legs for a moment
    not_ready: str = ""  # why a worker that has loaded is not ready


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is: the larger of what it reported last and what this router has open there.

    The larger, not the sum: a report already counts the legs of this router, only later.
    """

    num_requests: int
    queued_tokens: int  # prompt tokens that wait to be computed
    free_tokens: int  # KV memory, in tokens
    has_credit: bool = True  # decode: it can grant pages now; False while requests there wait for theirs
    queued_transfer_bytes: int = 0  # prefill: of KV, not yet at the decode workers
    link_speeds: Mapping[int, float] = field(default_factory=dict)  # prefill: bytes/s to peers, where measured


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A prefill and a decode worker, by instance id."""

    prefill_id: int
    decode_id: int
