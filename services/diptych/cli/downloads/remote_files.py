"""What an origin of files says of them, and how their bytes are proven."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from diptych.common.errors import Unavailable

Algorithm = Literal["sha256", "git", "md5"]  # git: SHA-1 of a blob, as hubs name small files
SUMS: Final = "SHA256SUMS"  # as `sha256sum * > SHA256SUMS` writes it


class Digest(NamedTuple):
    algorithm: Algorithm
    hexdigest: str


class RemoteFile(NamedTuple):
    """A file as its origin lists it."""

    name: str  # path below the source
    nbytes: int
    identity: str  # another one when the bytes are others; "": nobody knows, so a part is not gone on with
    digest: Digest | None  # None: only its size can be checked


class Listing(NamedTuple):
    files: tuple[RemoteFile, ...]
    revision: str = ""  # the commit that a branch or tag means now


class Interrupted(Unavailable):
    """It may go on after a while: a cut connection, a server that is busy."""


class Origin(Protocol):
    """Calls block. `ConfigError`: asking again helps nobody. `Interrupted`: it may."""

    def listed(self) -> Listing: ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Yield its bytes from `offset` on; they may end too early."""
        ...


class Hasher:
    """The digest of a file whose bytes come one after the other. Without an expected one it is SHA-256."""

    def __init__(self, file: RemoteFile) -> None:
        self.nbytes = 0
        self.algorithm: Algorithm = file.digest.algorithm if file.digest else "sha256"
        name = "sha1" if self.algorithm == "git" else self.algorithm
        self._hash = hashlib.new(name, usedforsecurity=False)
        if self.algorithm == "git":
            self._hash.update(b"blob %d\0" % file.nbytes)

    def update(self, data: bytes) -> None:
        self.nbytes += len(data)
        self._hash.update(data)

    def digest(self) -> Digest:
        return Digest(self.algorithm, self._hash.hexdigest())


def read_sums(text: str) -> Mapping[str, str]:
    """Return the SHA-256 of each name in a SHA256SUMS; lines that are none are passed over."""
    rows = (line.strip().split(maxsplit=1) for line in text.splitlines())
    pairs = (row for row in rows if len(row) == 2 and len(row[0]) == 64)
    return {name.removeprefix("*").removeprefix("./"): digest.lower() for digest, name in pairs}
