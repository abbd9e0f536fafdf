"""Engines of one process, with which others are compared: each is started once for all tests of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from diptych.engine import Engine, EngineOptions


@contextmanager
def reference_engines() -> Iterator[Callable[..., Engine]]:
    """Give `engine_of(folder, **options)`. Its pool has room for all prompts of a test."""
    engines: dict[tuple[Path, EngineOptions], Engine] = {}
    with ExitStack() as stack:

        def engine_of(folder: Path, **options: Any) -> Engine:
            key = (folder, EngineOptions(kv_cache_mib=8, **options))
            if key not in engines:
                engines[key] = stack.enter_context(Engine(str(folder), key[1]))
            return engines[key]

        yield engine_of
