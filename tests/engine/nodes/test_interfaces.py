from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError, Unavailable
from diptych.engine.nodes.interfaces import address_of, interface_towards, resolved


def test_the_way_to_this_machine_is_its_loopback_device() -> None:
    assert interface_towards(resolved("127.0.0.1")) == "lo"
    assert address_of("lo", like="10.0.0.1") == "127.0.0.1"


def test_a_device_that_is_none_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"--node-interface eth77 is no device here: there is .*lo"):
        address_of("eth77", like="10.0.0.1")


def test_a_name_without_an_address_may_get_one_later() -> None:
    with pytest.raises(Unavailable, match=r"--leader names nobody.invalid, which has no address"):
        resolved("nobody.invalid")
