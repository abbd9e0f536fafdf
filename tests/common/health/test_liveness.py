"""What ends a process that we watch, and what does not, by a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from diptych.common.members.heartbeat import BEAT_S
from diptych.common.verdicts.watch import LOOK_S, Bounds, ProcessSample, Watch

PATIENCE_S = 2.0
NUM_LOOKS = round((PATIENCE_S + BEAT_S) / LOOK_S)  # that silence may last
MIB = 2**20


@dataclass
class Watched:
    """A process that is looked at, and what a look finds."""

    sample: ProcessSample
    watch: Watch
    num_looks: int = 0

    def look(self, count: int = 1, *, passed_s: float = LOOK_S, cpu_s: float = 0.0, beats: bool = False) -> str:
        """Look so often, as much later each; return what the last look said."""
        reason = ""
        for _ in range(count):
            now_s = self.sample.now_s + passed_s
            beat_s = now_s if beats else self.sample.beat_s
            self.sample = replace(self.sample, now_s=now_s, beat_s=beat_s, cpu_s=self.sample.cpu_s + cpu_s)
            reason = self.watch.look(self.sample)
            self.num_looks += 1
            if reason:
                break
        return reason

    def change(self, **fields: object) -> None:
        self.sample = replace(self.sample, **fields)  # type: ignore[arg-type]


@pytest.fixture
def watched() -> Watched:
    """One whose loop has just come round."""
    found = Watched(ProcessSample(100.0, 99.9), Watch(Bounds(PATIENCE_S)))
    assert found.look(beats=True) == ""
    found.num_looks = 0
    return found


def test_silence_of_the_patience_beyond_a_beat_is_the_end(watched: Watched) -> None:
    assert watched.look(NUM_LOOKS) == ""
    assert watched.look() == "it froze: its event loop has not come round for 2.8 s"
    assert watched.num_looks == NUM_LOOKS + 1


def test_a_router_with_long_steps_lives_as_long_as_it_comes_round_at_all(watched: Watched) -> None:
    for _ in range(50):
        assert watched.look(NUM_LOOKS) == ""
        assert watched.look(beats=True) == ""


def test_a_loop_that_has_not_begun_and_one_that_has_ended_are_not_judged(watched: Watched) -> None:
    watched.change(beat_s=None)
    assert watched.look(1000) == ""
    starting = Watched(ProcessSample(0.0, None), Watch(Bounds(PATIENCE_S)))
    assert starting.look(1000) == ""


def test_a_debugger_may_hold_a_process_for_as_long_as_it_likes(watched: Watched) -> None:
    watched.change(is_traced=True)
    assert watched.look(1000) == ""
    watched.change(is_traced=False)
    assert watched.look(NUM_LOOKS) == "", "what was before does not count"
    assert watched.look() != ""


def test_a_watcher_that_slept_itself_holds_that_against_nobody(watched: Watched) -> None:
    assert watched.look(passed_s=8 * 3600.0) == "", "a laptop was closed"
    assert watched.look(NUM_LOOKS - 1) == ""
    assert watched.look() != ""


def test_a_watcher_that_is_starved_counts_its_looks_and_not_the_time(watched: Watched) -> None:
    assert watched.look(NUM_LOOKS, passed_s=10 * LOOK_S) == ""
    assert watched.look() != ""


def test_one_that_waits_for_a_processor_is_not_frozen_and_one_that_computes_for_ever_is(watched: Watched) -> None:
    watched.change(wants_cpu=True)
    assert watched.look(100) == ""
    assert watched.look(5 * NUM_LOOKS, cpu_s=LOOK_S / 5) == "", "it got a fifth of a core"
    assert watched.look(1, cpu_s=LOOK_S) != ""


def test_a_pause_of_garbage_collection_ends_with_a_beat(watched: Watched) -> None:
    watched.change(wants_cpu=True)
    assert watched.look(NUM_LOOKS, cpu_s=LOOK_S) == ""
    assert watched.look(beats=True) == ""
    assert watched.look(NUM_LOOKS, cpu_s=4 * LOOK_S) == "", "four threads"


def test_memory_is_judged_at_once_and_from_the_start() -> None:
    watched = Watched(ProcessSample(0.0, None, memory_bytes=512 * MIB), Watch(Bounds(memory_bytes=512 * MIB)))
    assert watched.look() == ""
    watched.change(memory_bytes=2048 * MIB)
    assert watched.look() == "it reached its memory limit of 512 MiB with 2,048 MiB"


def test_without_a_limit_any_memory_is_fine(watched: Watched) -> None:
    watched.change(memory_bytes=2**50)
    assert watched.look(beats=True) == ""
