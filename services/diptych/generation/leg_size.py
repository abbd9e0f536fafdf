"""Whether a leg is of a size that a scheduler can be shown: looked at in a worker's frontend, by counts alone.

A router checks all of this before it sends a leg. One that does not would stop the scheduler, and everybody's requests
with it, for as long as it takes to read millions of numbers.
"""

from __future__ import annotations

from typing import Final

from diptych.generation.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_REGEX,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from diptych.tokens.packed_tokens import TOKEN_BYTES
from diptych.v1.worker_pb2 import LEG_KIND_POOL, StartLeg

MAX_NAME_LEN: Final = 1024  # of a request, tenant or adapter
MAX_SALT_BYTES: Final = 4096
MAX_LABELS: Final = 1024
MAX_CHARS_A_TOKEN: Final = 512  # the longest tokens, of blanks, have a quarter

_COUNTS: Final = (
    ("stop", MAX_STOP_STRINGS),
    ("stop_regex", MAX_STOP_REGEX),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS),
    ("logit_bias", MAX_LOGIT_BIAS),
    ("allowed_token_ids", MAX_ALLOWED_TOKENS),
)


def too_large(leg: StartLeg, context_len: int) -> str | None:
    """Say what of `leg` is too large for a context of so many tokens; None when nothing is."""
    num_tokens = len(leg.prompt_token_ids) + len(leg.prompt_tokens) // TOKEN_BYTES
    num_tokens += sum(max(1, content.num_tokens) for content in leg.contents)
    if num_tokens >= context_len + (leg.kind == LEG_KIND_POOL):
        return f"the prompt has {num_tokens} tokens; this worker takes fewer than {context_len} with output"
    if len(leg.prompt_text) > context_len * MAX_CHARS_A_TOKEN:
        return f"the prompt has {len(leg.prompt_text)} characters, more than {context_len} tokens can have"
    if len(leg.cache_salt) > MAX_SALT_BYTES:
        return f"cache_salt has {len(leg.cache_salt)} bytes, of at most {MAX_SALT_BYTES}"
    if len(leg.prediction) > context_len * TOKEN_BYTES:
        return f"prediction has {len(leg.prediction) // TOKEN_BYTES} tokens, of at most {context_len}"
    for name in ("request_id", "tenant", "lora", "speculate"):
        if (length := len(getattr(leg, name))) > MAX_NAME_LEN:
            return f"{name} has {length} characters, of at most {MAX_NAME_LEN}"
    if len(leg.label_token_ids) > MAX_LABELS:
        return f"label_token_ids takes at most {MAX_LABELS}, not {len(leg.label_token_ids)}"
    for name, most in _COUNTS:
        if (count := len(getattr(leg.sampling, name))) > most:
            return f"{name} takes at most {most}, not {count}"
    return None
