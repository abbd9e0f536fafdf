"""Decides which members `diptych drain` means, and what it prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.errors import ConfigError
from diptych.common.members.instance_names import is_meant, name_of, role_of
from diptych.v1.bootstrap_pb2 import Instance
from diptych.v1.worker_pb2 import Drain


def chosen(listed: Sequence[Instance], wanted: str, role: str) -> list[Instance]:
    """Return the members of a role, or those that `wanted` names. Raises `ConfigError` if there are none.

    An address names every instance that is there, a pod all of its processes; an instance id, or how it begins, one.
    """
    by_role = [each for each in listed if not role or role_of(each) == role]
    in_pod = [each for each in by_role if wanted and each.pod == wanted]
    found = in_pod or [each for each in by_role if not wanted or is_meant(each, wanted)]
    if not found:
        names = "\n  ".join(sorted(map(name_of, listed))) or "none"
        raise ConfigError(f"no member is called {' '.join(filter(None, (role, wanted)))!r}; there are:\n  {names}")
    if wanted and not in_pod and len({each.address for each in found}) > 1:
        names = "\n  ".join(sorted(map(name_of, found)))
        raise ConfigError(f"{wanted!r} may mean each of these; say more of the instance id:\n  {names}")
    return sorted(found, key=name_of)


def drain_words(drain: Drain | None) -> str:
    """Say how far a drain is."""
    if drain is None:
        return "serving"
    if drain.phase == Drain.PHASE_EMPTY:
        return "empty"
    if not drain.requests_left:
        return "draining, waits for pages that are on their way"
    left = f"{drain.requests_left} request{'s' if drain.requests_left > 1 else ''} left"
    end = f"handed back in {drain.deadline_s:.0f} s" if drain.deadline_s else "being handed back"
    return f"draining, {left}, the oldest since {drain.oldest_s:.0f} s, {end}"
