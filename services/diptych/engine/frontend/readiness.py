"""When an instance says READY in its record: the model is loaded and a link to some peer has passed its test once.

Sticky: who loses its peers later stays READY, and routers see what is linked. An instance that serves whole requests
waits for nobody where it knows of nobody. Nothing else moves a record from STARTING to READY. Another role needs other
links: until one is up a record that is READY says why it can't serve. Pure.
"""

from __future__ import annotations

from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.kvtransfer.lanes import Requirement
from diptych.v1 import bootstrap_pb2


class Readiness:
    """Keeps `state` and `not_ready` of a record up to READY. Methods return whether something changed."""

    def __init__(self, instance: bootstrap_pb2.Instance) -> None:
        self._instance = instance

    @property
    def is_pending(self) -> bool:
        """Loaded, and only waiting for a link."""
        return bool(self._instance.not_ready)

    def loaded(self, requirement: Requirement) -> None:
        """The model is loaded. Only links that meet `requirement` count. Who drains already waits for none."""
        if self._instance.state != bootstrap_pb2.INSTANCE_STATE_STARTING:
            return
        limit = "" if requirement == "any" else f", and --kv-require asks for {requirement}"
        self._instance.not_ready = f"no peer is linked yet{limit}"

    def failed(self, problem: str) -> bool:
        """Links are tried without success."""
        if self.is_pending and problem:
            self._instance.not_ready = " ".join(problem.split())  # one line, whoever's words they are
            return True
        return False

    def linked(self, num_links: int) -> bool:
        """So many links have passed their test."""
        return self.is_pending and num_links > 0 and self._become_ready()

    def knows_peers(self, num_peers: int) -> bool:
        """Membership lists so many peers."""
        serves_alone = self._instance.role == bootstrap_pb2.ROLE_UNIFIED and num_peers == 0
        return self.is_pending and serves_alone and self._become_ready()

    def role_changed(self) -> None:
        """Another role is served: links count anew."""
        role = WORKER_ROLES[self._instance.role]
        needed = " or ".join(other.value for other in Role if role.exchanges_with(other))
        self._instance.not_ready = f"no {needed} worker is linked, since it serves {role.value}"

    def _become_ready(self) -> bool:
        self._instance.not_ready = ""
        self._instance.state = max(self._instance.state, bootstrap_pb2.INSTANCE_STATE_READY)
        return True
