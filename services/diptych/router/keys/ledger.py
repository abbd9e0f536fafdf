"""What is counted of each key, in memory that all processes of a router share: places held, and allowances used.

A place is counted in a column of the process that holds it, and whoever asks adds the columns up. So what a process
held comes back when it has died: its parent empties the column. An allowance is one word: when it will be full again.
Everything is done in C (`ledger.c`) without a lock, so that nobody ever waits for a process that was stopped.

Pure but for the memory: it is told the time, on the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import random
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from diptych.common.native import build_library, declare

MAX_KEYS: Final = 4096  # that processes count together, former ones included; beyond them each counts for itself
NO_LIMIT: Final = 1 << 60
WORD_BYTES: Final = 8
NS_PER_S: Final = 10**9
MINUTE_NS: Final = 60 * NS_PER_S
LONGEST_NS: Final = 1 << 54  # to refill what was taken at once

_HASHES, _REQUESTS, _TOKENS, _PLACES = range(4)  # columns
_SIGNATURES: Final[dict[str, tuple[type | None, list[type]]]] = {
    "row": (c_int64, [c_void_p, c_int64, c_int64]),
    "held": (c_int64, [c_void_p, c_int64, c_int64]),
    "hold": (c_int64, [c_void_p, *[c_int64] * 5]),
    "release": (None, [c_void_p, c_int64, c_int64, c_int64]),
    "forget": (None, [c_void_p, c_int64, c_int64]),
    "charge": (c_int64, [c_void_p, *[c_int64] * 4]),
    "wait": (c_int64, [c_void_p, *[c_int64] * 3]),
}


def num_bytes(num_processes: int, num_rows: int = MAX_KEYS) -> int:
    """Return how much memory a ledger takes. Zeros are an empty one."""
    return WORD_BYTES * num_rows * (_PLACES + num_processes)


class Ledger:
    """The counts of all keys, as one process writes them. Without a descriptor nobody else sees them."""

    def __init__(
        self,
        num_processes: int = 1,
        process: int = 0,
        descriptor: int = -1,
        *,
        num_rows: int = MAX_KEYS,
        identity: int | None = None,
    ) -> None:
        """`identity` is that of the memory: all processes that share it give the same one."""
        self.identity = random.getrandbits(63) if identity is None else identity
        self.num_processes = num_processes
        self.process = process
        self.num_rows = num_rows
        self._memory = mmap.mmap(descriptor, num_bytes(num_processes, num_rows))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._library = load()

    def account(self, name: str) -> Account:
        """Return the counts of a key; those of this process alone where the ledger is full."""
        digest = int.from_bytes(_digest(name), "little", signed=True)
        row = self._library.ledger_row(self.address_of(_HASHES, 0), self.num_rows, digest or 1)
        if row < 0:
            return Ledger(num_rows=1).account(name)
        return Account(Places(self, row), Allowance(self, _REQUESTS, row), Allowance(self, _TOKENS, row))

    def forget(self, process: int) -> None:
        """A process has ended: its places are free."""
        self._library.ledger_forget(self.address_of(_PLACES, 0), self.num_rows, process)

    def address_of(self, column: int, row: int) -> int:
        """Return where a word lies, for as long as this ledger lives."""
        return self._address + WORD_BYTES * (self.num_rows * column + row)


class Places:
    """Places that requests of a key hold."""

    def __init__(self, ledger: Ledger, row: int) -> None:
        self._ledger = ledger
        self._address = ledger.address_of(_PLACES, row)
        self._size = ledger.num_rows, ledger.num_processes
        self._library = load()
        self.num_own = 0  # of this process

    @property
    def num_held(self) -> int:
        """The places that all processes hold."""
        return int(self._library.ledger_held(self._address, *self._size))

    def hold(self, count: int, limit: int | None) -> bool:
        """Take places, unless all processes together would hold more than `limit`; return whether it has them."""
        most = NO_LIMIT if limit is None else limit
        has_them = bool(self._library.ledger_hold(self._address, *self._size, self._ledger.process, count, most))
        self.num_own += count * has_them
        return has_them

    def release(self, count: int) -> None:
        self.num_own -= count
        self._library.ledger_release(self._address, self._ledger.num_rows, self._ledger.process, count)


class Allowance:
    """What a key may use in a minute. All of it is there at once, refills steadily, and may be overdrawn."""

    def __init__(self, ledger: Ledger, column: int, row: int) -> None:
        self._ledger = ledger  # keeps the memory
        self._address = ledger.address_of(column, row)
        self._library = load()

    def wait_s(self, amount: int, per_minute: int, now_s: float) -> float:
        """Return how long it takes until `amount` is there; 0 if it is."""
        cost = _cost_ns(amount, per_minute)
        return float(self._library.ledger_wait(self._address, cost, MINUTE_NS, _ns(now_s))) / NS_PER_S

    def charge_if_there(self, amount: int, per_minute: int, now_s: float) -> float:
        """Charge `amount` and return 0; or charge nothing, and return how long it takes until it is there."""
        cost = _cost_ns(amount, per_minute)
        return float(self._library.ledger_charge(self._address, cost, MINUTE_NS, _ns(now_s), False)) / NS_PER_S

    def debt_s(self, per_minute: int, now_s: float) -> float:
        """Return how long it takes until all of it is there."""
        return self.wait_s(per_minute, per_minute, now_s)

    def owe(self, debt_s: float, per_minute: int, now_s: float) -> None:
        """Have it take at least so long until all of it is there."""
        if (more_s := debt_s - self.debt_s(per_minute, now_s)) > 0:
            self.charge(math.ceil(more_s * per_minute / 60), per_minute, now_s)

    def charge(self, amount: int, per_minute: int, now_s: float) -> None:
        """Charge `amount`, whether it is there or not; a negative one is given back."""
        self._library.ledger_charge(self._address, _cost_ns(amount, per_minute), MINUTE_NS, _ns(now_s), True)

    def refund(self, amount: int, per_minute: int, now_s: float) -> None:
        self._library.ledger_charge(self._address, -_cost_ns(amount, per_minute), MINUTE_NS, _ns(now_s), True)


@dataclass(frozen=True, slots=True)
class Account:
    """What is counted of one key."""

    places: Places
    requests: Allowance
    tokens: Allowance


def key_number(name: str) -> int:
    """Return what names a key between routers, in 64 bits."""
    return int.from_bytes(_digest(name), "little")


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=WORD_BYTES).digest()


def _cost_ns(amount: int, per_minute: int) -> int:
    """Return how long it takes to refill `amount`."""
    return min(amount * MINUTE_NS // per_minute, LONGEST_NS)


def _ns(now_s: float) -> int:
    return round(now_s * NS_PER_S)


def build() -> Path:
    """Compile the library, unless that was done before."""
    return build_library(Path(__file__).with_suffix(".c"), flags=("-std=c11",))


@functools.cache
def load() -> ctypes.PyDLL:
    """Return the library, compiling it at the first call on this machine. Raises `ConfigError` without a compiler."""
    return declare(ctypes.PyDLL(str(build())), "ledger", _SIGNATURES)
