"""The core of an engine without peers, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stepped_engine import Engine


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines, and checks at the end that they are empty."""
    engines: list[Engine] = []

    def build(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.run()
        engine.close()


@pytest.fixture(scope="session")
def engine_class() -> type[Engine]:
    """For tests that build many; they `close` each."""
    return Engine


@pytest.fixture
def engine(new_engine: Callable[..., Engine]) -> Engine:
    return new_engine()
