"""Two that write to one part for a moment: no wrong byte gets a name, and who can't tell says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diptych.cli.downloads.downloading import Pace, download
from diptych.cli.downloads.file_download import FileDownload
from diptych.cli.downloads.manifest import ROOM, Wanted, read_manifest
from diptych.cli.downloads.parts import Part
from diptych.cli.downloads.progress import Progress
from diptych.cli.downloads.remote_files import Digest, Interrupted, Listing, RemoteFile

DATA = bytes(range(256)) * 1000
CUT = 100_000


def file_of(name: str, data: bytes) -> RemoteFile:
    digest = hashlib.sha256(data).hexdigest()
    return RemoteFile(name, len(data), digest, Digest("sha256", digest))


FILE = file_of("a.gguf", DATA)


class Origin:
    """Yields two pieces of a file, and between them lets something happen."""

    def __init__(self, between: Callable[[], None], *, files: tuple[RemoteFile, ...] = (FILE,)) -> None:
        self._between, self._files = between, files

    def listed(self) -> Listing:
        return Listing(self._files)

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        yield DATA[offset : offset + CUT]
        self._between()
        yield DATA[offset + CUT :]


def nothing() -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ROOM).mkdir()
    return tmp_path


def fetch(folder: Path, between: Callable[[], None] = nothing) -> None:
    FileDownload(Origin(between), FILE, folder, Progress(0), nothing).run(None)


def test_what_another_one_writes_late_is_in_its_own_place(folder: Path) -> None:
    def write_late() -> None:
        fetch_late = FileDownload(Origin(nothing), FILE, folder, Progress(0), nothing)
        fetch_late._fetch()  # it has all of it, and stands still before it gives it its name

    fetch(folder, write_late)
    assert (folder / FILE.name).read_bytes() == DATA


def test_a_part_that_another_one_has_put_in_the_place_of_ours_gets_no_name(folder: Path) -> None:
    def begin_anew() -> None:
        Part(folder, FILE).begin()

    with pytest.raises(Interrupted, match="was changed by another process: try again"):
        fetch(folder, begin_anew)
    assert not (folder / FILE.name).exists()
    fetch(folder)
    assert (folder / FILE.name).read_bytes() == DATA


def test_a_part_with_more_bytes_than_came_gets_no_name(folder: Path) -> None:
    def append() -> None:
        with Part(folder, FILE).path.open("r+b") as part:
            part.seek(len(DATA))
            part.write(b"more")

    with pytest.raises(Interrupted, match="was changed by another process"):
        fetch(folder, append)
    assert not (folder / FILE.name).exists()


def test_a_file_that_was_given_its_name_by_another_one_is_found_by_the_next_try(folder: Path) -> None:
    with pytest.raises(Interrupted, match="was changed by another process"):
        fetch(folder, lambda: fetch(folder))
    fetch(folder)
    assert (folder / FILE.name).read_bytes() == DATA


def test_a_folder_that_changes_meanwhile_is_not_called_complete(tmp_path: Path) -> None:
    there = bytes(len(DATA) + 1)
    (tmp_path / "tokenizer.json").write_bytes(there)
    origin = Origin(lambda: (tmp_path / "tokenizer.json").unlink(), files=(FILE, file_of("tokenizer.json", there)))
    with pytest.raises(Interrupted, match="were changed by another process while they came"):
        download(origin, tmp_path, Wanted("https://host/x"), Pace(parallel=1))
    assert read_manifest(tmp_path) is None


def test_names_that_differ_have_parts_that_differ(folder: Path) -> None:
    names = ["a/b.json", "a%b.json", "a%2Fb.json", "a%25b.json"]
    assert len({Part(folder, file_of(name, b"")).path for name in names}) == len(names)
