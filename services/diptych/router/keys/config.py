"""Which keys a router asks for, and when it may go without."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.config import env_name, option
from diptych.common.errors import ConfigError
from diptych.common.net.reachable import is_loopback
from diptych.common.trust.reloaded import Reloaded
from diptych.router.keys.caller import Callers
from diptych.router.keys.keyring import Keyring, parse_keyring
from diptych.router.keys.ledger import Ledger

KEYS_VARIABLE: Final = "DIPTYCH_API_KEYS"


@dataclass(frozen=True)  # no slots: a configuration has other bases beside this one
class KeyConfig:
    """Who may use the API. The keys may also come by the variable DIPTYCH_API_KEYS, as the text of such a file."""

    api_keys_file: Path | None = option(
        None, help="TOML with the API keys of clients (`diptych keys new`); read again when it changes", group="trust"
    )
    open_api: bool = option(False, help="serve clients without a key, not only on a loopback address", group="trust")

    def check_access(self, host: str, *, is_insecure: bool, environ: Mapping[str, str] = os.environ) -> None:
        """Raise `ConfigError` if everybody could use the API although nobody said so."""
        has_keys = bool(self.api_keys_file or environ.get(KEYS_VARIABLE))
        if has_keys and self.open_api:
            raise ConfigError("--open-api contradicts API keys: give one or the other")
        if not (has_keys or self.open_api or is_insecure or is_loopback(host)):
            raise ConfigError(
                f"whoever reaches {host} could use the API: give --api-keys-file or set {KEYS_VARIABLE} "
                "(`diptych keys new NAME` makes a key), listen on 127.0.0.1, or say --open-api if others keep watch"
            )

    @property
    def key_environment(self) -> Mapping[str, str]:
        """The variables that tell a router the same."""
        return {
            **({env_name("api_keys_file"): str(self.api_keys_file.absolute())} if self.api_keys_file else {}),
            **({env_name("open_api"): "1"} if self.open_api else {}),
        }

    def callers(
        self, environ: Mapping[str, str] = os.environ, new_ledger: Callable[[], Ledger] = Ledger
    ) -> Callers | None:
        """Return who may call; None: everybody. Raises `ConfigError`."""
        if path := self.api_keys_file:
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
