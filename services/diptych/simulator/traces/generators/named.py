"""The generators by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from diptych.common.errors import ConfigError
from diptych.simulator.traces.call import Call, from_zero
from diptych.simulator.traces.columns import Columns, calls_of
from diptych.simulator.traces.generators.agentic import agentic
from diptych.simulator.traces.generators.bimodal import bimodal
from diptych.simulator.traces.generators.bursty import bursty
from diptych.simulator.traces.generators.chat import chat
from diptych.simulator.traces.generators.code import code
from diptych.simulator.traces.generators.coding_agents import coding_agents

GENERATORS: Final[Mapping[str, Callable[[int, float, int], Columns]]] = MappingProxyType(
    {
        "chat": chat,
        "code": code,
        "agentic": agentic,
        "coding_agents": coding_agents,
        "bursty": bursty,
        "bimodal": bimodal,
    }
)


def generate(name: str, num_calls: int, rate: float, seed: int) -> list[Call]:
    """Return `num_calls` calls, `rate` a second. Raises `ConfigError` for what can't be generated."""
    if name not in GENERATORS:
        raise ConfigError(f"nothing generates {name!r}; there are {', '.join(GENERATORS)}")
    if num_calls < 2 or not 0 < rate < 1e6:
        raise ConfigError(f"a trace has two calls or more, at a rate above 0; not {num_calls} at {rate:g} a second")
    return from_zero(calls_of(GENERATORS[name](num_calls, rate, seed)))
