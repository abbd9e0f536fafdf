"""Fields that ask which earlier tokens the model looked at, and how that is shown: in the words of an SGLang branch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from diptych.common.errors import InvalidRequest
from diptych.generation.attention_tokens import MAX_LAYERS, MAX_TOP_K, NOBODY, AttentionWish, TokenAttention
from diptych.router.http.fields.strict_model import GenerationBody

Layer = Annotated[int, Field(ge=0, lt=2**31)]


class AttendedTokens(TypedDict):
    """What one output token looked at most in one layer, strongest first."""

    layer: int
    token_positions: list[int]  # counted from the first token of the prompt
    attention_scores: list[float]  # the mean of all heads


class AttentionFields(GenerationBody):
    """`None` is the same as absent."""

    return_attention_tokens: bool | None = None
    top_k_attention: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = None
    attention_layers: Annotated[list[Layer], Field(min_length=1, max_length=MAX_LAYERS)] | None = None
    attention_window: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    def attention(self) -> AttentionWish | None:
        """Return what is asked for. Raises `InvalidRequest` for a field that says how, where nothing is asked for."""
        if self.return_attention_tokens:
            default = AttentionWish()
            return AttentionWish(
                default.top_k if self.top_k_attention is None else self.top_k_attention,
                tuple(self.attention_layers or ()),
                self.attention_window or 0,
            )
        for name in ("top_k_attention", "attention_layers", "attention_window"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} is only allowed when return_attention_tokens is true", param=name)
        return None


def shown_attention(told: TokenAttention) -> list[list[AttendedTokens]]:
    """Return a list for each token, with an entry for each layer."""
    return [_of_token(told.span(token, token + 1)) for token in range(len(told))]


def _of_token(told: TokenAttention) -> list[AttendedTokens]:
    entries: list[AttendedTokens] = []
    for number, layer in enumerate(told.layers):
        part = slice(number * told.top_k, (number + 1) * told.top_k)
        positions = [position for position in told.positions[part] if position != NOBODY]
        scores = list(told.weights[part][: len(positions)])
        entries.append({"layer": layer, "token_positions": positions, "attention_scores": scores})
    return entries
