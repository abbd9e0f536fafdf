"""Files by HTTP: of a folder with a SHA256SUMS, or one GGUF file. The client is the one of `huggingface_hub`.

A bearer token goes to the host of the source and to no other, whatever it redirects to.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import httpx2
from huggingface_hub import get_session

from diptych.cli.downloads.remote_files import SUMS, Digest, Interrupted, Listing, RemoteFile, read_sums
from diptych.common.errors import ConfigError

TIMEOUT: Final = httpx2.Timeout(60.0, connect=10.0)  # without a byte
CHUNK: Final = 1 << 20
PASSES: Final = (408, 425, 429, 500, 502, 503, 504)
ADVICE: Final[Mapping[int, str]] = {
    401: "it wants credentials: give a token by DIPTYCH_BEARER_TOKEN, as a secret",
    403: "this token, or none, is not allowed to read it",
    404: "there is no such thing",
    412: "it has changed meanwhile: start again",
}


class Web:
    """Implements `Origin`."""

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    def listed(self) -> Listing:
        folder, _, name = self._url.rpartition("/")
        if name.endswith(".gguf"):
            return Listing((self._file(folder, name, self._sums(folder, must_be=False).get(name)),))
        sums = self._sums(self._url, must_be=True)
        return Listing(tuple(self._file(self._url, name, digest) for name, digest in sums.items()))

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        folder = self._url.rpartition("/")[0] if self._url.endswith(".gguf") else self._url
        tag = file.identity if file.identity.startswith('"') else ""
        headers = {**self._headers, **({"if-match": tag} if tag else {})}
        yield from ranged(f"{folder}/{quote(file.name)}", headers, offset)

    def _file(self, folder: str, name: str, digest: str | None) -> RemoteFile:
        url = f"{folder}/{quote(name)}"
        with asked("HEAD", url, {**self._headers, "accept-encoding": "identity"}) as response:
            length, tag = response.headers.get("content-length"), response.headers.get("etag", "")
        if length is None:
            raise ConfigError(f"{url}: the server does not say how long it is (Content-Length)")
        return RemoteFile(name, int(length), digest or tag, Digest("sha256", digest) if digest else None)

    def _sums(self, folder: str, *, must_be: bool) -> Mapping[str, str]:
        try:
            with asked("GET", f"{folder}/{SUMS}", self._headers) as response:
                return read_sums(response.read().decode(errors="replace"))
        except ConfigError as error:
            if not must_be:
                return {}
            how = f"a folder is listed by its {SUMS}: write one there by `sha256sum * > {SUMS}`, or name a .gguf file"
            raise ConfigError(f"{error}; {how}") from None


def ranged(url: str, headers: Mapping[str, str], offset: int) -> Iterator[bytes]:
    """Yield bytes from `offset` on, from a server without ranges, too: what comes before is passed over."""
    wanted = {"range": f"bytes={offset}-"} if offset else {}
    with asked("GET", url, {**headers, **wanted, "accept-encoding": "identity"}) as response:
        if response.status_code == 206:
            _check_range(url, response.headers.get("content-range", ""), offset)
        behind = 0 if response.status_code == 206 else offset
        for data in response.iter_raw(CHUNK):
            if behind < len(data):
                yield data[behind:]
            behind = max(0, behind - len(data))


def _check_range(url: str, told: str, offset: int) -> None:
    """Raises `Interrupted` if a part of a file begins somewhere else. `told`: the header Content-Range."""
    if not re.match(rf"bytes 0*{offset}-", told):
        raise Interrupted(f"{url}: bytes from {offset} on were asked for, and the answer has {told or 'no range'}")


@contextlib.contextmanager
def asked(method: str, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
    """Yield the response, whose body is not read yet. Raises `ConfigError` or `Interrupted`, with words."""
    try:
        with get_session().stream(method, url, headers=dict(headers), timeout=TIMEOUT) as response:
            if response.status_code >= 400:
                raise _refused(url, response.status_code)
            yield response
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{url}: {error}") from None
    except httpx2.HTTPError as error:
        raise Interrupted(f"{url}: {error or type(error).__name__}") from None


def _refused(url: str, status: int) -> ConfigError | Interrupted:
    if status in PASSES:
        return Interrupted(f"{url}: HTTP status {status}")
    return ConfigError(f"{url}: HTTP status {status}: {ADVICE.get(status, 'the server refuses it')}")
