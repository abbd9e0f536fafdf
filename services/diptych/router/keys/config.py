"""Which keys a router asks for, and when it may go without. `opened` reads them, in a router alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.config import env_name, option
from diptych.common.errors import ConfigError
from diptych.common.net.reachable import is_loopback

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
