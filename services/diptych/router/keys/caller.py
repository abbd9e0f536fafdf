"""Whoever sends requests, found by the key that they carry: counts and limits what its holder has done. Pure.

Rule: a refusal takes nothing from any allowance. Prompt tokens count once they are known, output when its request ends,
so an allowance may be overdrawn, and the next request waits until that is made up for. The processes of a router count
together (`ledger`); what other routers have done is charged here as they tell it (`others`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.generation.request_groups import MAX_PRIORITY
from diptych.router.errors import RateLimited, Unauthenticated
from diptych.router.keys.cache_namespace import NOBODY, group_owner, key_owner
from diptych.router.keys.keyring import ApiKey, Keyring, digest_of
from diptych.router.keys.ledger import Account, Ledger, key_number
from diptych.router.keys.others import NO_USE, Charge, Debt, OthersUse, Told, Use

MAX_TOLD: Final = 2000  # keys in a heartbeat; of further ones each router counts what it does itself
SCHEME: Final = "bearer"
HOW: Final = "send it as `Authorization: Bearer KEY`"


class Caller:
    """What a request needs of who sent it. By itself: a caller of an API that needs no key."""

    @property
    def name(self) -> str:
        """The name of the key; empty: there is none."""
        return ""

    @property
    def is_admin(self) -> bool:
        return True

    @property
    def max_priority(self) -> int:
        """The highest that its requests may ask for."""
        return MAX_PRIORITY

    @property
    def slo_tiers(self) -> Sequence[str]:
        """Those that its requests may name; none: all."""
        return ()

    @property
    def cache_owner(self) -> bytes:
        """Who owns what is cached of its prompts: see `cache_namespace`."""
        return NOBODY

    def admit(self, num_requests: int) -> AbstractContextManager[None]:
        """Hold places for one call that makes so many requests. Raises `RateLimited`; `InvalidRequest`: too many.

        What it took of an allowance is given back when the call is refused: leaves with `Overloaded`.
        """
        return contextlib.nullcontext()

    def keeps(self, share: float) -> bool:
        """Whether this share of each allowance is left when one more request has begun."""
        return True

    def charge_prompt(self, num_tokens: int) -> None:
        """The prompts of a call have so many tokens."""

    def charge_output(self, num_tokens: int) -> None:
        """A request has ended, after so many tokens of output."""


ANYBODY: Final = Caller()


class KeyHolder(Caller):
    """The holder of a key, whatever the limits of the key become."""

    def __init__(self, key: ApiKey, clock: Callable[[], float], account: Account, others: OthersUse) -> None:
        self._key = key
        self._clock = clock
        self._account = account
        self._others = others
        self.number = key_number(key.name)
        self._num_charged = 0  # calls, while they were limited
        self._tokens_charged = 0  # likewise
        self.num_calls = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.refusals: Counter[str] = Counter()  # by limit

    @property
    def name(self) -> str:
        return self._key.name

    @property
    def is_admin(self) -> bool:
        return self._key.admin

    @property
    def max_priority(self) -> int:
        return self._key.max_priority

    @property
    def slo_tiers(self) -> Sequence[str]:
        return self._key.slo_tiers

    @property
    def cache_owner(self) -> bytes:
        group = self._key.share_cache
        return key_owner(self._key.name) if group is None else group_owner(group)

    @property
    def num_running(self) -> int:
        """Requests of this process that have not ended."""
        return self._account.places.num_own

    def replace(self, key: ApiKey) -> None:
        """Take new limits. Of what was used of a minute's allowance, the same part stays used."""
        self._key = key

    @property
    def is_limited(self) -> bool:
        key = self._key
        return bool(key.max_concurrent or key.requests_per_minute or key.tokens_per_minute)

    @property
    def use(self) -> Use:
        """What this process has done for a key while it had limits, and what is owed; nothing for one without."""
        key, account, now_s = self._key, self._account, self._clock()
        if not self.is_limited:
            return NO_USE
        requests_s = account.requests.debt_s(key.requests_per_minute, now_s) if key.requests_per_minute else 0.0
        tokens_s = account.tokens.debt_s(key.tokens_per_minute, now_s) if key.tokens_per_minute else 0.0
        return Use(self._num_charged, self._tokens_charged, self.num_running, Debt(requests_s, tokens_s))

    def charge(self, charge: Charge) -> None:
        """Charge what other routers have done."""
        key, account, now_s = self._key, self._account, self._clock()
        if key.requests_per_minute:
            account.requests.owe(charge.at_least.requests_s, key.requests_per_minute, now_s)
            account.requests.charge(charge.requests, key.requests_per_minute, now_s)
        if key.tokens_per_minute:
            account.tokens.owe(charge.at_least.tokens_s, key.tokens_per_minute, now_s)
            account.tokens.charge(charge.tokens, key.tokens_per_minute, now_s)

    @contextlib.contextmanager
    def admit(self, num_requests: int) -> Generator[None, None, None]:
        per_minute = self._key.requests_per_minute
        self._hold(num_requests)
        try:
            self._charge_call(per_minute)
            try:
                yield
            except Overloaded:
                if per_minute:
                    self._num_charged -= 1
                    self._account.requests.refund(1, per_minute, self._clock())
                raise
        finally:
            self._account.places.release(num_requests)

    def keeps(self, share: float) -> bool:
        key, account, now_s = self._key, self._account, self._clock()
        if key.max_concurrent is not None:
            num_held = account.places.num_held + self._others.places(self.number)
            if num_held >= key.max_concurrent - int(share * key.max_concurrent):
                return False
        for allowance, per_minute in (
            (account.requests, key.requests_per_minute),
            (account.tokens, key.tokens_per_minute),
        ):
            if per_minute and allowance.wait_s(min(per_minute, int(share * per_minute) + 1), per_minute, now_s):
                return False
        return True

    def charge_prompt(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self._charge(num_tokens)

    def charge_output(self, num_tokens: int) -> None:
        self.output_tokens += num_tokens
        self._charge(num_tokens)

    def _charge(self, num_tokens: int) -> None:
        if per_minute := self._key.tokens_per_minute:
            self._tokens_charged += num_tokens
            self._account.tokens.charge(num_tokens, per_minute, self._clock())

    def _hold(self, num_requests: int) -> None:
        limit, places = self._key.max_concurrent, self._account.places
        if limit is not None and num_requests > limit:
            raise InvalidRequest(
                f"{num_requests} outputs at once: the key {self.name!r} may have {limit}; ask for fewer"
            )
        elsewhere = self._others.places(self.number)
        if not places.hold(num_requests, None if limit is None else max(0, limit - elsewhere)):
            num_held = places.num_held + elsewhere
            self._refuse("max_concurrent", f"{limit} requests at once, and {num_held} are running", 1.0)

    def _charge_call(self, per_minute: int | None) -> None:
        """Tokens are only looked at: what a request takes of them is not known yet."""
        now_s, account, tokens = self._clock(), self._account, self._key.tokens_per_minute
        if tokens and (wait_s := account.tokens.wait_s(1, tokens, now_s)):
            self._refuse("tokens_per_minute", f"{tokens} tokens a minute", wait_s)
        if per_minute and (wait_s := account.requests.charge_if_there(1, per_minute, now_s)):
            self._refuse("requests_per_minute", f"{per_minute} requests a minute", wait_s)
        self._num_charged += bool(per_minute)
        self.num_calls += 1

    def _refuse(self, limit: str, words: str, wait_s: float) -> None:
        self.refusals[limit] += 1
        retry_after_s = max(1, math.ceil(wait_s))
        message = f"the key {self.name!r} is limited to {words}; try again in {retry_after_s} s"
        raise RateLimited(message, retry_after_s=retry_after_s)


class Callers:
    """Those who have a key of `keyring()`, which may change at any time: found by one hash and one look-up a request.

    When the keys change, a holder that stays keeps its counts, and requests of one that is gone finish.
    """

    def __init__(self, keyring: Callable[[], Keyring], clock: Callable[[], float], ledger: Ledger) -> None:
        self._keyring = keyring
        self._clock = clock
        self._ledger = ledger
        self._others = OthersUse(ledger.identity)
        self._seen: Keyring = {}
        self._by_digest: dict[bytes, KeyHolder] = {}
        self.holders: dict[str, KeyHolder] = {}  # by name, former ones too: metrics must not fall back
        self.refusals: Counter[str] = Counter()  # by reason
        self._follow(keyring())

    def identify(self, authorization: str | None) -> KeyHolder:
        """Return who sent this header. Raises `Unauthenticated`."""
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not key.strip():
            self.refusals["no_key"] += 1
            raise Unauthenticated(f"this API needs a key: {HOW}")
        holder = self._by_digest.get(digest_of(key.strip()))
        if holder is None:
            self.refusals["wrong_key"] += 1
            raise Unauthenticated(f"this key is not known here: compare it with the one that you were given, and {HOW}")
        return holder

    def holder(self, name: str) -> KeyHolder | None:
        """Return the holder of the key of this name; None: there is none now."""
        self._look()
        holder = self.holders.get(name)
        return holder if holder in self._by_digest.values() else None

    @property
    def ledger(self) -> int:
        """The identity of what all of them are counted in."""
        return self._ledger.identity

    def uses(self) -> dict[int, Use]:
        """Return what this process has done for keys with limits, as far as other routers are to know it.

        Those that were used come first; the others are told so that their first use is known to be one.
        """
        self._look()
        found = {holder.number: holder.use for holder in self.holders.values() if holder.is_limited}
        used = {number: use for number, use in found.items() if use != NO_USE}
        return dict(itertools.islice((used | found).items(), MAX_TOLD))

    def hear(self, told: Mapping[int, Told]) -> None:
        """Take in what all processes of all routers did. Of those that share a ledger the first one charges it."""
        self._look()
        charges = self._others.hear(told, self._clock())
        if self._ledger.process == 0:
            for holder in self.holders.values():
                if charge := charges.get(holder.number):
                    holder.charge(charge)

    def _look(self) -> None:
        keyring = self._keyring()
        if keyring is not self._seen:
            self._follow(keyring)

    def _follow(self, keyring: Keyring) -> None:
        self._seen = keyring
        for key in keyring.values():
            if key.name in self.holders:
                self.holders[key.name].replace(key)
            else:
                self.holders[key.name] = KeyHolder(key, self._clock, self._ledger.account(key.name), self._others)
        self._by_digest = {digest: self.holders[key.name] for digest, key in keyring.items()}
