"""What the nodes of a group must have alike, and what a leader says to one that has not. Pure."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from diptych.engine.options.config import EngineOptions
from diptych.v1.rank_pb2 import NodeHello

PROTOCOL: Final = 1
OF_A_NODE: Final = (  # options that nodes may have each its own
    *("model", "base_gpu", "num_threads", "file_cache_dir", "lora"),  # paths, and what is in the machine
    *("schedule_policy", "mixed_step_ms", "max_waiting", "tenant_weights"),  # for rank 0 alone
)


def shared_options(options: EngineOptions, **others: object) -> dict[str, str]:
    """Return what must be equal on all nodes, by flag; `others` by the names of their fields."""
    ours = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    named = {**{name: value for name, value in ours.items() if name not in OF_A_NODE}, **others}
    return {_flag(name): json.dumps(value) for name, value in named.items()}


def difference(ours: NodeHello, theirs: NodeHello) -> str:
    """Return why a node can't be of our group, as words for its operator; empty: it can."""
    for what in ("protocol", "version", "model"):
        if (here := getattr(ours, what)) != (there := getattr(theirs, what)):
            return f"its {what} is {there}, and that of the leader {here}: start the same on all nodes"
    if ours.num_nodes != theirs.num_nodes:
        words = f"it was started with --nnodes {theirs.num_nodes}, and the leader with {ours.num_nodes}"
        return f"{words}: give all nodes the same"
    if not 0 < theirs.node < ours.num_nodes:
        return f"its --node-rank is {theirs.node}: nodes beside the leader have 1 to {ours.num_nodes - 1}"
    return _differing_option(dict(ours.options), dict(theirs.options))


def _differing_option(ours: dict[str, str], theirs: dict[str, str]) -> str:
    for flag in sorted({*ours, *theirs}):
        if (here := ours.get(flag, "unknown")) != (there := theirs.get(flag, "unknown")):
            return f"its {flag} is {there}, and that of the leader {here}: give all nodes the same"
    return ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
