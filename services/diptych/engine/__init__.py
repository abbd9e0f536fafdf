"""The engine of a worker: scheduler cores and what they stand on (pure), loading and running models, its processes.

`Engine` embeds all of it in a program. It is imported on first use, so that the pure modules stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.engine.grammar.grammar import Grammar, GrammarKind
    from diptych.engine.runtime.engine import Engine, Generation
    from diptych.engine.runtime.scheduler_config import EngineOptions
    from diptych.engine.sampling_params import SamplingParams

__all__ = ["Engine", "EngineOptions", "Generation", "Grammar", "GrammarKind", "SamplingParams"]

_HOMES = {
    "Engine": "diptych.engine.runtime.engine",
    "Generation": "diptych.engine.runtime.engine",
    "EngineOptions": "diptych.engine.runtime.scheduler_config",
    "Grammar": "diptych.engine.grammar.grammar",
    "GrammarKind": "diptych.engine.grammar.grammar",
    "SamplingParams": "diptych.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
