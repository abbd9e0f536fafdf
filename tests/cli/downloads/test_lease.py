"""A lock file that its holder touches: who is silent is taken for dead, and finds out if it was not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diptych.cli.downloads.lease import Lease, Silence
from diptych.cli.downloads.remote_files import Interrupted


def test_one_takes_it_and_others_after_its_release(tmp_path: Path) -> None:
    one, other = Lease(tmp_path / "lock"), Lease(tmp_path / "lock")
    assert one.try_to_take()
    assert not other.try_to_take()
    other.release()
    assert not other.try_to_take(), "it was not its own to release"
    one.release()
    assert other.try_to_take()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_silence_is_measured_by_the_watchers_clock_alone(tmp_path: Path) -> None:
    now_s, holder = [0.0], Lease(tmp_path / "lock")
    assert holder.try_to_take()
    os.utime(holder.path, (1e9, 1e9))  # the clock of another machine
    silence = Silence(holder.path, lambda: now_s[0])
    now_s[0] = 20.0
    assert silence.lasts_s() == 20.0
    holder.touch()
    assert silence.lasts_s() == 0.0
    now_s[0] = 25.0
    assert silence.lasts_s() == 5.0


def test_who_stood_still_finds_that_another_one_went_on(tmp_path: Path) -> None:
    frozen, next_one = Lease(tmp_path / "lock"), Lease(tmp_path / "lock")
    assert frozen.try_to_take()
    frozen.check()
    Silence(frozen.path, lambda: 0.0).end()
    assert next_one.try_to_take()
    frozen.touch()
    with pytest.raises(Interrupted, match="another one has gone on"):
        frozen.check()
    frozen.release()
    next_one.touch()
    next_one.check()


def test_a_lock_that_is_another_ones_by_now_is_put_back(tmp_path: Path) -> None:
    dead, next_one, late = Lease(tmp_path / "lock"), Lease(tmp_path / "lock"), Lease(tmp_path / "lock")
    assert dead.try_to_take()
    silences = [Silence(dead.path, lambda: 0.0) for _ in range(2)]
    silences[0].end()
    assert next_one.try_to_take()
    silences[1].end()
    assert not late.try_to_take()
    next_one.touch()
    next_one.check()
