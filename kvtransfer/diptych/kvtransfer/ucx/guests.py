"""Whose packets may reach the ports of our UCX: those of the hosts of peers that we link to."""

from __future__ import annotations

from collections.abc import Set

from diptych.kvtransfer.metadata import Address, EngineMetadata
from diptych.kvtransfer.transport import InstanceId


class Guests:
    """The peers from `admit` until `forget`, by their addresses.

    Addresses that we have, too, say nothing of a peer on another host: they are those of loopback and bridge devices.
    """

    def __init__(self, host: str, own: Set[Address]) -> None:
        self._host = host  # as in `ProcessIdentity`
        self._own = own
        self._peers: dict[InstanceId, frozenset[Address] | None] = {}

    def admit(self, peer: InstanceId, metadata: EngineMetadata) -> None:
        foreign = frozenset(metadata.addresses) - (frozenset() if metadata.process.host == self._host else self._own)
        self._peers[peer] = foreign if metadata.addresses else None

    def forget(self, peer: InstanceId) -> None:
        self._peers.pop(peer, None)

    @property
    def addresses(self) -> frozenset[Address] | None:
        """All that may come in; None: anybody, as one of the peers does not say where it is."""
        known = [each for each in self._peers.values() if each is not None]
        return frozenset().union(*known) if len(known) == len(self._peers) else None
