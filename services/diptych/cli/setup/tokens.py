"""Make a token for each kind of member: `diptych tokens FOLDER`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.common.config import argument
from diptych.common.errors import ConfigError
from diptych.common.trust.token_files import new_token_files, write_private


@dataclass(frozen=True, slots=True)
class TokensConfig:
    """Write the --auth-token-file of each kind of member into a new folder: give each member its own and no other.

    `bootstrap`, `worker` and `router` are for these components, `operator` is for the commands that change something,
    `viewer` for those that only look. Each holds its own secret, and of the others what it takes to know them.
    """

    folder: str = argument("", help="where to write them; it must not exist")

    def validate(self) -> None:
        if not self.folder:
            raise ConfigError("say where to: `diptych tokens FOLDER`")


def main(config: TokensConfig) -> int:
    """Write the files and name them. Raises `ConfigError`."""
    folder = Path(config.folder)
    try:
        folder.mkdir(mode=0o700)
        for name, text in new_token_files().items():
            print(write_private(folder / name, text), flush=True)
    except OSError as error:
        raise ConfigError(f"can't make tokens in {folder}: {error.strerror}") from None
    return 0
