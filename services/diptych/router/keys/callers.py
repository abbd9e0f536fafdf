"""Finds who calls by the key that a request carries. One hash and one look-up a request. Pure.

When the keys change, a holder that stays keeps its counts, and requests of one that is gone finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from diptych.router.errors import Unauthenticated
from diptych.router.keys.caller import KeyHolder
from diptych.router.keys.keyring import Keyring, digest_of
from diptych.router.keys.ledger import Ledger

SCHEME: Final = "bearer"
HOW: Final = "send it as `Authorization: Bearer KEY`"


class Callers:
    """Those who have a key of `keyring()`, which may change at any time."""

    def __init__(self, keyring: Callable[[], Keyring], clock: Callable[[], float], ledger: Ledger) -> None:
        self._keyring = keyring
        self._clock = clock
        self._ledger = ledger
        self._seen: Keyring = {}
        self._by_digest: dict[bytes, KeyHolder] = {}
        self.holders: dict[str, KeyHolder] = {}  # by name, former ones too: metrics must not fall back
        self.refusals: Counter[str] = Counter()  # by reason
        self._follow(keyring())

    def identify(self, authorization: str | None) -> KeyHolder:
        """Return who sent this header. Raises `Unauthenticated`."""
        keyring = self._keyring()
        if keyring is not self._seen:
            self._follow(keyring)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not key.strip():
            self.refusals["no_key"] += 1
            raise Unauthenticated(f"this API needs a key: {HOW}")
        holder = self._by_digest.get(digest_of(key.strip()))
        if holder is None:
            self.refusals["wrong_key"] += 1
            raise Unauthenticated(f"this key is not known here: compare it with the one that you were given, and {HOW}")
        return holder

    def _follow(self, keyring: Keyring) -> None:
        self._seen = keyring
        for key in keyring.values():
            if key.name in self.holders:
                self.holders[key.name].replace(key)
            else:
                self.holders[key.name] = KeyHolder(key, self._clock, self._ledger.account(key.name))
        self._by_digest = {digest: self.holders[key.name] for digest, key in keyring.items()}
