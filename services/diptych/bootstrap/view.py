"""Decides whose link keys a watcher is told: those of workers that may be peers of the watcher's instances. Pure.

Rule: a watcher that is every party is told all keys. Other watchers show the secrets of their instances, and are told
what these need in the roles in which they are registered. Until one of them is registered, they are told nothing, so
that a key that is not known yet is not mistaken for one that will not be told.
"""

from __future__ import annotations

from diptych.bootstrap.caller import Caller
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.trust.permissions import EVERY


class View:
    """What one watcher may see."""

    def __init__(self, caller: Caller) -> None:
        self.instances = caller.proven  # that the watcher is
        self._sees_all = caller.parties == EVERY
        self._roles: dict[int, Role | None] = {}  # entries of the instances that have registered
        self.roles = self._seen()

    @property
    def is_known(self) -> bool:
        """Whether it is known what the watcher may see."""
        return self._sees_all or not self.instances or bool(self._roles)

    def learn(self, instance_id: int, role: int) -> bool:
        """Take in as what an instance of the watcher is registered; return whether it sees something else now."""
        before = self.is_known, self.roles
        self._roles[instance_id] = WORKER_ROLES.get(role)
        self.roles = self._seen()
        return before != (self.is_known, self.roles)

    def _seen(self) -> frozenset[Role] | None:
        """Return the roles whose link keys are told; None: all."""
        ours = [role for role in self._roles.values() if role]
        return None if self._sees_all else frozenset(r for r in Role if any(r.exchanges_with(each) for each in ours))
