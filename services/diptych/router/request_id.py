"""The ids of requests: the client's own if it is usable, else a new one; and those of answers. None is a secret."""

from __future__ import annotations

import random
import re
from typing import Final

_USABLE: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces: harmless in headers, logs and memory


def is_usable(request_id: str) -> bool:
    return _USABLE.fullmatch(request_id) is not None


def new_request_id() -> str:
    return f"{random.getrandbits(96):024x}"


def new_answer_id(prefix: str) -> str:
    """Return the id of an answer, as the APIs show it: of 128 bits, so that nobody ever meets another one."""
    return f"{prefix}{random.getrandbits(128):032x}"
