"""Make API keys for clients of a router: `diptych keys new NAME`.

The key itself is printed once and kept nowhere; what the router reads is its SHA-256.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from dataclasses import dataclass
from typing import Final

from diptych.common.config import argument
from diptych.common.errors import ConfigError
from diptych.router.keys.keyring import digest_of, parse_keyring

KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """Make an API key. Standard output gets the entry for --api-keys-file, the terminal the key for its holder."""

    action: str = argument("", help="new")
    name: str = argument("", help="whose key it is, as metrics and logs will call it")

    def validate(self) -> None:
        if self.action != "new" or not self.name:
            raise ConfigError("say `diptych keys new NAME`")


def main(config: KeysConfig) -> int:
    key = "dk-" + secrets.token_urlsafe(KEY_BYTES)
    entry = f'[{_quoted(config.name)}]\nsha256 = "{digest_of(key).hex()}"\n'
    parse_keyring(entry, "the new entry")
    print(f"key, shown only now: {key}\nentry for --api-keys-file:\n", file=sys.stderr)
    print(entry, end="", flush=True)
    return 0


def _quoted(name: str) -> str:
    """Bare keys of TOML have no dots."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name)
