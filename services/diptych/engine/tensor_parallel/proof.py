"""How ranks know each other at ports that any user of the host can reach: by a secret in a folder that only they read.

Gloo gives the place of a rank to whoever connects first and guesses a small number. So each rank proves to each other
that it knows the secret, by words that are good for these two and this direction only. Pure.
"""

from __future__ import annotations

import hmac
from typing import Final

SECRET_BYTES: Final = 32
PROOF_BYTES: Final = 32


def proof(secret: bytes, writer: int, reader: int) -> bytes:
    """Return what rank `writer` shows to rank `reader`."""
    return hmac.digest(secret, f"{writer} to {reader}".encode(), "sha256")


def impostors(secret: bytes, reader: int, shown: list[bytes]) -> list[int]:
    """Return the ranks whose place somebody else has, by what each has `shown` to `reader`."""
    return [writer for writer, each in enumerate(shown) if not hmac.compare_digest(each, proof(secret, writer, reader))]
