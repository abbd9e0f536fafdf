"""Notes what a client asks for: how much and of whom, never what is said."""

from __future__ import annotations

from diptych.router.request import ChatPrompt
from diptych.router.tracing.record import CallTrace, known
from diptych.router.wish import Wish


def note_wish(call: CallTrace, wish: Wish, model_id: str) -> None:
    """Describe `wish` in OpenTelemetry's words for generative AI, where there are any."""
    call.num_made = wish.num_made
    call.attributes |= known(
        {
            "gen_ai.operation.name": "chat" if isinstance(wish.prompts[0], ChatPrompt) else "text_completion",
            "gen_ai.provider.name": "diptych",
            "gen_ai.request.model": wish.model or model_id,
            "gen_ai.request.max_tokens": wish.max_tokens,
            "gen_ai.request.temperature": wish.params.temperature,
            "gen_ai.request.top_p": wish.params.top_p,
            "gen_ai.request.choice.count": wish.num_choices if wish.num_choices > 1 else None,
            "diptych.request_id": wish.request_id,
        }
    )
