"""What a folder of a model holds, in the file that is written last. Rule: who finds it whole finds all files.

It lies beside the parts of files that are not there yet, in a folder that no model has: `.diptych-download`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from diptych.cli.downloads.remote_files import Digest
from diptych.cli.downloads.selection import Part
from diptych.common.errors import ConfigError

ROOM: Final = ".diptych-download"
NAME: Final = "complete.json"
FORMAT: Final = "diptych-download-1"


class Entry(NamedTuple):
    name: str
    nbytes: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller wants to be there."""

    source: str
    part: Part = "all"
    include: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is there."""

    wanted: Wanted
    revision: str  # the commit of a hub
    entries: tuple[Entry, ...]

    def covers(self, wanted: Wanted) -> bool:
        """Whether it is all that is wanted. Raises `ConfigError` if the folder is another model's."""
        if self.wanted.source != wanted.source:
            held = f"it holds {self.wanted.source}, and workers may be reading it"
            raise ConfigError(f"{wanted.source} has no place in this folder: {held}. Name another folder, or delete it")
        return self.wanted == wanted or (wanted.part == "tokenizer" and self.wanted.part == "all")

    def is_whole(self, folder: Path) -> bool:
        """Whether every file is there, by its size."""
        return all(_size(folder / entry.name) == entry.nbytes for entry in self.entries)


def read_manifest(folder: Path) -> Manifest | None:
    """Return what a folder says of itself; None: nothing, or nonsense."""
    try:
        said = json.loads((folder / ROOM / NAME).read_text())
        entries = (Entry(name, nbytes, Digest(*digest)) for name, nbytes, digest in said["entries"])
        wanted = {**said["wanted"], "include": tuple(said["wanted"]["include"])}
        return Manifest(Wanted(**wanted), said["revision"], tuple(entries)) if said["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Everybody sees all of it, or what was there before. Raises `OSError`."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    with replacing(folder / ROOM / NAME) as path:
        path.write_text(text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there at the end takes the place of `path`, on the disk, too."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    yield beside
    settle(beside, path)


def settle(written: Path, path: Path) -> None:
    """Give a written file its name, so that it is there after a loss of power."""
    _sync(written)
    written.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
