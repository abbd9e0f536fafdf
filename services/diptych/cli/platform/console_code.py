"""Makes the code by which who runs `diptych up` signs in to the console: it holds once, and not for long.

Code and operator's token are in a file that only our user can read. The router finds it by a variable, and takes it
away when the code is used. The code itself is only printed: an address holds it behind `#`, which is sent nowhere.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diptych.common.config import env_name
from diptych.common.trust.token_files import private_folder, write_private
from diptych.common.trust.tokens import SCHEME
from diptych.common.trust.trust import INSECURE, Trust
from diptych.common.verdicts.permissions import Party

CODE_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class ConsoleCode:
    """How one gets in."""

    code: str = field(repr=False)  # empty: by a token, or as everybody
    file: Path | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """What tells the router."""
        from diptych.router.console.one_time_code import VARIABLE  # `--help` needs nothing of it

        return {VARIABLE: str(self.file)} if self.file else {}

    def address(self, url: str) -> str:
        """Return the page's address at a router, with the code."""
        return f"{url}/console/{f'#code={self.code}' if self.code else ''}"


def can_be_entered(trust: Trust, environ: Mapping[str, str]) -> bool:
    """Whether the router serves the console, to somebody: with certificates alone there is no token to sign in by."""
    is_on = environ.get(env_name("console"), "on") != "off"
    return is_on and (trust.tokens is not None or trust.tls is None)


def operator_token(trust: Trust) -> str | None:
    """Return the token that we send, if it is an operator's."""
    authorization = trust.tokens.authorization() if trust.tokens else None
    if authorization is None or Party.OPERATOR not in trust.parties(authorization):
        return None
    return authorization.removeprefix(SCHEME)


@contextlib.contextmanager
def console_code(trust: Trust) -> Iterator[ConsoleCode]:
    """Yield a code for the operator's token that we hold, in a file of ours that goes at the exit; else none."""
    token = None if trust == INSECURE else operator_token(trust)
    if token is None:
        yield ConsoleCode("")
        return
    with private_folder() as folder:
        code = secrets.token_urlsafe(CODE_BYTES)
        yield ConsoleCode(code, write_private(folder / "console-code", f"{code}\n{token}\n"))
