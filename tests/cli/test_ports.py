from __future__ import annotations

import socket

import pytest

from diptych.cli.ports import claim
from diptych.common.errors import ConfigError


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
