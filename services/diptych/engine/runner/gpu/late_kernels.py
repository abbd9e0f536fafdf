"""Says in the log that a kernel was compiled while requests waited: the warm-up should have seen to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import triton

logger = logging.getLogger(__name__)


def tell_of_late_kernels() -> None:
    """Call it when all is compiled that is known to be needed."""
    triton.knobs.compilation.listener = tell


def tell(*, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **others: object) -> None:
    """Implements Triton's `CompilationListener`."""
    done = "read from Triton's cache" if cache_hit else "compiled"
    logger.warning("kernel %s was %s in %.2f s, while serving", metadata.get("name"), done, times.total / 1e6)
