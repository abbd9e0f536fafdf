"""Where schedulers that share experts meet: a private folder, for as long as they live."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from diptych.engine.options.config import EngineOptions
from diptych.engine.options.shared_experts import SharedExperts


@contextlib.contextmanager
def shared_places(options: EngineOptions) -> Iterator[list[SharedExperts | None]]:
    """Yield the place of each of `dp` schedulers; None where they share nothing."""
    if not options.dp_attention:
        yield [None] * options.dp
        return
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        yield [SharedExperts(folder, scheduler, options.dp) for scheduler in range(options.dp)]
