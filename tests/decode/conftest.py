"""A decode core that serves local requests, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from stepped_engine import PAGE, Engine

from diptych.common.roles import LegKind
from diptych.decode.core import DecodeCore


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """Builds engines, and checks at the end that they are empty."""
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        build_core = partial(DecodeCore, page_nbytes=PAGE * 8)
        engines.append(Engine(build=build_core, kind=LegKind.LOCAL, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.run()
        engine.close()
