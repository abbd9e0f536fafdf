"""Reads the secret tokens by which members of a platform recognise each other. No error, log or `repr` shows one.

A file holds one token a line. The first whose secret is in the file is sent, and each is accepted. A token is replaced
without an interruption as follows: add the new one as the last line everywhere, move it to the first line everywhere,
remove the old one. A line may say which party a token makes of its holder, and give its SHA-256 in place of the secret,
which is enough to know it by:

    worker:SECRET
    router:sha256:HEX
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from diptych.common.errors import ConfigError
from diptych.common.trust.reloaded import Reloaded
from diptych.common.verdicts.permissions import EVERY, NOBODY, Parties, Party

TOKEN_VARIABLE: Final = "DIPTYCH_AUTH_TOKEN"
MIN_TOKEN_LEN: Final = 16
SCHEME: Final = "Bearer "
DIGEST: Final = "sha256:"

Refusal = Literal["no_token", "wrong_token"]

WORDS: Final[Mapping[Refusal, str]] = {
    "no_token": f"no token: give --auth-token-file or set {TOKEN_VARIABLE}, as for the other members of this platform",
    "wrong_token": f"wrong token: compare --auth-token-file or {TOKEN_VARIABLE} with those of the other members",
}

HTTP_WORDS: Final[Mapping[Refusal, str]] = {
    "no_token": "no token: send `authorization: Bearer TOKEN` with a token of --auth-token-file",
    "wrong_token": "wrong token: compare what `authorization` says with the tokens of --auth-token-file",
}

_PARTIES: Final = {f"{party.value}:": frozenset({party}) for party in Party}
_HEX: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, repr=False)
class Token:
    """One that is accepted."""

    parties: Parties  # what its holder is
    digest: bytes  # SHA-256 of the secret
    secret: str | None  # None: others hold it


class Tokens:
    """The tokens of a file, read again whenever it changes, or of a variable."""

    def __init__(self, source: Reloaded[tuple[Token, ...]] | tuple[Token, ...]) -> None:
        self._source = source

    @classmethod
    def of_file(cls, path: Path) -> Tokens:
        """A pipe, such as /dev/stdin, is read once. Raises `ConfigError`."""
        return cls(Reloaded([path], lambda: _read(path)) if path.is_file() else _read(path))

    @classmethod
    def of_variable(cls, value: str) -> Tokens:
        """Raises `ConfigError`."""
        return cls(_parse(value, TOKEN_VARIABLE))

    @classmethod
    def of_sender(cls, authorization: str) -> Tokens:
        """What sends on the header of a caller, and accepts nobody."""
        return cls((Token(NOBODY, b"", authorization.removeprefix(SCHEME)),))

    def authorization(self) -> str | None:
        """Return the value of the `authorization` header that we send; None when all are others'."""
        return next((SCHEME + token.secret for token in self._accepted() if token.secret), None)

    def parties(self, authorization: str | None) -> Parties:
        """Return what the sender of an `authorization` header is; nobody if it is not known. The time tells nothing."""
        scheme, sent = (authorization or "")[: len(SCHEME)], (authorization or "")[len(SCHEME) :]
        digest = hashlib.sha256(sent.encode()).digest()
        matches = [token.parties for token in self._accepted() if hmac.compare_digest(digest, token.digest)]
        return NOBODY.union(*matches) if scheme == SCHEME else NOBODY

    def refusal(self, authorization: str | None) -> Refusal | None:
        """Say why an `authorization` header is nobody's; None when it is somebody's."""
        if not authorization:
            return "no_token"
        return None if self.parties(authorization) else "wrong_token"

    def _accepted(self) -> tuple[Token, ...]:
        return self._source.current() if isinstance(self._source, Reloaded) else self._source


def digest_line(party: Party, secret: str) -> str:
    """Return the line by which others know the holder of a secret."""
    return f"{party.value}:{DIGEST}{hashlib.sha256(secret.encode()).hexdigest()}"


def _read(path: Path) -> tuple[Token, ...]:
    try:
        text = path.read_text("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"can't read the tokens in {path}: {error.strerror}") from None
    return _parse(text, str(path))


def _parse(text: str, source: str) -> tuple[Token, ...]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    tokens = [(number, line) for number, line in lines if line]
    if not tokens:
        raise ConfigError(f"{source} holds no token: write one a line, as `openssl rand -hex 32` makes them")
    return tuple(_token(line, f"line {number} of {source}") for number, line in tokens)


def _token(line: str, place: str) -> Token:
    prefix = next((each for each in _PARTIES if line.startswith(each)), "")
    parties, rest = _PARTIES.get(prefix, EVERY), line.removeprefix(prefix)
    if rest.startswith(DIGEST):
        if not _HEX.fullmatch(rest.removeprefix(DIGEST)):
            raise ConfigError(f"{place}: behind {DIGEST} stand 64 hex digits, as `sha256sum` writes them")
        return Token(parties, bytes.fromhex(rest.removeprefix(DIGEST)), None)
    _check(rest, place)
    return Token(parties, hashlib.sha256(rest.encode()).digest(), rest)


def _check(token: str, place: str) -> None:
    if ":" in token:
        raise ConfigError(f"{place}: before a colon stands one of {' '.join(_PARTIES)} {DIGEST}; a token has none")
    if len(token) < MIN_TOKEN_LEN:
        raise ConfigError(f"{place}: a token needs at least {MIN_TOKEN_LEN} characters, as of `openssl rand -hex 32`")
    if not all("!" <= letter <= "~" for letter in token):
        raise ConfigError(f"{place}: a token takes printable ASCII characters without spaces")
