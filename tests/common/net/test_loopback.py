from __future__ import annotations

import os

import pytest

from diptych.common.net.reachable import is_loopback, transfer_where


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_only_this_machine_reaches_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "worker-1", ""])
def test_others_may_reach_any_other_address(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "before", "after"),
    [("127.0.0.1", "", "lo"), ("127.0.0.1", "mlx5_0:1", "mlx5_0:1"), ("10.0.0.1", "", "")],
)
def test_pages_stay_on_the_machine_of_a_worker_that_does(
    host: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", before) if before else monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    transfer_where(host)
    assert os.environ.pop("UCX_NET_DEVICES", "") == after
