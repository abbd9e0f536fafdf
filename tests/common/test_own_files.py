"""Which files of a scheduler go, and that several may sweep one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diptych.common.own_files import FRESH_S, new_file, surplus, sweep

NOW_S = 10_000.0


def written(*names: str, at_s: float) -> dict[str, float]:
    return {name: at_s + number for number, name in enumerate(names)}


def test_of_its_own_files_a_process_keeps_the_newest() -> None:
    files = written("decode-7-1", "decode-7-2", "decode-7-3", at_s=NOW_S - 3)
    assert surplus(files, "decode-7-", 2, NOW_S) == {"decode-7-1"}


def test_what_all_siblings_write_at_once_stays_until_it_is_old() -> None:
    files = written(*(f"decode-{process}-1" for process in range(12)), at_s=NOW_S - 20)
    assert surplus(files, "decode-3-", 8, NOW_S) == set()
    assert surplus(files, "decode-3-", 8, NOW_S + FRESH_S) == {f"decode-{process}-1" for process in range(4)}


def test_a_file_that_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (tmp_path / f"decode-{os.getpid()}-{number}.json").touch()
    gone, original = tmp_path / f"decode-{os.getpid()}-1.json", Path.stat

    def stat(path: Path, **named: Any) -> os.stat_result:
        if path == gone:
            path.unlink(missing_ok=True)
        return original(path, **named)

    monkeypatch.setattr(Path, "stat", stat)
    sweep(tmp_path, "decode", 1)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1


def test_new_files_are_of_the_process_that_sweeps_them(tmp_path: Path) -> None:
    for written_s in (1, 2):
        path, _ = new_file(tmp_path, "decode rank 1", ".json")
        path.touch()
        os.utime(path, (written_s, written_s))
        sweep(tmp_path, "decode rank 1", 1)
    assert list(tmp_path.iterdir()) == [path]
