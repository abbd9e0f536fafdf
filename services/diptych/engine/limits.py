"""The sizes that bound a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed at start, from the model and the configuration."""

    context_len: int  # tokens, prompt + output, that the model takes
    vocab_size: int
    eos_ids: frozenset[int]
    max_step_tokens: int  # prompt tokens an extend step computes; longer prompts are chunked
    max_requests: int  # that hold KV at once
