"""The secret words that members of a platform share. Nothing here shows one: not in errors, logs or `repr`.

A file holds one token a line: the first is sent, each is accepted. So a token is replaced without an interruption: add
the new one as the last line everywhere, move it to the first line everywhere, remove the old one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from diptych.common.errors import ConfigError
from diptych.common.reloaded import Reloaded

TOKEN_VARIABLE: Final = "DIPTYCH_AUTH_TOKEN"
MIN_TOKEN_LEN: Final = 16
SCHEME: Final = "Bearer "

Refusal = Literal["no_token", "wrong_token"]

WORDS: Final[Mapping[Refusal, str]] = {
    "no_token": f"no token: give --auth-token-file or set {TOKEN_VARIABLE}, as for the other members of this platform",
    "wrong_token": f"wrong token: compare --auth-token-file or {TOKEN_VARIABLE} with those of the other members",
}


class Tokens:
    """Of a file, read again whenever it changes, or of a variable."""

    def __init__(self, source: Reloaded[tuple[str, ...]] | tuple[str, ...]) -> None:
        self._source = source

    @classmethod
    def of_file(cls, path: Path) -> Tokens:
        """Raises `ConfigError`."""
        return cls(Reloaded([path], lambda: _read(path)))

    @classmethod
    def of_variable(cls, value: str) -> Tokens:
        """Raises `ConfigError`."""
        return cls(_parse(value, TOKEN_VARIABLE))

    def authorization(self) -> str:
        """Return the value of the `authorization` header that we send."""
        return SCHEME + self._accepted()[0]

    def refusal(self, authorization: str | None) -> Refusal | None:
        """Say why an `authorization` header is not enough; None when it is. The time taken tells nothing."""
        if not authorization:
            return "no_token"
        sent = authorization.encode()
        matches = [hmac.compare_digest(sent, (SCHEME + token).encode()) for token in self._accepted()]
        return None if any(matches) else "wrong_token"

    def _accepted(self) -> tuple[str, ...]:
        return self._source.current() if isinstance(self._source, Reloaded) else self._source


def _read(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"can't read the tokens in {path}: {error.strerror}") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> tuple[str, ...]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    tokens = [(number, line) for number, line in lines if line]
    if not tokens:
        raise ConfigError(f"{source} holds no token: write one a line, as `openssl rand -hex 32` makes them")
    for number, token in tokens:
        _check(token, f"line {number} of {source}")
    return tuple(token for _, token in tokens)


def _check(token: str, place: str) -> None:
    if len(token) < MIN_TOKEN_LEN:
        raise ConfigError(f"{place}: a token needs at least {MIN_TOKEN_LEN} characters, as of `openssl rand -hex 32`")
    if not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{place}: a token takes printable ASCII characters without spaces")
