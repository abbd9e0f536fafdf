from __future__ import annotations

import platform

import pytest

from diptych.common.net.reachable import bracketed, local_host, reachable_host


@pytest.mark.parametrize(
    ("listening", "advertised", "host"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("::1", "", "[::1]"),
        ("::", "fd00::1", "[fd00::1]"),
        ("::", "[fd00::1]", "[fd00::1]"),
        ("::", "10.0.0.1", "10.0.0.1"),
        ("::", "", platform.node()),
        ("0.0.0.0", "", platform.node()),
    ],
)
def test_others_reach_a_server_by_what_it_advertises_else_where_it_listens(
    listening: str, advertised: str, host: str
) -> None:
    assert reachable_host(listening, advertised) == host


@pytest.mark.parametrize(("listening", "host"), [("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1")])
def test_a_machine_reaches_itself_where_it_listens(listening: str, host: str) -> None:
    assert local_host(listening) == host


@pytest.mark.parametrize(("host", "written"), [("fd00::1", "[fd00::1]"), ("[::1]", "[::1]"), ("a.b", "a.b")])
def test_an_ipv6_address_is_bracketed_before_a_port(host: str, written: str) -> None:
    assert bracketed(host) == written
