from __future__ import annotations

from pathlib import Path

import pytest

from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.nixl.engine import NixlOptions
from diptych.kvtransfer.ucx.options import UcxOptions, offers_remote_access, ucx_settings


@pytest.mark.parametrize(("transports", "wanted"), [("auto", True), ("shm", False), ("tcp", False)])
def test_remote_memory_access_is_for_hosts_whose_hardware_does_it(
    tmp_path: Path, transports: Transports, wanted: bool
) -> None:
    missing, empty, cards = tmp_path / "missing", tmp_path / "empty", tmp_path / "cards"
    empty.mkdir()
    assert not offers_remote_access(UcxOptions(transports), (missing, empty))
    (cards / "mlx5_0").mkdir(parents=True)
    assert offers_remote_access(UcxOptions(transports), (missing, empty, cards)) is wanted


@pytest.mark.parametrize("options", [UcxOptions(), NixlOptions()])
def test_a_lost_peer_is_given_up_within_two_seconds(options: UcxOptions | NixlOptions) -> None:
    delivered = 2  # heartbeats that TCP may still deliver after the other direction was cut
    assert options.heartbeat_s * (options.heartbeat_misses + delivered) < 2.0


def test_who_opens_a_transport_may_decide() -> None:
    assert offers_remote_access(UcxOptions("tcp", remote_access=True), ())
    assert not offers_remote_access(UcxOptions("auto", remote_access=False))


def test_connecting_to_a_host_that_is_gone_does_not_stop_the_other_links() -> None:
    assert ucx_settings("auto", {})["TCP_CONN_NB"] == "y"
    assert "TCP_CONN_NB" not in ucx_settings("auto", {"UCX_TCP_CONN_NB": "n"})
