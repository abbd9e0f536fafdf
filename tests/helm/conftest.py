from __future__ import annotations

import chart
import pytest


@pytest.fixture(scope="session", autouse=True)
def _helm(request: pytest.FixtureRequest) -> None:
    if chart.helm() is None:
        pytest.skip("helm is not installed: `make helm` brings it")
