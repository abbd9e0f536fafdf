"""How fast simulated workers are, and how much memory they have. Values; the arithmetic is in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from routing.trace import BLOCK_TOKENS

MIXED_STEP_S: Final = 0.1  # workers' `--mixed-step-ms`, where nobody gives another


@dataclass(frozen=True, slots=True)
class Hardware:
    """The speed of one worker. A step computes one chunk of a prompt, one token of each running request, or both."""

    prompt_s: float  # once a prompt
    token_s: float  # each prompt token that is not cached
    attention_s: float  # and for it, each token before it
    chunk_tokens: int  # of a prompt, in one step
    step_s: float  # a step with running requests
    context_token_s: float  # and each token of their contexts
    kv_tokens: int  # of memory for the contexts of running requests; cached blocks have their own
    kv_token_bytes: int
    link_bytes_per_s: float
    mixed_step_s: float = MIXED_STEP_S  # of a step that computes a chunk beside running requests, at most

    def compute_s(self, first: int, end: int) -> float:
        """Return the time for prompt tokens `first` up to `end`."""
        return (end - first) * (self.token_s + self.attention_s * (first + end) / 2)

    def num_tokens(self, first: int, seconds: float) -> int:
        """Return how many prompt tokens from `first` on take no longer than so many seconds."""
        if seconds <= 0:
            return 0
        token_s = self.token_s + self.attention_s * first
        return int(2 * seconds / (token_s + math.sqrt(token_s**2 + 2 * self.attention_s * seconds)))

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_token_bytes / self.link_bytes_per_s


# A dense model of 32 billion parameters on two H200s: 20,480 prompt tokens/s in contexts of 12,000. A step reads 64 GB
# of weights and 256 KiB of KV for each token of context at 7.7 TB/s; KV leaves over one 400 Gb/s port.
DENSE_32B: Final = Hardware(
    prompt_s=0.005,
    token_s=4.1e-5,
    attention_s=1.3e-9,
    chunk_tokens=2048,
    step_s=0.0083,
    context_token_s=3.4e-8,
    kv_tokens=600_000,
    kv_token_bytes=262_144,
    link_bytes_per_s=50e9,
)

# The worker of the peers' replay: 2 ms a request and 0.5 ms a block that is not cached.
SERIAL: Final = Hardware(
    prompt_s=0.002,
    token_s=0.0005 / BLOCK_TOKENS,
    attention_s=0.0,
    chunk_tokens=1 << 40,
    step_s=0.0,
    context_token_s=0.0,
    kv_tokens=1 << 60,
    kv_token_bytes=0,
    link_bytes_per_s=1.0,
)

# Every prompt takes as long as every other.
INSTANT: Final = replace(SERIAL, prompt_s=0.001, token_s=0.0)
