"""How a client opens and closes a session, whichever API it speaks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.router.admission.session_line import Key
from diptych.router.errors import ModelNotFound
from diptych.router.serve.models import Models
from diptych.router.values.kept_sessions import IDLE_S, Terms

MAX_WAIT_S: Final = 600.0  # that a call may wait in line for room for a session
MAX_COUNT: Final = 2**31 - 1  # of tokens that a client may name
MAX_SESSION_ID_LEN: Final = 128
MAX_RID_LEN: Final = 128  # of a turn


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client says of a session that it opens; within bounds."""

    max_tokens: int  # of all turns
    session_id: str = ""  # empty: a new one
    timeout_s: float = 0.0  # that it may be unused; 0: as is usual
    wait_s: float = 0.0  # in line for room; 0: no line
    context_tokens: int = 0  # the longest context that is expected; 0: `max_tokens`
    model: str = ""  # empty: the only one


async def open_session(models: Models, owner: str, wish: Wish) -> str:
    """Return the session's name, once it is open. Raises the caller's `DiptychError`.

    Cancel it if the client leaves: its place in line is kept for a while.
    """
    key = Key(owner, wish.session_id or secrets.token_hex(16))
    await models.desk.open(key, _terms(models, wish), wish.wait_s)
    return key.session_id


async def close_session(models: Models, owner: str, session_id: str) -> bool:
    """Return whether it was open, or waited. Raises `InvalidRequest` for a name that no session has."""
    if len(session_id) > MAX_SESSION_ID_LEN:
        raise InvalidRequest(f"session_id must have at most {MAX_SESSION_ID_LEN} characters", param="session_id")
    return await models.desk.close(Key(owner, session_id))


def _terms(models: Models, wish: Wish) -> Terms:
    pipeline = models.named(wish.model)
    if wish.model and wish.model not in (*pipeline.all_names, *pipeline.all_adapters):
        raise ModelNotFound(f"the model {wish.model!r} does not exist")
    expected_tokens = min(wish.context_tokens or wish.max_tokens, pipeline.context_len)
    expected_tokens = expected_tokens if wish.wait_s else 0
    return Terms(wish.max_tokens, wish.timeout_s or IDLE_S, expected_tokens, models.number(pipeline))
