"""The API keys that a router knows: what an operator wrote, as values. Pure.

    [alice]
    sha256 = "9f86d0…"           # of the key; `diptych keys new alice` makes both
    max_concurrent = 8           # and further limits, all optional
    requests_per_minute = 60
    tokens_per_minute = 100000   # prompt + output

Only a key's SHA-256 is kept. A slow hash would add nothing: keys are random, with 256 bits, so nobody can guess one.
For the same reason it gives nothing away how long it takes to find one by its hash in a dictionary.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # harmless in logs and metrics
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")
_LIMITS: Final = ("max_concurrent", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who has a key, and what its holder may do. A limit of None is none."""

    name: str
    admin: bool = False  # may call what changes the platform
    max_concurrent: int | None = None  # requests at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt + output


Keyring = Mapping[bytes, ApiKey]  # by `digest_of` the key


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def parse_keyring(text: str, source: str) -> Keyring:
    """Read the TOML of a file or variable, which may hold no key. Raises `ConfigError`, which names `source`."""
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is no TOML: {error}") from None
    keyring: dict[bytes, ApiKey] = {}
    for name, entry in entries.items():
        digest, key = _parse_entry(name, entry, source)
        if digest in keyring:
            raise ConfigError(f"{source}: {keyring[digest].name} and {name} have the same key: make another one")
        keyring[digest] = key
    return keyring


def _parse_entry(name: str, entry: Any, source: str) -> tuple[bytes, ApiKey]:
    place = f"{source}: [{name}]"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a name takes up to 64 of A-Z a-z 0-9 . _ -")
    digest = entry.get("sha256") if isinstance(entry, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{place} needs sha256, 64 hexadecimal digits, as `diptych keys new {name}` prints them")
    unknown = entry.keys() - {"sha256", "admin", *_LIMITS}
    if unknown:
        raise ConfigError(f"{place}: unknown: {', '.join(sorted(unknown))}; there is: admin, {', '.join(_LIMITS)}")
    if not isinstance(entry.get("admin", False), bool):
        raise ConfigError(f"{place}: admin is true or false")
    limits = {limit: entry[limit] for limit in _LIMITS if limit in entry}
    for limit, value in limits.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{place}: {limit} is a whole number, at least 1")
    return bytes.fromhex(digest), ApiKey(name, entry.get("admin", False), **limits)
