"""Files by which commands find platforms: whom they are shown to, whom they trust, and what of them is left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.cli.platform.local_platforms import LocalPlatform, announced, running, runtime_folder
from diptych.common.errors import ConfigError
from diptych.common.proc import started_at

ONE = LocalPlatform("127.0.0.1:8000", "127.0.0.1:9000", "127.0.0.1:7001", "m", {"DIPTYCH_AUTH_TOKEN_FILE": "/x/token"})


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_platform_is_found_while_it_is_announced_and_by_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "diptych"
    assert running(folder) == ()
    with announced(ONE, folder):
        assert running(folder) == (ONE,)
        file = the_file(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert running(folder) == ()
    assert list(folder.iterdir()) == []


def test_the_folder_is_in_the_runtime_directory_or_among_the_temporary_files(tmp_path: Path) -> None:
    ours = Path(tempfile.gettempdir(), f"diptych-{os.geteuid()}")
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "diptych"
    assert runtime_folder({}) == ours
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == ours


def test_where_nothing_can_be_written_no_platform_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert runtime_folder({}) == Path("/tmp", f"diptych-{os.geteuid()}")


def ended_process() -> tuple[int, int]:
    """The id and the start of a process that was killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = started_at(process.pid)
        process.kill()
    assert start is not None
    return process.pid, start


@pytest.mark.integration
def test_what_a_killed_platform_left_is_ignored_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "diptych"
    with announced(ONE, folder):
        text = the_file(folder).read_text()
        pid, start = ended_process()
        mine = started_at(os.getpid())
        assert mine is not None
        left = [f"{pid}-{start}.json", f".{pid}-{start}.json", f"{os.getpid()}-{mine + 1}.json"]  # ours: used again
        for name in left:
            (folder / name).write_text(text)
        (folder / "notes").write_text("of somebody's own")
        assert running(folder) == (ONE,)
        assert {file.name for file in folder.iterdir()} == {f"{os.getpid()}-{mine}.json", "notes"}


@pytest.mark.integration
def test_a_process_that_has_ended_but_was_not_waited_for_does_not_run() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(process.pid) is None
    process.wait()


def _open_folder(folder: Path) -> None:
    folder.chmod(0o755)


def _linked_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def _no_folder(folder: Path) -> None:
    the_file(folder).unlink()
    folder.rmdir()
    folder.write_text("")


def _open_file(folder: Path) -> None:
    the_file(folder).chmod(0o644)


def _linked_file(folder: Path) -> None:
    file = the_file(folder)
    file.rename(folder / "other")
    file.symlink_to(folder / "other")


def _other_version(folder: Path) -> None:
    the_file(folder).write_text('{"http": "127.0.0.1:8000"}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_open_folder, r"is open to others \(its mode is 0755\): remove it, or set XDG_RUNTIME_DIR"),
        (_linked_folder, "is no folder of ours"),
        (_no_folder, "is no folder of ours"),
        (_open_file, r"json is open to others \(its mode is 0644\)"),
        (_linked_file, "json is no file of ours"),
        (_other_version, "is not what this version of Diptych writes"),
    ],
)
def test_what_others_may_have_written_is_not_read(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    folder = tmp_path / "diptych"
    with announced(ONE, folder):
        spoil(folder)
        with pytest.raises(ConfigError, match=words):
            running(folder)


@pytest.mark.parametrize("owned", ["diptych", "diptych/file"])
def test_what_belongs_to_somebody_else_is_not_read(tmp_path: Path, owned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may not be there to give a file away: the one who reads is made another user instead."""
    folder, fstat = tmp_path / "diptych", os.fstat
    with announced(ONE, folder):
        stranger = the_file(folder).stat() if owned.endswith("file") else folder.stat()

        def seen(handle: int) -> os.stat_result:
            found = fstat(handle)
            if not os.path.samestat(found, stranger):
                return found
            return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])

        monkeypatch.setattr(os, "fstat", seen)
        with pytest.raises(ConfigError, match="belongs to the user with the number"):
            running(folder)
        monkeypatch.undo()


@pytest.mark.parametrize("spoil", [_open_folder, _linked_folder])
def test_nothing_is_announced_where_others_could_change_it(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = tmp_path / "diptych"
    folder.mkdir(mode=0o700)
    spoil(folder)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"), announced(ONE, folder):
        pass
    assert list(folder.iterdir()) == []
