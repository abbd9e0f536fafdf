"""Signing in by a code that holds once: who started the platform has it, and gets the operator's token for it.

Code and token are in a file that only our user can read. Whoever takes the file away has used the code, so it holds
once for all processes of a router. A wrong code uses nothing up; of wrong ones there may be a few a minute.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from diptych.common.errors import Overloaded
from diptych.router.console.attempts import Attempts
from diptych.router.errors import Unauthenticated

logger = logging.getLogger(__name__)

VARIABLE: Final = "DIPTYCH_CONSOLE_CODE_FILE"  # names the file: a line with the code, and one with the token
HOLDS_S: Final = 30 * 60.0  # since the file was written
MOST_WRONG: Final = 10  # in a minute
WINDOW_S: Final = 60.0
WRONG: Final = "this code is wrong, used or too old: sign in with an operator's token"


def code_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the code is, if there is one."""
    path = environ.get(VARIABLE)
    return Path(path) if path else None


class OneTimeCode:
    """The code of one platform, as one process of a router knows it."""

    def __init__(
        self,
        file: Path | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._clock = clock
        self._wall_clock = wall_clock
        self._wrong = Attempts(MOST_WRONG, WINDOW_S)

    def exchange(self, code: str) -> str:
        """Return the token for the code, which is used then. Raises `Unauthenticated`; `Overloaded`: too many tries."""
        now_s = self._clock()
        if wait_s := self._wrong.wait_s(now_s):
            raise Overloaded("too many wrong codes: try again later", retry_after_s=math.ceil(wait_s))
        token = self._take(code)
        if token is None:
            self._wrong.fail(now_s)
            raise Unauthenticated(WRONG)
        logger.info("somebody signed in to the console with the code, which is used now")
        return token

    def _take(self, code: str) -> str | None:
        """Only one process can take the file away."""
        if self._file is None:
            return None
        try:
            is_old = self._wall_clock() - self._file.stat().st_mtime > HOLDS_S
            right, token = self._file.read_text("ascii").split()
            if not is_old and not hmac.compare_digest(right.encode(), code.encode()):
                return None
            self._file.unlink()
        except (OSError, ValueError):
            return None
        return None if is_old else token
