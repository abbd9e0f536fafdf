"""What a model's inside tells at each token of an output, to those who ask: what was looked at, and hidden states.

All of it goes one way, beside the tokens: from a step to its requests, and with their outputs to the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from diptych.common.errors import InvalidRequest
from diptych.generation import attention_tokens
from diptych.generation.attention_tokens import AttentionWish, TokenAttention

MAX_STATE_VALUES: Final = 2**19  # of all outputs of a request: 2 MiB, and about 10 MiB as JSON
_VALUE_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class InsightWish:
    """What a request asks for: at least one of these."""

    attention: AttentionWish | None = None
    hidden_states: bool = False


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden state from which each of consecutive tokens was predicted: what the output projection was given."""

    size: int  # numbers of each
    values: bytes  # `[num_tokens, size]`, little-endian float32

    def span(self, start: int, stop: int) -> HiddenStates:
        """Return those of tokens `[start, stop)`."""
        width = self.size * _VALUE_NBYTES
        return HiddenStates(self.size, self.values[start * width : stop * width])

    def rows(self) -> list[list[float]]:
        """Return the numbers of each token."""
        rows: list[list[float]] = np.frombuffer(self.values, "<f4").reshape(-1, self.size).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Insight:
    """What is told of consecutive tokens of a request."""

    attention: TokenAttention | None = None
    hidden_states: HiddenStates | None = None

    def span(self, start: int, stop: int) -> Insight:
        """Return what is told of tokens `[start, stop)`."""
        return Insight(
            None if self.attention is None else self.attention.span(start, stop),
            None if self.hidden_states is None else self.hidden_states.span(start, stop),
        )


def join(parts: Sequence[Insight]) -> Insight:
    """Return what is told of all tokens of `parts`, at least one, in order; all tell of the same."""
    attention = [part.attention for part in parts if part.attention is not None]
    states = [part.hidden_states for part in parts if part.hidden_states is not None]
    return Insight(
        attention_tokens.join(attention) if attention else None,
        HiddenStates(states[0].size, b"".join([each.values for each in states])) if states else None,
    )


def most_state_tokens(hidden_size: int, num_outputs: int) -> int:
    """Return how long each of so many outputs may be whose hidden states are told; 0: there are too many of them."""
    return MAX_STATE_VALUES // (max(1, hidden_size) * num_outputs)


def validate_states(hidden_size: int, max_tokens: int, num_outputs: int = 1) -> None:
    """Raise `InvalidRequest` where the hidden states of outputs of `max_tokens` are too many."""
    if max_tokens > most_state_tokens(hidden_size, num_outputs):
        values = hidden_size * max_tokens * num_outputs
        words = (
            f"return_hidden_states: {hidden_size} numbers times max_tokens and outputs (n, of each prompt) must be at "
            f"most {MAX_STATE_VALUES}, not {hidden_size} * {max_tokens} * {num_outputs} = {values}: ask for fewer"
        )
        raise InvalidRequest(words, param="return_hidden_states")
