"""A lock file that its holder touches: who is silent is taken for dead, and finds out if it was not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from diptych.cli.downloads.lease import Lease, Silence, held
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


def test_a_holder_that_touched_at_the_last_moment_keeps_its_lock(tmp_path: Path) -> None:
    slow, other = Lease(tmp_path / "lock"), Lease(tmp_path / "lock")
    assert slow.try_to_take()
    silence = Silence(slow.path, lambda: 0.0)
    os.utime(slow.path, (1e9, 1e9))
    silence.end()
    assert not other.try_to_take()
    slow.touch()
    slow.check()


def test_a_lock_that_is_aside_for_a_moment_is_not_lost(tmp_path: Path) -> None:
    holder = Lease(tmp_path / "lock")
    assert holder.try_to_take()
    for _ in range(2):
        holder.path.rename(tmp_path / "aside")
        holder.touch()
        holder.check()
        (tmp_path / "aside").rename(holder.path)
        holder.touch()
        holder.check()
    holder.path.unlink()
    holder.touch()
    holder.touch()
    with pytest.raises(Interrupted):
        holder.check()


@pytest.mark.parametrize("reason", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_volume_without_links_has_locks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def refused(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "link", refused)
    one, other = Lease(tmp_path / "lock"), Lease(tmp_path / "lock")
    assert one.try_to_take()
    assert not other.try_to_take()
    silence = Silence(one.path, lambda: 0.0)
    os.utime(one.path, (1e9, 1e9))
    silence.end()
    one.touch()
    one.check()
    Silence(one.path, lambda: 0.0).end()
    assert other.try_to_take()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_lock_that_cannot_be_read_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    looks, told = iter([False, True]), list[str]()
    with held(tmp_path / "lock", 0.4, lambda: next(looks), told.append) as lease:
        assert lease is None
    assert told == ["another one"]
