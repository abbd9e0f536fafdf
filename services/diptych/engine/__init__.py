"""The engine of a worker: scheduler cores and what they stand on (pure), loading and running models, its processes.

`Engine` embeds all of it in a program. It is imported on first use, so that the pure modules stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.embedded.engine import Engine, Generation
    from diptych.engine.options.config import EngineOptions
    from diptych.generation.grammar import Grammar, GrammarKind
    from diptych.generation.sampling_params import SamplingParams

__all__ = ["Engine", "EngineOptions", "Generation", "Grammar", "GrammarKind", "SamplingParams"]

_HOMES = {
    "Engine": "diptych.embedded.engine",
    "Generation": "diptych.embedded.engine",
    "EngineOptions": "diptych.engine.options.config",
    "Grammar": "diptych.generation.grammar",
    "GrammarKind": "diptych.generation.grammar",
    "SamplingParams": "diptych.generation.sampling_params",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
