"""The prompt of a leg on the wire: packed tokens, of which none costs a step of Python; behind them, tokens one by one;
and the contents that stand between tokens.

What came as text has become packed tokens before a scheduler sees it. The words for a prompt that is too long are the
same wherever it was tokenised.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diptych.common.arrays import I64
from diptych.common.errors import InvalidRequest
from diptych.generation.embed_rows import EmbedRows
from diptych.generation.segments import ContentSegment, Image, content_len, prompt_keys
from diptych.tokens.packed_tokens import TOKEN_BYTES
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2 import StartLeg

BYTES_PER_TOKEN: Final = 4  # of a text that nobody has tokenised yet; English has about so many


def prompt_of(leg: StartLeg) -> I64:
    """Return the prompt's keys: its tokens, if it has no contents. Raises `InvalidRequest` if it can't be read."""
    if leg.prompt_text:
        raise InvalidRequest("the text of the prompt has not been tokenised", param="prompt_text")
    if len(leg.prompt_tokens) % TOKEN_BYTES:
        raise InvalidRequest("prompt_tokens must have 4 bytes a token", param="prompt_tokens")
    token_ids = np.frombuffer(leg.prompt_tokens, "<u4").astype(np.int64)
    if leg.prompt_token_ids:
        token_ids = np.concatenate((token_ids, np.array(leg.prompt_token_ids, np.int64)))
    return prompt_keys(token_ids, contents_of(leg)) if leg.contents else token_ids


def contents_of(leg: StartLeg) -> tuple[ContentSegment, ...]:
    """Return the segments that are no tokens."""
    return tuple(map(_content_of, leg.contents))


def _content_of(wire: worker_pb2.ContentSegment) -> ContentSegment:
    image = Image(wire.image.height, wire.image.width, wire.image.rgb) if wire.HasField("image") else None
    rows = EmbedRows(wire.rows.width, wire.rows.names, wire.rows.data) if wire.HasField("rows") else None
    return ContentSegment(wire.start, wire.num_tokens, wire.digest, image, wire.encoder_instance_id, rows)


def prompt_len(leg: StartLeg) -> int:
    """Return the number of places: of tokens, if it has no contents; about the number, where there is text."""
    num_tokens = len(leg.prompt_tokens) // TOKEN_BYTES + len(leg.prompt_token_ids)
    return num_tokens + len(leg.prompt_text) // BYTES_PER_TOKEN + content_len(leg.contents)


def words_too_long(prompt_len: int, context_len: int) -> str:
    """Say so of a prompt that leaves no room for output."""
    return (
        f"the prompt has {prompt_len} tokens; with at least one token of output that is more than the context of "
        f"{context_len} tokens"
    )


def words_far_too_long(max_tokens: int) -> str:
    """Say so of a prompt that was not tokenised to its end."""
    return f"the prompt has more than {max_tokens} tokens, which is too many here: make it shorter"
