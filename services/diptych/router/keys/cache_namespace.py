"""Names the namespace of a request's cached prefixes: by whose key it is, and by its salt. Pure.

Rule: prompts of two keys never meet in a cache, unless the operator lets these keys share. A client chooses its salt
and nothing else, and no salt leads into the namespace of another key: a length in front tells owner and salt apart, and
what comes of both is a digest, which nobody can aim. It begins with a byte that no text begins with, so that it is no
salt of a client without a key either.

Workers are told this name in the place of the salt. It is the same at every router, and short whatever the salt.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from diptych.common.errors import InvalidRequest
from diptych.generation.request_groups import Hints

_MARK: Final = b"\xff"  # in no UTF-8
_DIGEST_BYTES: Final = 16

MAX_SALT_LEN: Final = 256

NOBODY: Final = b""  # the owner where there are no keys


def key_owner(name: str) -> bytes:
    """Return who owns what a key alone has cached."""
    return b"key " + name.encode()


def group_owner(name: str) -> bytes:
    """Return who owns what the keys of a group share; no key of that name does."""
    return b"group " + name.encode()


def cache_namespace(owner: bytes, salt: str) -> bytes:
    """Return the namespace of a salt among those of an owner. Without an owner it is the salt itself."""
    utf8 = salt.encode()
    if not owner:
        return utf8
    return _MARK + blake2b(len(owner).to_bytes(4, "little") + owner + utf8, digest_size=_DIGEST_BYTES).digest()


def hints_of(owner: bytes, salt: str, speculate: str = "", expected_tokens: int = 0) -> Hints:
    """Return what a request of this owner says with its salt, and of its output. Raises `InvalidRequest`."""
    if len(salt) > MAX_SALT_LEN:
        raise InvalidRequest(f"cache_salt takes at most {MAX_SALT_LEN} characters", param="cache_salt")
    hints = Hints(cache_namespace(owner, salt), speculate=speculate, expected_tokens=expected_tokens)
    hints.validate()
    return hints
