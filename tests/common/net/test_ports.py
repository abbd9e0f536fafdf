from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diptych.common.errors import ConfigError
from diptych.common.net.ports import claim, claim_for_processes, free_port, free_ports, reserve_port


def test_a_free_port_is_granted_and_0_picks_one() -> None:
    port = claim("127.0.0.1", 0, flag="--http-port")
    assert claim("127.0.0.1", port, flag="--http-port") == port > 0


def test_a_port_in_use_is_named_with_the_flag_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(.*\): stop what uses it, .* with --http-port"):
            claim("127.0.0.1", port, flag="--http-port")


def test_an_impossible_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="--grpc-port must be between 0 and 65535, not 65536"):
        claim("127.0.0.1", 65536, flag="--grpc-port")


def test_free_ports_differ_and_are_none_that_the_system_gives_to_others() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in ports)


def test_a_host_that_is_not_ours_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1 \(Cannot assign"):
        free_ports("192.0.2.1", 1)


def test_a_reserved_port_is_for_those_who_share_it() -> None:
    with reserve_port("127.0.0.1") as keeper:
        address = keeper.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        socket.create_server(address, reuse_port=True).close()


def test_only_one_may_have_processes_share_a_port_also_while_none_of_them_listens_yet() -> None:
    port = free_port()
    with claim_for_processes("127.0.0.1", port, flag="--http-port"):
        socket.create_server(("127.0.0.1", port), reuse_port=True).close()
        with pytest.raises(ConfigError, match=rf"another router runs, or starts, at 127\.0\.0\.1:{port} .*--http-port"):
            claim_for_processes("127.0.0.1", port, flag="--http-port")
        claim_for_processes("127.0.0.1", free_port(), flag="--http-port").close()
    claim_for_processes("127.0.0.1", port, flag="--http-port").close()


def test_a_port_at_which_somebody_listens_can_be_shared_by_no_stranger() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(.*\): stop what uses it"):
            claim_for_processes("127.0.0.1", port, flag="--grpc-port")
