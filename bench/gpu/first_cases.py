"""A pytest plugin that keeps the first `FIRST_CASES` cases of each test that are not skipped, for tools that slow them.

FIRST_CASES=2 python -m pytest -p first_cases ...
"""

from __future__ import annotations

import os
from collections import Counter

import pytest


def is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))


@pytest.hookimpl(trylast=True)  # after marks and expressions have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit, seen = int(os.environ.get("FIRST_CASES", "2")), Counter[str]()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        name, runs = item.nodeid.partition("[")[0], not is_skipped(item)
        seen[name] += runs
        (kept if runs and seen[name] <= limit else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
