"""Counts that several processes share."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.common.shared_memory import SharedMemory
from diptych.router.keys.ledger import MAX_KEYS, Allowance, Ledger, num_bytes

NUM_PROCESSES = 3
SCRIPT = Path(__file__).with_name("ledger_process.py")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory("test", num_bytes(NUM_PROCESSES) + mmap.PAGESIZE)
    yield memory
    memory.close()


def start(what: str, process: int, memory: SharedMemory) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), what, *map(str, (NUM_PROCESSES, process, memory.descriptor))]
    return subprocess.Popen(command, pass_fds=[memory.descriptor], stdout=subprocess.PIPE, text=True)


def outputs(what: str, memory: SharedMemory) -> list[int]:
    """Run processes at the same time; return the number that each says."""
    running = [start(what, process, memory) for process in range(NUM_PROCESSES)]
    said = [int(process.communicate(timeout=300)[0]) for process in running]
    assert [process.returncode for process in running] == [0] * NUM_PROCESSES
    return said


@pytest.mark.integration
def test_two_processes_never_have_the_last_place_at_once(memory: SharedMemory) -> None:
    assert sum(outputs("race", memory)) > 0
    assert Ledger(NUM_PROCESSES, 0, memory.descriptor).account("k").places.num_held == 0


@pytest.mark.integration
def test_processes_together_take_no_more_than_a_minutes_allowance(memory: SharedMemory) -> None:
    assert sum(outputs("charge", memory)) == 20_000


@pytest.mark.integration
def test_what_a_process_held_comes_back_when_it_was_killed(memory: SharedMemory) -> None:
    with start("hold", 2, memory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
    ledger = Ledger(NUM_PROCESSES, 0, memory.descriptor)
    places = ledger.account("k").places
    assert (places.num_held, places.hold(1, 3)) == (3, False)
    ledger.forget(2)
    assert (places.num_held, places.hold(3, 3), places.num_held) == (0, True, 3)
    ledger.forget(1)
    assert places.num_held == 3  # that was another one


def test_each_key_has_a_row_and_those_beyond_the_last_count_by_themselves() -> None:
    ledger = Ledger()
    accounts = [ledger.account(f"key {number}") for number in range(MAX_KEYS + 2)]
    for account in accounts:
        assert account.places.hold(1, 1)
    assert [account.places.num_held for account in accounts] == [1] * len(accounts)
    assert ledger.account("key 7").places.num_held == 1
    assert ledger.account(f"key {MAX_KEYS + 1}").places.num_held == 0


@pytest.fixture
def allowance() -> Allowance:
    return Ledger().account("k").requests


@pytest.mark.parametrize("per_minute", [1, 7, 11, 60, 100_000])
def test_a_minutes_allowance_is_there_at_once_and_refills_steadily(allowance: Allowance, per_minute: int) -> None:
    allowance.charge(per_minute - 1, per_minute, 0.0)
    assert allowance.charge_if_there(1, per_minute, 0.0) == 0.0
    each_s = 60 / per_minute
    assert allowance.charge_if_there(1, per_minute, 0.0) == pytest.approx(each_s, rel=1e-3)
    assert allowance.wait_s(1, per_minute, each_s / 2) == pytest.approx(each_s / 2, rel=1e-3)
    assert allowance.charge_if_there(1, per_minute, each_s + 1e-6) == 0.0


def test_it_never_holds_more_than_a_minutes_allowance(allowance: Allowance) -> None:
    allowance.charge(60, 60, 3600.0)
    assert allowance.wait_s(1, 60, 3600.0) == pytest.approx(1.0)
    allowance.refund(500, 60, 3600.0)
    allowance.charge(60, 60, 3601.0)
    assert allowance.wait_s(1, 60, 3601.0) == pytest.approx(1.0)


def test_what_was_overdrawn_is_made_up_for(allowance: Allowance) -> None:
    allowance.charge(90, 60, 0.0)
    assert allowance.wait_s(1, 60, 0.0) == pytest.approx(31.0)
    assert allowance.wait_s(1, 60, 31.0) == 0.0


def test_another_limit_leaves_the_same_part_of_it_used(allowance: Allowance) -> None:
    allowance.charge(30, 60, 0.0)
    assert allowance.wait_s(60, 120, 0.0) == 0.0
    assert allowance.wait_s(61, 120, 0.0) == pytest.approx(0.5)


def test_no_amount_is_too_much_to_count(allowance: Allowance) -> None:
    for _ in range(1000):
        allowance.charge(1 << 60, 1, 0.0)
    assert allowance.wait_s(1, 1, 0.0) > 86_400 * 300
