"""Which URLs name a store that workers share, and who bounds it. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit

from diptych.common.errors import ConfigError

DIRECTORY: Final = "file"  # scheme of a store that nobody else bounds
ENCRYPTED: Final = ("valkeys", "rediss")  # by TLS
VALKEY: Final = ("valkey", "redis", *ENCRYPTED)
SCHEMES: Final = (DIRECTORY, "s3", "s3a", "gs", "az", "abfs", "abfss", *VALKEY)


def directory_of(url: str) -> str | None:
    """Return the path of a directory that is a store; None: it is none."""
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == DIRECTORY else None


def is_valkey(url: str) -> bool:
    return urlsplit(url).scheme in VALKEY


def is_encrypted(url: str) -> bool:
    """Whether a server of `VALKEY` is asked by TLS."""
    return urlsplit(url).scheme in ENCRYPTED


def check_store(url: str, mib: int) -> None:
    """Raises `ConfigError` where a URL names no store, or it is not said how large a directory may be."""
    if urlsplit(url).scheme not in SCHEMES:
        known = ", ".join(f"{scheme}:" for scheme in SCHEMES)
        raise ConfigError(f"--shared-cache needs the URL of a store ({known}), not {url!r}")
    if is_valkey(url):
        _check_valkey(url, mib)
        return
    folder = directory_of(url)
    if folder is not None and (urlsplit(url).netloc or not folder.startswith("/")):
        raise ConfigError(f"--shared-cache needs the whole path of a directory, as file:///mnt/kv, not {url!r}")
    if folder is not None and not mib:
        raise ConfigError("--shared-cache needs --shared-cache-mib for a directory: how much all workers may fill")
    if folder is None and mib:
        raise ConfigError(
            "--shared-cache-mib is for a directory: give the bucket a lifecycle rule, which deletes what is old"
        )


def _check_valkey(url: str, mib: int) -> None:
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            "--shared-cache takes no passwords: drop what is before @, and set VALKEY_USERNAME and VALKEY_PASSWORD"
        )
    if "?" in url or "#" in url:
        raise ConfigError(
            "--shared-cache takes no options in Valkey's URL: drop what is behind ? or #, set VALKEY_USERNAME and"
            " VALKEY_PASSWORD, and name a database by the path, as valkey://kv.example:6379/1"
        )
    if not urlsplit(url).hostname:
        raise ConfigError(f"--shared-cache needs the server's name, as valkey://kv.example:6379/0, not {url!r}")
    if mib:
        raise ConfigError(
            "--shared-cache-mib is for a directory: give the server maxmemory, and maxmemory-policy allkeys-lru"
        )
