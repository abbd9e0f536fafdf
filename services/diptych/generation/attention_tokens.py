"""Which earlier tokens a model looked at most for each token of its output: what is asked for, and what is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import InvalidRequest

MAX_TOP_K: Final = 32
MAX_LAYERS: Final = 8
MAX_ENTRIES: Final = 2**17  # of all outputs of a request: what is listed of all their tokens and layers
NOBODY: Final = -1  # in place of a position, where there are fewer earlier tokens than are asked for


@dataclass(frozen=True, slots=True)
class AttentionWish:
    """What a request asks for."""

    top_k: int = 5  # tokens to list of each output token and layer, strongest first
    layers: tuple[int, ...] = ()  # of the model, counted from 0; none: the last that sees all tokens
    window: int = 0  # only the last so many of the earlier tokens are listed; 0: all may be

    def most_tokens(self, num_outputs: int) -> int:
        """Return how long each of so many outputs of a request may be; 0: there are too many of them."""
        return MAX_ENTRIES // (self._token_entries * num_outputs)

    @property
    def _token_entries(self) -> int:
        return self.top_k * max(1, len(self.layers))

    def validate(self, max_tokens: int, num_outputs: int = 1) -> None:
        """Raise `InvalidRequest`, naming the field, for what is out of range in outputs of `max_tokens`."""
        _check(1 <= self.top_k <= MAX_TOP_K, "top_k_attention", f"must be from 1 to {MAX_TOP_K}, not {self.top_k}")
        num_layers, window = len(self.layers), self.window
        _check(num_layers <= MAX_LAYERS, "attention_layers", f"takes at most {MAX_LAYERS} layers, not {num_layers}")
        _check(num_layers == len(set(self.layers)), "attention_layers", "names a layer twice")
        _check(all(0 <= layer < 2**31 for layer in self.layers), "attention_layers", "are counted from 0")
        _check(0 <= window < 2**31, "attention_window", f"must be 0 (all tokens) or a count, not {window}")
        entries = max_tokens * self._token_entries * num_outputs
        words = (
            f"times layers, max_tokens and outputs (n, of each prompt) must be at most {MAX_ENTRIES}, "
            f"not {self.top_k} * {max(1, num_layers)} * {max_tokens} * {num_outputs} = {entries}: ask for fewer"
        )
        _check(entries <= MAX_ENTRIES, "top_k_attention", words)


@dataclass(frozen=True, slots=True)
class TokenAttention:
    """What consecutive output tokens of a request looked at.

    Entry j, strongest first, of token i in layer number l: `[(i * len(layers) + l) * top_k + j]`.
    """

    layers: tuple[int, ...]
    top_k: int
    positions: tuple[int, ...]  # of tokens, counted from the first of the prompt; `NOBODY`: there are no more
    weights: tuple[float, ...]  # of their attention, the mean of all heads

    def __len__(self) -> int:
        return len(self.positions) // self._width if self._width else 0

    @property
    def _width(self) -> int:
        return len(self.layers) * self.top_k

    def span(self, start: int, stop: int) -> TokenAttention:
        """Return what is told of tokens `[start, stop)`."""
        part = slice(start * self._width, stop * self._width)
        return TokenAttention(self.layers, self.top_k, self.positions[part], self.weights[part])


def join(parts: Sequence[TokenAttention]) -> TokenAttention:
    """Return what is told of all tokens of `parts`, at least one, in order."""
    return TokenAttention(
        parts[0].layers,
        parts[0].top_k,
        tuple(position for part in parts for position in part.positions),
        tuple(weight for part in parts for weight in part.weights),
    )


def _check(ok: bool, param: str, rule: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} {rule}", param=param)
