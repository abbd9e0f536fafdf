from __future__ import annotations

import pytest

from diptych.common.net.reachable import host_of, one_spelling, peer_host


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:2345", "10.0.0.1"),
        ("ipv6:%5Bfd00::1%5D:2345", "fd00::1"),
        ("ipv6:[fd00::1]:2345", "fd00::1"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:2345", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:2345", "fe80::1"),
        ("unix:", ""),
        ("unix:/run/x:1", ""),
    ],
)
def test_a_peer_is_known_by_its_host(peer: str, host: str) -> None:
    assert peer_host(peer) == host


def test_a_host_has_one_spelling_and_a_name_is_kept() -> None:
    assert [one_spelling(each) for each in ("[FD00:0:0::1]", "::ffff:7f00:1", "worker-0.pods", "")] == [
        "fd00::1",
        "127.0.0.1",
        "worker-0.pods",
        "",
    ]
    assert [host_of(each) for each in ("h:1", "[::1]:1#2", "unix:/a:1")] == ["h", "::1", ""]
