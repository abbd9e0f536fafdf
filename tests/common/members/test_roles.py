from __future__ import annotations

import itertools

import pytest

from diptych.common.members.roles import WORKER_ROLES, LegKind, Role, leg_kind
from diptych.v1 import bootstrap_pb2, worker_pb2

SERVED = {
    Role.PREFILL: {LegKind.PREFILL, LegKind.POOL},
    Role.DECODE: {LegKind.DECODE},
    Role.UNIFIED: {LegKind.PREFILL, LegKind.DECODE, LegKind.LOCAL, LegKind.POOL},
    Role.ENCODE: {LegKind.ENCODE},
    Role.LOCAL: {LegKind.LOCAL, LegKind.POOL},
}
SENDS = {
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.UNIFIED),
    (Role.UNIFIED, Role.DECODE),
    (Role.UNIFIED, Role.UNIFIED),
}


@pytest.mark.parametrize("role", Role)
def test_a_role_serves_its_kinds_of_legs_and_no_other(role: Role) -> None:
    assert {kind for kind in LegKind if role.serves(kind)} == SERVED[role]


def test_kv_moves_from_who_prefills_to_who_decodes() -> None:
    both = list(itertools.product(Role, Role))
    assert {(one, other) for one, other in both if one.sends_to(other)} == SENDS
    exchanging = SENDS | {(other, one) for one, other in SENDS}
    assert {(one, other) for one, other in both if one.exchanges_with(other)} == exchanging


def test_workers_of_any_roles_may_be_linked_for_prompts_prefixes_or_requests_that_run() -> None:
    both = set(itertools.product(Role, Role))
    makes, computes = {Role.DECODE, Role.UNIFIED}, {Role.PREFILL, Role.UNIFIED}
    assert {(one, other) for one, other in both if one.hands_on_to(other)} == set(itertools.product(makes, makes))
    encoding = {*itertools.product({Role.ENCODE}, computes), *itertools.product(computes, {Role.ENCODE})}
    sharing = {*itertools.product(computes, computes), *encoding}
    assert {(one, other) for one, other in both if one.shares_with(other)} == sharing
    linked = {pair for pair in both if not {Role.LOCAL, Role.ENCODE}.intersection(pair)} | encoding
    assert {pair for pair in both if pair[0].links_with(pair[1])} == linked


def test_roles_and_kinds_have_the_names_of_the_protocol() -> None:
    assert {bootstrap_pb2.Role.Name(role.wire): WORKER_ROLES[role.wire] for role in WORKER_ROLES.values()} == {
        f"ROLE_{role.name}": role for role in Role if role is not Role.LOCAL
    }
    assert [worker_pb2.LegKind.Name(kind.wire) for kind in LegKind] == [f"LEG_KIND_{kind.name}" for kind in LegKind]
    assert bootstrap_pb2.ROLE_ROUTER not in WORKER_ROLES


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", LegKind)
def test_a_leg_is_what_it_says(kind: LegKind, role: Role) -> None:
    assert leg_kind(kind.wire, role) is kind


def test_a_leg_that_does_not_say_it_is_the_only_kind_of_its_worker() -> None:
    assert leg_kind(worker_pb2.LEG_KIND_UNSPECIFIED, Role.DECODE) is LegKind.DECODE
    assert leg_kind(worker_pb2.LEG_KIND_UNSPECIFIED, Role.LOCAL) is LegKind.LOCAL
    with pytest.raises(ValueError, match="of kind 0"):
        leg_kind(worker_pb2.LEG_KIND_UNSPECIFIED, Role.UNIFIED)
    with pytest.raises(ValueError, match="of kind 99"):
        leg_kind(99, Role.PREFILL)
