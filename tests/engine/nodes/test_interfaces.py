from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.common.errors import ConfigError, Unavailable
from diptych.engine.frontend.config import WorkerConfig
from diptych.engine.frontend.node_start import leader_place
from diptych.engine.nodes.interfaces import address_of, check_own, interface_towards, resolved


def test_the_way_to_this_machine_is_its_loopback_device() -> None:
    assert interface_towards(resolved("127.0.0.1")) == "lo"
    assert address_of("lo", like="10.0.0.1") == "127.0.0.1"


def test_a_device_that_is_none_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"--node-interface eth77 is no device here: there is .*lo"):
        address_of("eth77", like="10.0.0.1")


def test_a_name_without_an_address_may_get_one_later() -> None:
    with pytest.raises(Unavailable, match=r"--leader names nobody.invalid, which has no address"):
        resolved("nobody.invalid")


def test_rank_0_listens_at_an_address_of_its_own_only_and_waits_while_its_name_leads_elsewhere() -> None:
    """The name of a pod leads for a while to the one that was there before."""
    check_own("127.0.0.1")
    with pytest.raises(Unavailable, match=r"--leader leads to 192\.0\.2\.1, where node 0, this machine, can't listen"):
        check_own("192.0.2.1")
    config = WorkerConfig(tp=2, nnodes=2, leader="192.0.2.1:7100")
    with pytest.raises(Unavailable, match=r"192\.0\.2\.1"):
        leader_place(config)
    place = leader_place(replace(config, leader="127.0.0.1:7100", node_wait_s=7.0))
    assert (place.host, place.interface, place.wait_s) == ("127.0.0.1", "lo", 7.0)
