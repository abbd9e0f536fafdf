"""For whom a caller may speak, and what ground it has for an address."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.bootstrap.caller import ANYBODY, Caller, Claim
from diptych.common.errors import Forbidden
from diptych.common.trust.instance_secret import InstanceSecret, proven, shown
from diptych.common.verdicts.permissions import Party
from diptych.v1.bootstrap_pb2 import ROLE_DECODE, ROLE_PREFILL, ROLE_ROUTER, ROLE_UNIFIED, Instance

SECRET = InstanceSecret.new()
PROVEN = proven(shown([SECRET]))


def instance(role: Any, instance_id: int = SECRET.instance_id) -> Instance:
    return Instance(instance_id=instance_id, role=role)


@pytest.mark.parametrize("role", [ROLE_PREFILL, ROLE_DECODE, ROLE_UNIFIED, ROLE_ROUTER, 99])
@pytest.mark.parametrize("party", Party)
def test_workers_register_as_workers_and_routers_as_routers(party: Party, role: int) -> None:
    caller = Caller(frozenset({party}), proven=PROVEN)
    wanted = Party.ROUTER if role == ROLE_ROUTER else Party.WORKER
    if party is wanted:
        return caller.check(instance(role))
    with pytest.raises(Forbidden, match=f"takes the token or certificate of a {wanted.value}"):
        caller.check(instance(role))


def test_nobody_speaks_for_an_instance_whose_secret_it_does_not_show() -> None:
    stranger = Caller(frozenset({Party.WORKER}), proven=PROVEN)
    with pytest.raises(Forbidden, match="instance 0000000000000007 shows its secret: this is another's"):
        stranger.check(instance(ROLE_PREFILL, instance_id=7))
    ANYBODY.check(instance(ROLE_PREFILL, instance_id=7))


def test_a_secret_proves_one_instance_and_is_not_shown_by_chance() -> None:
    others = [InstanceSecret.new() for _ in range(3)]
    assert len({each.instance_id for each in (SECRET, *others)}) == 4
    assert proven(shown(others)) == {each.instance_id for each in others}
    assert proven((("diptych-instance-secret-bin", "text"), ("other-bin", SECRET.value))) == frozenset()
    assert repr(SECRET) == "InstanceSecret()"


@pytest.mark.parametrize(
    ("host", "address", "is_own"),
    [
        ("10.0.0.1", "10.0.0.1:7100", True),
        ("10.0.0.1", "10.0.0.1:7100#3", True),
        ("10.0.0.1", "[::ffff:10.0.0.1]:7100", True),
        ("fd00::1", "[fd00:0::1]:7100", True),
        ("10.0.0.1", "10.0.0.11:7100", False),
        ("10.0.0.1", "decode-0.pods:7100", False),
        ("", "unix:/run/worker", False),
    ],
)
def test_an_address_is_ones_own_if_it_names_the_host_that_one_speaks_from(
    host: str, address: str, is_own: bool
) -> None:
    assert ANYBODY.claim(address) == Claim()
    assert Caller(frozenset(), host).claim(address) == Claim(host, is_own)


@pytest.mark.parametrize(
    ("ours", "owners", "may"),
    [
        (Claim("a", True), Claim("a", True), True),  # a restart
        (Claim("a", True), Claim("b", False), True),  # somebody has sat down at our address
        (Claim("b", False), Claim("a", True), False),
        (Claim("b", False), Claim("b", False), True),  # a restart behind an address that is translated
        (Claim("c", False), Claim("b", False), False),
    ],
)
def test_an_address_is_taken_from_who_lives_by_its_host_or_from_the_same_one(
    ours: Claim, owners: Claim, may: bool
) -> None:
    assert ours.may_displace(owners) is may
