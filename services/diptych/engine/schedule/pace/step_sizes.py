"""How large a worker's steps are, where nobody says it: by what its device was found to do. Pure.

A CPU's steps stay small: each of its tokens takes its time, and what is planned behind a long step waits for it. On
anything faster three numbers follow from measurements:

- Tokens a step: as many as take `STEP_S`. By then reading the weights is a few hundredths of it, and larger steps gain
  nothing but later first tokens; a step that output waits for is bounded by `--mixed-step-ms` besides.
- Requests at once: as many as find `REQUEST_TOKENS` of KV each. A decode step reads at most the whole pool, so the
  pool bounds its time; `MOST_REQUESTS` bounds the number of graphs.
- Tokens of a step that is replayed from graphs: those whose kernels take no longer than the host takes to launch them,
  and `LAUNCH_MARGIN` times as many, because launching varies. Larger steps hide their launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STEP_S: Final = 0.25
FEWEST_STEP_TOKENS: Final = 512
MOST_STEP_TOKENS: Final = 8192
STEP_SHARE: Final = 8  # a step takes so small a part of the memory that weights leave

REQUEST_TOKENS: Final = 1024  # of a usual request, prompt and output; a wrong guess costs queueing or retractions
FEWEST_REQUESTS: Final = 64
MOST_REQUESTS: Final = 512
REQUESTS_UNIT: Final = 32

MOST_GRAPH_TOKENS: Final = 2048
GRAPH_TOKENS_UNIT: Final = 64
LAUNCH_MARGIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step can have at most."""

    max_step_tokens: int  # of prompts
    max_requests: int
    max_graph_tokens: int  # of a step with prompts that is replayed from CUDA graphs; 0: none is


@dataclass(frozen=True, slots=True)
class GivenSizes:
    """What the options say; None: not given."""

    max_step_tokens: int | None = None
    max_requests: int | None = None
    max_graph_tokens: int | None = None

    @property
    def are_complete(self) -> bool:
        return None not in (self.max_step_tokens, self.max_requests, self.max_graph_tokens)

    def or_else(self, derived: StepSizes) -> StepSizes:
        """Return what is given, and what is derived of the rest. What is computed in graphs is part of a step."""
        max_step_tokens = self.max_step_tokens or derived.max_step_tokens
        return StepSizes(
            max_step_tokens,
            self.max_requests or derived.max_requests,
            min(self.max_graph_tokens or derived.max_graph_tokens, max_step_tokens),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of a device with a model on it, or is known."""

    prompt_tokens_per_s: float
    launch_s: float  # what the host takes to launch a step kernel by kernel; 0: there are no graphs
    step_tokens_in_memory: float  # of a step that takes the share of memory that it may; infinite: more than any has
    kv_tokens: int  # that the pool holds, about

    @property
    def words(self) -> str:
        return f"measured: {self.prompt_tokens_per_s:,.0f} prompt tokens/s, about {self.kv_tokens:,} tokens of KV"


CPU_SIZES: Final = StepSizes(FEWEST_STEP_TOKENS, FEWEST_REQUESTS, 0)


def derived(found: Found, context_len: int) -> StepSizes:
    """Return the sizes that fit a device and a model."""
    step_tokens = min(found.prompt_tokens_per_s * STEP_S, found.step_tokens_in_memory, MOST_STEP_TOKENS)
    requests = found.kv_tokens // min(context_len, REQUEST_TOKENS)
    graph_tokens = found.launch_s * found.prompt_tokens_per_s * LAUNCH_MARGIN if found.launch_s else 0.0
    return StepSizes(
        max(FEWEST_STEP_TOKENS, 1 << max(0, int(step_tokens).bit_length() - 1)),
        min(MOST_REQUESTS, max(FEWEST_REQUESTS, requests // REQUESTS_UNIT * REQUESTS_UNIT)),
        math.ceil(min(graph_tokens, MOST_GRAPH_TOKENS) / GRAPH_TOKENS_UNIT) * GRAPH_TOKENS_UNIT,
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """The sizes of a worker, and what those follow from that are not given."""

    sizes: StepSizes
    reasons: str


def usual(given: GivenSizes) -> Chosen:
    """Return the sizes on a CPU."""
    return Chosen(given.or_else(CPU_SIZES), "usual on CPUs")


def choose(given: GivenSizes, find: Callable[[], Found], context_len: int, agree: Callable[[int], int]) -> Chosen:
    """Return the sizes on a device that is measured by `find`, unless nothing is left open.

    `agree` gives a number that all tensor-parallel ranks have.
    """
    if given.are_complete:
        return Chosen(given.or_else(CPU_SIZES), "as given")
    found = find()
    sizes = given.or_else(derived(found, context_len))
    agreed = StepSizes(agree(sizes.max_step_tokens), agree(sizes.max_requests), agree(sizes.max_graph_tokens))
    return Chosen(agreed, found.words)


def words(chosen: Chosen) -> str:
    """Say what a worker serves, why, and how to have it otherwise."""
    sizes = chosen.sizes
    graphs = f", up to {sizes.max_graph_tokens} from graphs" if sizes.max_graph_tokens else ""
    return (
        f"serving up to {sizes.max_requests} requests at once, {sizes.max_step_tokens} prompt tokens a step{graphs} "
        f"({chosen.reasons}); --max-requests, --max-step-tokens and --max-graph-tokens override"
    )
