"""What engines of several processes are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from reference_engines import reference_engines

from diptych.engine import Engine


@pytest.fixture(scope="package")
def reference() -> Iterator[Callable[..., Engine]]:
    """`reference(folder, **options)`: an engine of one process."""
    with reference_engines() as engine_of:
        yield engine_of
