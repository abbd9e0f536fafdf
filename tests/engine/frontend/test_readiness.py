"""When a record says READY."""

from __future__ import annotations

from diptych.engine.frontend.probes import Readiness
from diptych.v1.bootstrap_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_READY,
    INSTANCE_STATE_STARTING,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_UNIFIED,
    Instance,
    Role,
)


def starting(role: Role = ROLE_PREFILL) -> Instance:
    return Instance(role=role, state=INSTANCE_STATE_STARTING)


def loaded(role: Role = ROLE_PREFILL) -> tuple[Instance, Readiness]:
    instance = starting(role)
    readiness = Readiness(instance)
    readiness.loaded("any")
    return instance, readiness


def test_links_of_a_worker_that_loads_do_not_make_it_ready() -> None:
    instance = starting()
    assert not Readiness(instance).linked(1)
    assert instance == starting()


def test_a_loaded_worker_says_what_it_waits_for() -> None:
    instance, readiness = loaded()
    assert (instance.state, instance.not_ready) == (INSTANCE_STATE_STARTING, "no peer is linked yet")
    readiness.loaded("rdma")
    assert instance.not_ready == "no peer is linked yet, and --kv-require asks for rdma"
    assert readiness.failed("the lanes are tcp")
    assert instance.not_ready == "the lanes are tcp"
    assert not readiness.failed("")


def test_the_first_link_makes_ready_for_good() -> None:
    instance, readiness = loaded()
    assert not readiness.linked(0)
    assert readiness.linked(1)
    assert (instance.state, instance.not_ready) == (INSTANCE_STATE_READY, "")
    assert not readiness.linked(0)
    assert not readiness.failed("all links are down")
    assert (instance.state, instance.not_ready) == (INSTANCE_STATE_READY, "")


def test_only_a_unified_worker_that_knows_nobody_is_ready_alone() -> None:
    for role, num_peers, is_ready in ((ROLE_PREFILL, 0, False), (ROLE_UNIFIED, 1, False), (ROLE_UNIFIED, 0, True)):
        instance, readiness = loaded(role)
        assert readiness.knows_peers(num_peers) is is_ready
        assert (instance.state == INSTANCE_STATE_READY) is is_ready


def test_a_draining_worker_never_goes_back_to_ready() -> None:
    instance, readiness = loaded()
    instance.state, instance.not_ready = INSTANCE_STATE_DRAINING, ""
    assert not readiness.linked(1)
    assert instance.state == INSTANCE_STATE_DRAINING


def test_another_role_waits_for_links_of_its_own() -> None:
    instance, readiness = loaded(ROLE_PREFILL)
    readiness.linked(1)
    instance.role = ROLE_DECODE
    readiness.role_changed()
    assert (instance.state, instance.not_ready) == (
        INSTANCE_STATE_READY,
        "no prefill or unified worker is linked, since it serves decode",
    )
    assert readiness.linked(1)
    assert (instance.state, instance.not_ready) == (INSTANCE_STATE_READY, "")


def test_a_role_that_changes_does_not_bring_a_draining_worker_back() -> None:
    instance, readiness = loaded(ROLE_PREFILL)
    instance.state = INSTANCE_STATE_DRAINING
    readiness.role_changed()
    readiness.linked(1)
    assert instance.state == INSTANCE_STATE_DRAINING


def test_a_worker_that_makes_vectors_waits_for_nobody_unless_it_is_to_decode() -> None:
    for role, state in ((ROLE_PREFILL, INSTANCE_STATE_READY), (ROLE_DECODE, INSTANCE_STATE_STARTING)):
        instance = starting(role)
        Readiness(instance).loaded_alone()
        assert (instance.state, bool(instance.not_ready)) == (state, role == ROLE_DECODE)
