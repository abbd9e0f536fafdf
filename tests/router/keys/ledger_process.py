"""One process of several that count in one ledger: `python ledger_process.py WHAT NUM_PROCESSES PROCESS DESCRIPTOR`."""

from __future__ import annotations

import mmap
import sys
import time

from diptych.router.keys.ledger import Ledger, num_bytes

NUM_RACES, PER_MINUTE = 100_000, 20_000


def wait_for_the_others(ledger: Ledger) -> None:
    ready = ledger.account("ready").places
    ready.hold(1, None)
    while ready.num_held < ledger.num_processes:
        time.sleep(0)


def race_for_the_last_place(ledger: Ledger, descriptor: int) -> int:
    """Take the only place over and over; return whether somebody else was there, too. Says how often it had it."""
    places, num_held, num_shared = ledger.account("k").places, 0, 0
    with mmap.mmap(descriptor, num_bytes(ledger.num_processes) + mmap.PAGESIZE) as memory:
        holder = memoryview(memory)[-8:].cast("q")  # behind the ledger
        for _ in range(NUM_RACES):
            if places.hold(1, 1):
                holder[0] = ledger.process + 1
                num_shared += places.hold(1, 1) or holder[0] != ledger.process + 1
                places.release(1)
                num_held += 1
        holder.release()
    print(num_held)
    return int(num_shared > 0)


def charge_what_is_there(ledger: Ledger) -> int:
    """Charge requests of one minute until there are no more; say how many."""
    requests, num_charged = ledger.account("k").requests, 0
    while not requests.charge_if_there(1, PER_MINUTE, now_s=1.0):
        num_charged += 1
    print(num_charged)
    return 0


def hold_for_ever(ledger: Ledger) -> int:
    ledger.account("k").places.hold(3, 3)
    print("held", flush=True)
    time.sleep(600)
    return 0


def main() -> int:
    what, (num_processes, process, descriptor) = sys.argv[1], map(int, sys.argv[2:])
    ledger = Ledger(num_processes, process, descriptor)
    match what:
        case "race":
            wait_for_the_others(ledger)
            return race_for_the_last_place(ledger, descriptor)
        case "charge":
            wait_for_the_others(ledger)
            return charge_what_is_there(ledger)
    return hold_for_ever(ledger)


if __name__ == "__main__":
    sys.exit(main())
