"""Notes what a client asks for in OpenTelemetry's words for generative AI: how much, and never what is said."""

from __future__ import annotations

from typing import Final

from diptych.router.request import ChatPrompt
from diptych.router.tracing.record import Trace
from diptych.router.wish import Wish

MAX_INT: Final = (1 << 63) - 1  # in a trace; a client may ask for more


def note_wish(call: Trace, wish: Wish, model_id: str) -> None:
    """Describe a wish that was checked: nothing of it is long, or can't be sent."""
    call.note_choices(wish.num_made)
    call.note(
        {
            "gen_ai.operation.name": "chat" if isinstance(wish.prompts[0], ChatPrompt) else "text_completion",
            "gen_ai.provider.name": "diptych",
            "gen_ai.request.model": wish.model or model_id,
            "gen_ai.request.max_tokens": None if wish.max_tokens is None else min(wish.max_tokens, MAX_INT),
            "gen_ai.request.temperature": wish.params.temperature,
            "gen_ai.request.top_p": wish.params.top_p,
            "gen_ai.request.choice.count": wish.num_choices if wish.num_choices > 1 else None,
        }
    )
