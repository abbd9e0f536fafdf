"""A release that computes the small model on CPUs: DIPTYCH_E2E_CPU_IMAGE."""

from __future__ import annotations

import os
import time
from typing import Final

import pytest
from cluster import Cluster
from release import REAL, Release

IMAGE: Final = os.environ.get("DIPTYCH_E2E_CPU_IMAGE", "")
FIRST_ANSWER_S: Final = 60

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not IMAGE, reason="DIPTYCH_E2E_CPU_IMAGE is not set")]


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Release:
    return Release(cluster, IMAGE, *REAL)


def test_installing_leads_to_right_answers_over_http_and_grpc_within_a_minute(release: Release) -> None:
    began_s = time.monotonic()
    release.install()
    said = release.test("answers")
    assert "HTTP and gRPC agree" in said
    assert "Paris" in said
    assert time.monotonic() - began_s < FIRST_ANSWER_S


def test_helm_test_moves_pages_and_says_how_fast(release: Release) -> None:
    assert "GB/s" in release.test("kv")


def test_uninstalling_ends_all_pods(release: Release) -> None:
    release.uninstall()
    assert release.all_pods() == []
