"""Routing policies, by the name that configuration and requests use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from diptych.router.choose.policies.adaptive import adaptive
from diptych.router.choose.policies.least_load import least_load
from diptych.router.choose.policies.pair_cost import pair_cost
from diptych.router.choose.policies.policy import Policy
from diptych.router.choose.policies.worker_policies import (
    ByRole,
    EachRole,
    at_random,
    cache_aware,
    consistent_hash,
    power_of_two,
    prefix_hash,
    round_robin,
)

POLICIES: Final[Mapping[str, Policy]] = {
    "adaptive": adaptive,
    "cache_aware": ByRole(cache_aware, "most of the prompt cached, or least busy"),
    "consistent_hash": ByRole(consistent_hash, "the session's worker"),
    "least_load": least_load,
    "pair_cost": pair_cost,
    "power_of_two": ByRole(power_of_two, "the less busy of two"),
    "prefix_hash": ByRole(prefix_hash, "the worker of this beginning"),
    "random": ByRole(at_random, "drawn"),
    "round_robin": ByRole(round_robin, "its turn"),
}
READS_PROMPT: Final = frozenset(
    {"adaptive", "cache_aware", "pair_cost", "prefix_hash"}
)  # the others do without its hashes


class Plan(NamedTuple):
    """How pairs are chosen."""

    name: str
    choose: Policy
    reads_prompt: bool


def plan_of(name: str, prefill: str | None = None, decode: str | None = None) -> Plan:
    """Return the plan that the configuration, or a request, asks for: one policy for pairs, or one for each role."""
    if not (prefill or decode):
        return Plan(name, POLICIES[name], name in READS_PROMPT)
    names = prefill or name, decode or name
    policy = EachRole(POLICIES[names[0]], POLICIES[names[1]])
    return Plan("+".join(names), policy, not READS_PROMPT.isdisjoint(names))
