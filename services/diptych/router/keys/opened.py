"""Reads the keys that a configuration names: who may call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from diptych.common.errors import ConfigError
from diptych.common.trust.reloaded import Reloaded
from diptych.router.keys.caller import Callers
from diptych.router.keys.config import KEYS_VARIABLE, KeyConfig
from diptych.router.keys.keyring import Keyring, parse_keyring
from diptych.router.keys.ledger import Ledger


def open_callers(
    config: KeyConfig, environ: Mapping[str, str] = os.environ, new_ledger: Callable[[], Ledger] = Ledger
) -> Callers | None:
    """Return who may call; None: everybody. Raises `ConfigError`."""
    if path := config.api_keys_file:
        return _callers(Reloaded([path], lambda: _read(path)).current, str(path), new_ledger)
    if text := environ.get(KEYS_VARIABLE):
        keyring = parse_keyring(text, KEYS_VARIABLE)
        return _callers(lambda: keyring, KEYS_VARIABLE, new_ledger)
    return None


def _callers(keyring: Callable[[], Keyring], source: str, new_ledger: Callable[[], Ledger]) -> Callers:
    """To begin without a key is a mistake; to take the last one away later is not, and then nobody may call."""
    if not keyring():
        raise ConfigError(f"{source} holds no key: `diptych keys new NAME` makes one")
    return Callers(keyring, time.monotonic, new_ledger())


def _read(path: Path) -> Keyring:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the API keys in {path}: {error}") from None
    return parse_keyring(text, str(path))
