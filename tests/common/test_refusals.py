from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from diptych.common.refusals import MAX_PEERS, Refusals


def exposition(refusals: Refusals) -> str:
    registry = CollectorRegistry()
    registry.register(refusals)
    return generate_latest(registry).decode()


def test_every_refusal_counts_and_a_peer_is_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    moments_s = [0.0]
    refusals = Refusals(lambda: moments_s[-1])
    for moment_s in (0.0, 0.5, 0.9, 1.1, 1.2):
        moments_s.append(moment_s)
        for port in (1, 2, 3):
            refusals.note("wrong_token", f"ipv4:10.0.0.1:{port}", "/Watch")
    refusals.note("no_token", "ipv6:%5B::1%5D:7", "/Watch")
    assert 'diptych_auth_refusals_total{reason="wrong_token"} 15.0' in exposition(refusals)
    assert 'diptych_auth_refusals_total{reason="no_token"} 1.0' in exposition(refusals)
    assert [record.getMessage() for record in caplog.records] == [
        "refused /Watch of ipv4:10.0.0.1:1: wrong_token",
        "refused /Watch of ipv4:10.0.0.1:1: wrong_token",
        "refused /Watch of ipv6:%5B::1%5D:7: no_token",
    ]


def test_many_peers_are_not_remembered_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    refusals = Refusals(lambda: 0.0)
    for number in range(3 * MAX_PEERS):
        refusals.note("no_token", f"ipv4:10.0.{number // 256}.{number % 256}:1", "/Watch")
    assert len(refusals._logged_s) <= MAX_PEERS
