"""What `diptych up` and its components know each other by: what was configured, or a token of this run only."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diptych.common.config import env_name
from diptych.common.tokens import TOKEN_VARIABLE
from diptych.common.trust import TrustConfig


@dataclass(frozen=True, slots=True)
class SharedTrust:
    """How components get it, and where others find the token that was made for them."""

    environment: Mapping[str, str] = field(repr=False)
    token_file: Path | None


@contextlib.contextmanager
def shared_trust(config: TrustConfig) -> Iterator[SharedTrust]:
    """Yield what is configured; else make a token, in a file of ours that goes at the exit. Raises `ConfigError`."""
    if config.is_trust_configured():
        config.trust()  # to say what is wrong before anything starts
        yield SharedTrust(_variables(config), None)
        return
    token = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:  # for our user only
        file = Path(folder) / "token"
        file.touch(mode=0o600)
        file.write_text(f"{token}\n")
        yield SharedTrust({TOKEN_VARIABLE: token}, file)


def _variables(config: TrustConfig) -> dict[str, str]:
    """Return the environment that says the same as `config`, which flags may have made."""
    values = {option.name: getattr(config, option.name) for option in dataclasses.fields(TrustConfig)}
    return {env_name(name): "1" if value is True else str(value) for name, value in values.items() if value}
