"""Whoever sends requests: counts and limits what the holder of a key has done. Pure.

Rule: a refusal takes nothing from any allowance. Prompt tokens count once they are known, output when its request ends,
so an allowance may be overdrawn, and the next request waits until that is made up for. Every router counts for itself.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Final, Protocol

from diptych.common.errors import InvalidRequest, Overloaded
from diptych.router.errors import RateLimited
from diptych.router.keys.bucket import Bucket
from diptych.router.keys.keyring import ApiKey


class Caller(Protocol):
    """What a request needs of who sent it."""

    @property
    def name(self) -> str:
        """Of the key; empty: there is none."""
        ...

    @property
    def is_admin(self) -> bool: ...

    def admit(self, num_requests: int) -> AbstractContextManager[None]:
        """Hold places for one call that makes so many requests. Raises `RateLimited`; `InvalidRequest`: too many.

        What it took of an allowance is given back when the call is refused: leaves with `Overloaded`.
        """
        ...

    def charge_prompt(self, num_tokens: int) -> None: ...

    def charge_output(self, num_tokens: int) -> None: ...


class _Anybody:
    """A caller of an API that needs no key."""

    name = ""
    is_admin = True

    def admit(self, num_requests: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def charge_prompt(self, num_tokens: int) -> None:
        pass

    def charge_output(self, num_tokens: int) -> None:
        pass


ANYBODY: Final[Caller] = _Anybody()


class KeyHolder:
    """The holder of a key, whatever the limits of the key become."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self._key = key
        self._clock = clock
        self._requests = Bucket(key.requests_per_minute, clock()) if key.requests_per_minute else None
        self._tokens = Bucket(key.tokens_per_minute, clock()) if key.tokens_per_minute else None
        self.num_running = 0
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

    def replace(self, key: ApiKey) -> None:
        """Take new limits. What was used stays used."""
        now_s, self._key = self._clock(), key
        self._requests = _resized(self._requests, key.requests_per_minute, now_s)
        self._tokens = _resized(self._tokens, key.tokens_per_minute, now_s)

    @contextlib.contextmanager
    def admit(self, num_requests: int) -> Generator[None, None, None]:
        self._check(num_requests, self._clock())
        self._charge_call(1)
        self.num_calls += 1
        self.num_running += num_requests
        try:
            yield
        except Overloaded:
            self._charge_call(-1)
            raise
        finally:
            self.num_running -= num_requests

    def charge_prompt(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self._charge(num_tokens)

    def charge_output(self, num_tokens: int) -> None:
        self.output_tokens += num_tokens
        self._charge(num_tokens)

    def _charge_call(self, count: int) -> None:
        if self._requests:
            self._requests.take(count, self._clock())

    def _charge(self, num_tokens: int) -> None:
        if self._tokens:
            self._tokens.take(num_tokens, self._clock())

    def _check(self, num_requests: int, now_s: float) -> None:
        limit = self._key.max_concurrent
        if limit is not None and num_requests > limit:
            raise InvalidRequest(
                f"{num_requests} outputs at once: the key {self.name!r} may have {limit}; ask for fewer"
            )
        if limit is not None and self.num_running + num_requests > limit:
            self._refuse("max_concurrent", f"{limit} requests at once, and {self.num_running} are running", 1.0)
        if self._requests and (wait_s := self._requests.wait_s(1, now_s)):
            self._refuse("requests_per_minute", f"{self._key.requests_per_minute} requests a minute", wait_s)
        if self._tokens and (wait_s := self._tokens.wait_s(1, now_s)):
            self._refuse("tokens_per_minute", f"{self._key.tokens_per_minute} tokens a minute", wait_s)

    def _refuse(self, limit: str, words: str, wait_s: float) -> None:
        self.refusals[limit] += 1
        retry_after_s = max(1, math.ceil(wait_s))
        message = f"the key {self.name!r} is limited to {words}; try again in {retry_after_s} s"
        raise RateLimited(message, retry_after_s=retry_after_s)


def _resized(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket
