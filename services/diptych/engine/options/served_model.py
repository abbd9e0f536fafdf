"""What a model is where the options serve it: see `bounded` and `keeping_all`."""

from __future__ import annotations

from diptych.checkpoints.source import ModelSource, bounded, keeping_all
from diptych.engine.options.config import EngineOptions


def as_served(source: ModelSource, options: EngineOptions) -> ModelSource:
    """Return `source` with the context and the windows that `options` say. Raises `ConfigError`."""
    short = bounded(source, options.max_model_len)
    return keeping_all(short) if options.kv_windows == "keep" else short
