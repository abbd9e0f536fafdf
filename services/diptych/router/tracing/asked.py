"""Notes what a client asks for in OpenTelemetry's words for generative AI: how much, and never what is said."""

from __future__ import annotations

from typing import Final

from diptych.router.request import ChatPrompt, ClientRequest
from diptych.router.tracing.record import Trace

MAX_INT: Final = (1 << 63) - 1  # in a trace; a client may ask for more


def note_request(call: Trace, client: ClientRequest, model_id: str) -> None:
    """Describe a request that was checked: nothing of it is long, or can't be sent."""
    call.note_choices(client.num_made)
    call.note(
        {
            "gen_ai.operation.name": "chat" if isinstance(client.prompts[0], ChatPrompt) else "text_completion",
            "gen_ai.provider.name": "diptych",
            "gen_ai.request.model": client.model or model_id,
            "gen_ai.request.max_tokens": None if client.max_tokens is None else min(client.max_tokens, MAX_INT),
            "gen_ai.request.temperature": client.params.temperature,
            "gen_ai.request.top_p": client.params.top_p,
            "gen_ai.request.choice.count": client.num_choices if client.num_choices > 1 else None,
        }
    )
