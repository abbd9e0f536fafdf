"""The API keys that a router knows: what an operator wrote, as values. Pure.

    [alice]
    sha256 = "9f86d0…"           # of the key; `diptych keys new alice` makes both
    max_concurrent = 8           # and further limits, all optional
    requests_per_minute = 60
    tokens_per_minute = 100000   # prompt + output
    max_priority = 10            # that requests may ask for; 0 unless said
    share_cache = "research"     # a group: its keys share cached prefixes; alone unless said
    slo_tiers = ["batch"]        # that requests may name, the first unless they do; all unless said

Only a key's SHA-256 is kept. A slow hash would add nothing: keys are random, with 256 bits, so nobody can guess one.
For the same reason it gives nothing away how long it takes to find one by its hash in a dictionary.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.errors import ConfigError
from diptych.generation.request_groups import MAX_PRIORITY
from diptych.router.values.slo_tiers import MAX_TIERS, NAME, NAME_RULE

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # harmless in logs and metrics
_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")
_LIMITS: Final = ("max_concurrent", "requests_per_minute", "tokens_per_minute")
_SETTINGS: Final = ("admin", *_LIMITS, "max_priority", "share_cache", "slo_tiers")
_NAME_RULE: Final = "takes up to 64 of A-Z a-z 0-9 . _ -"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who has a key, and what its holder may do. A limit of None is none."""

    name: str
    admin: bool = False  # may call what changes the platform
    max_concurrent: int | None = None  # requests at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt + output
    max_priority: int = 0  # that a request may ask for
    share_cache: str | None = None  # the group whose keys share cached prefixes; None: nobody does
    slo_tiers: Sequence[str] = ()  # that its requests may name; none: all


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
        raise ConfigError(f"{place}: a name {_NAME_RULE}")
    digest = entry.get("sha256") if isinstance(entry, dict) else None
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{place} needs sha256, 64 hexadecimal digits, as `diptych keys new {name}` prints them")
    settings = {setting: value for setting, value in entry.items() if setting != "sha256"}
    _check_settings(settings, place)
    return bytes.fromhex(digest), ApiKey(name, **settings)


def _check_settings(settings: Mapping[str, Any], place: str) -> None:
    unknown = settings.keys() - set(_SETTINGS)
    if unknown:
        raise ConfigError(f"{place}: unknown: {', '.join(sorted(unknown))}; there is: {', '.join(_SETTINGS)}")
    for setting, value in settings.items():
        wanted = _wanted(setting, value)
        if wanted:
            raise ConfigError(f"{place}: {setting} {wanted}")


def _wanted(setting: str, value: Any) -> str:
    """Return what a setting must be, in words; nothing if it is so."""
    match setting:
        case "admin":
            fits, words = isinstance(value, bool), "is true or false"
        case "share_cache":
            fits = isinstance(value, str) and _NAME.fullmatch(value) is not None
            words = f"is the name of a group, which {_NAME_RULE}"
        case "slo_tiers":
            fits = isinstance(value, list) and 1 <= len(value) <= MAX_TIERS and all(map(_is_tier, value))
            words = f"is a list of tiers, each of which {NAME_RULE}"
        case "max_priority":
            fits = type(value) is int and 0 <= value <= MAX_PRIORITY
            words = f"is a whole number from 0 to {MAX_PRIORITY}"
        case _:
            fits, words = type(value) is int and value >= 1, "is a whole number, at least 1"
    return "" if fits else words


def _is_tier(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None
