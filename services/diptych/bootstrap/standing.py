"""Lists how bootstrap may regard an instance, and every possible move. A move that is not in the table is refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from diptych.common.members.record import State


class Standing(enum.Enum):
    """How bootstrap regards an instance."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EXPIRED = "expired"  # its lease ran out; a heartbeat brings it back
    EVICTED = "evicted"  # a newer instance has its address; final
    GONE = "gone"  # said goodbye; final


class Event(enum.Enum):
    """What can happen to an instance."""

    SAYS_STARTING = "says starting"
    SAYS_READY = "says ready"
    SAYS_DRAINING = "says draining"
    SAYS_GONE = "says gone"
    LEASE_ENDED = "lease ended"
    REPLACED = "replaced"


LISTED: Final = frozenset({Standing.STARTING, Standing.READY, Standing.DRAINING})

ENDED: Final = frozenset({Standing.EVICTED, Standing.GONE})

TRANSITIONS: Final[Mapping[tuple[Standing, Event], Standing]] = {
    (Standing.UNKNOWN, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.UNKNOWN, Event.SAYS_READY): Standing.READY,
    (Standing.UNKNOWN, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.UNKNOWN, Event.SAYS_GONE): Standing.GONE,
    (Standing.STARTING, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.STARTING, Event.SAYS_READY): Standing.READY,
    (Standing.STARTING, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.STARTING, Event.SAYS_GONE): Standing.GONE,
    (Standing.STARTING, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.STARTING, Event.REPLACED): Standing.EVICTED,
    (Standing.READY, Event.SAYS_READY): Standing.READY,
    (Standing.READY, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.READY, Event.SAYS_GONE): Standing.GONE,
    (Standing.READY, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.READY, Event.REPLACED): Standing.EVICTED,
    (Standing.DRAINING, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.DRAINING, Event.SAYS_GONE): Standing.GONE,
    (Standing.DRAINING, Event.LEASE_ENDED): Standing.EXPIRED,
    (Standing.DRAINING, Event.REPLACED): Standing.EVICTED,
    (Standing.EXPIRED, Event.SAYS_STARTING): Standing.STARTING,
    (Standing.EXPIRED, Event.SAYS_READY): Standing.READY,
    (Standing.EXPIRED, Event.SAYS_DRAINING): Standing.DRAINING,
    (Standing.EXPIRED, Event.SAYS_GONE): Standing.GONE,
    (Standing.EXPIRED, Event.REPLACED): Standing.EVICTED,
    **{(Standing.EVICTED, event): Standing.EVICTED for event in Event if event is not Event.LEASE_ENDED},
    **{(Standing.GONE, event): Standing.GONE for event in Event if event is not Event.LEASE_ENDED},
}

SAYS: Final[Mapping[State, Event]] = {
    State.STARTING: Event.SAYS_STARTING,
    State.READY: Event.SAYS_READY,
    State.DRAINING: Event.SAYS_DRAINING,
    State.GONE: Event.SAYS_GONE,
}
