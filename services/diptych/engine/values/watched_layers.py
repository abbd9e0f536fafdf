"""What a worker can tell of the inside of its model: what tokens look at in which layers, and hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from diptych.common.errors import InvalidRequest
from diptych.generation.insight import validate_states

if TYPE_CHECKING:
    from diptych.architectures.config import ModelConfig
    from diptych.generation.attention_tokens import AttentionWish


@dataclass(frozen=True, slots=True)
class WatchedLayers:
    """Layers whose attention may be asked for, or why there are none."""

    layers: tuple[int, ...]
    lacks: str = ""  # why there are none

    def refuse(self, wish: AttentionWish) -> str | None:
        """Say why a request can't have this; None when it can."""
        if not self.layers:
            return f"return_attention_tokens is not available here: {self.lacks}"
        wrong = [layer for layer in wish.layers if layer not in self.layers]
        if wrong:
            known = ", ".join(map(str, self.layers))
            return f"attention_layers takes layers with attention, which are {known}; {wrong[0]} is none"
        return None


NOTHING_WATCHED: Final = WatchedLayers((), "this worker does not watch attention")


def watched_layers(config: ModelConfig, device: str, num_ranks: int) -> WatchedLayers:
    """Return which layers a worker can watch that computes a model on `device`, on so many ranks."""
    lacks = None
    if device == "sim":
        lacks = "a simulated model has no attention"
    elif device != "cpu":
        lacks = "it is computed on CPUs only: serve the model with --device cpu to look into it"
    elif num_ranks > 1:
        words = "each process has a part of the heads, or of the layers, only"
        lacks = f"{words}: serve the model with --tp 1 and --pp 1 to look into it"
    elif config.latent is not None or config.indexer is not None:
        lacks = "this model keeps latents in place of keys"
    elif config.pooling is not None or not config.attention_layers:
        lacks = "this model has no tokens of output that attend"
    return WatchedLayers(config.attention_layers) if lacks is None else WatchedLayers((), lacks)


def default_layer(config: ModelConfig) -> int:
    """Return the last layer that sees all tokens; where all have windows, the last with attention."""
    layers = config.attention_layers
    return next((layer for layer in reversed(layers) if not config.window(layer)), layers[-1])


@dataclass(frozen=True, slots=True)
class ToldStates:
    """Hidden states that may be asked for, or why there are none."""

    hidden_size: int
    lacks: str = ""  # why there are none

    def refuse(self, max_tokens: int) -> str | None:
        """Say why those of an output of so many tokens can't be had; None when they can."""
        if self.lacks:
            return f"return_hidden_states is not available here: {self.lacks}"
        try:
            validate_states(self.hidden_size, max_tokens)
        except InvalidRequest as error:
            return str(error)
        return None


NO_STATES: Final = ToldStates(0, "this worker does not tell them")


def told_states(config: ModelConfig, device: str, num_ranks: int) -> ToldStates:
    """Return whether a worker can tell hidden states that computes a model on `device`, on so many ranks."""
    lacks = ""
    if device == "sim":
        lacks = "a simulated model has none"
    elif device != "cpu":
        lacks = "they are kept on CPUs only: serve the model with --device cpu to look into it"
    elif num_ranks > 1:
        lacks = "one process must have the whole model: serve it with --tp 1 and --pp 1 to look into it"
    elif config.pooling is not None:
        lacks = "this model makes no tokens"
    return ToldStates(config.hidden_size, lacks)
