"""Files of a bucket, by `obstore`: S3, GCS or Azure, with credentials, endpoint and region of the environment.

A SHA256SUMS beside them proves them. Without one, an ETag may, if whoever runs the store says that it is an MD5: it is
none where objects were written in parts, or encrypted by a key of somebody's own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from diptych.cli.downloads.remote_files import SUMS, Digest, Interrupted, Listing, RemoteFile, read_sums
from diptych.common.errors import ConfigError
from diptych.common.net.object_stores import first_line, library, open_objects, over_network

CONNECT_S: Final = 10
PIECE: Final = 64 << 20  # bytes a call: a call is bounded in time as a whole
PIECE_S: Final = 600
CHUNK: Final = 1 << 20
STATUS: Final = re.compile(r"status code: (\d{3})")
MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')


class Store:
    """Implements `Origin`."""

    def __init__(self, url: str, *, etag_is_md5: bool) -> None:
        self._url, self._etag_is_md5 = url, etag_is_md5
        self._store = open_objects(url, url, over_network(CONNECT_S, PIECE_S, {"max_retries": 0}))

    def listed(self) -> Listing:
        with _as_ours(self._url):
            objects = [each for page in library().list(self._store) for each in page]
        if not objects:
            raise ConfigError(f"{self._url}: there is nothing in it that these credentials may list")
        has_sums = any(each["path"] == SUMS for each in objects)
        sums = read_sums(self._whole(SUMS).decode(errors="replace")) if has_sums else {}
        return Listing(tuple(self._file(each, sums) for each in objects if each["path"] != SUMS))

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """A piece a call, so that one that hangs is found out; the object must be the one that was listed."""
        while offset < file.nbytes:
            wanted: dict[str, Any] = {"range": (offset, min(file.nbytes, offset + PIECE))}
            if file.identity:
                wanted["if_match"] = file.identity
            with _as_ours(f"{self._url}/{file.name}"):
                for data in library().get(self._store, file.name, options=wanted).stream(min_chunk_size=CHUNK):
                    offset += len(data)
                    yield bytes(data)

    def _whole(self, name: str) -> bytes:
        with _as_ours(f"{self._url}/{name}"):
            return bytes(library().get(self._store, name).bytes())

    def _file(self, listed: Mapping[str, Any], sums: Mapping[str, str]) -> RemoteFile:
        name, tag = listed["path"], listed["e_tag"] or ""
        digest = Digest("sha256", sums[name]) if name in sums else None
        md5 = MD5.fullmatch(tag)
        if digest is None and self._etag_is_md5 and md5 is not None:
            digest = Digest("md5", md5[1])
        return RemoteFile(name, listed["size"], tag, digest)


@contextlib.contextmanager
def _as_ours(what: str) -> Iterator[None]:
    errors = library().exceptions
    try:
        yield
    except (OSError, errors.BaseError) as error:
        raise _refused(what, error) from None


def _refused(what: str, error: Exception) -> ConfigError | Interrupted:
    """Where a list fails, the library says the status in its words alone."""
    errors = library().exceptions
    found = STATUS.search(str(error))
    status = int(found[1]) if found else 0
    if status == 404 or isinstance(error, (FileNotFoundError, errors.NotFoundError)):
        return ConfigError(f"{what}: there is no such object or bucket (404)")
    denied = (PermissionError, errors.PermissionDeniedError, errors.UnauthenticatedError)
    if status in (401, 403) or isinstance(error, denied):
        how = "give credentials that may list and read it by the environment (AWS_…, GOOGLE_…, AZURE_…), as a secret"
        return ConfigError(f"{what}: not allowed (403): {how}")
    if isinstance(error, errors.PreconditionError):
        return ConfigError(f"{what} has changed meanwhile: start again")
    return Interrupted(f"{what}: {first_line(error)}")
