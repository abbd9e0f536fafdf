"""Decides how `diptych up` and its components trust each other: as configured, or by tokens of this run only."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diptych.common.config import env_name
from diptych.common.trust.token_files import BOOTSTRAP, inheritable, new_token_files, private_folder, write_private
from diptych.common.trust.trust import INSECURE, Trust, TrustConfig
from diptych.common.verdicts.permissions import Party

_FILES: Final = {"bootstrap": BOOTSTRAP, "router": Party.ROUTER.value}  # by command; others are workers


@dataclass(frozen=True, slots=True)
class SharedTrust:
    """How components get it, and where others find the tokens that were made for them."""

    variables: Mapping[str, str]  # that say what was configured; no secret is among them
    folder: Path | None  # holds the tokens that were made: a file for each kind of member
    own: Trust = INSECURE  # what this command itself shows others

    @property
    def token_file(self) -> Path | None:
        """The token of operators, if we made it."""
        return self.folder and self.folder / Party.OPERATOR.value

    @property
    def of_commands(self) -> Mapping[str, str]:
        """The variables by which commands of our user are let in, in whatever folder they run."""
        return {**self.variables, **({env_name("auth_token_file"): str(self.token_file)} if self.token_file else {})}

    def environment(self, command: str) -> Mapping[str, str]:
        """Return the variables of a component. Each finds its own token only."""
        if self.folder is None:
            return self.variables
        file = self.folder / _FILES.get(command, Party.WORKER.value)
        return {**self.variables, env_name("auth_token_file"): str(file)}


@contextlib.contextmanager
def shared_trust(config: TrustConfig, environ: MutableMapping[str, str] = os.environ) -> Iterator[SharedTrust]:
    """Yield what is configured; else make tokens, in files of ours that go at the exit. Raises `ConfigError`."""
    if config.is_trust_configured(environ):
        own = config.trust(environ)  # which says what is wrong before anything starts
        with inheritable(config, environ) as config:
            yield SharedTrust(_variables(config), None, own)
        return
    with private_folder() as folder:
        for name, text in new_token_files().items():
            write_private(folder / name, text)
        own = TrustConfig(auth_token_file=folder / Party.OPERATOR.value).trust({})
        yield SharedTrust({}, folder, own)


def _variables(config: TrustConfig) -> dict[str, str]:
    """Return the environment that says the same as `config`, which flags may have made."""
    values = {option.name: getattr(config, option.name) for option in dataclasses.fields(TrustConfig)}
    return {env_name(name): _as_variable(value) for name, value in values.items() if value}


def _as_variable(value: object) -> str:
    if isinstance(value, Path):
        return str(value.absolute())
    return "1" if value is True else str(value)
