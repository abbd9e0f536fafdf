"""Writes tokens to files that only our user can read: one for each kind of member, and those that children get.

A member's file holds the secret of its own token and the hashes of the others', so it does not help to impersonate
another kind of member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final, TypeVar

from diptych.common.trust.tokens import TOKEN_VARIABLE, digest_line
from diptych.common.trust.trust import TrustConfig
from diptych.common.verdicts.permissions import Party

C = TypeVar("C", bound=TrustConfig)

BOOTSTRAP: Final = "bootstrap"  # the file of who calls nobody
TOKEN_BYTES: Final = 32
FOLDER_PREFIX: Final = "diptych_"  # of folders whose process holds them
UNHELD_S: Final = 60.0  # a folder is held by its process when it is so old


def new_token_files() -> dict[str, str]:
    """Return what the file of each party holds, and that of bootstrap, with new tokens."""
    tokens = {party: secrets.token_hex(TOKEN_BYTES) for party in Party}
    hashes = {party: f"{digest_line(party, secret)}\n" for party, secret in tokens.items()}
    own = {party: f"{party.value}:{secret}\n" for party, secret in tokens.items()}
    others = {party: "".join(hashes[each] for each in tokens if each is not party) for party in tokens}
    return {BOOTSTRAP: "".join(hashes.values()), **{party.value: own[party] + others[party] for party in tokens}}


def write_private(file: Path, text: str) -> Path:
    """Write a file that is new and only ours to read. Raises `OSError`."""
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(text)
    return file


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a folder for our user only, which goes at the exit. Those that killed processes left go first."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder, _open_folder(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        now_s = os.fstat(descriptor).st_mtime  # when it was made, by the clock of all these folders
        for left in Path(folder).parent.glob(f"{FOLDER_PREFIX}*"):
            _remove_if_left(left, now_s)
        yield Path(folder)


def _remove_if_left(folder: Path, now_s: float) -> None:
    """Remove a folder of our user whose process has ended: the kernel gave its lock back, however it ended."""
    with contextlib.suppress(OSError), _open_folder(folder) as descriptor:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and now_s - status.st_mtime > UNHELD_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@contextlib.contextmanager
def _open_folder(folder: str | Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def token_in_file(environ: MutableMapping[str, str]) -> Iterator[Path | None]:
    """Take the token out of an environment, and yield a file that holds it until the exit; None if there is none."""
    token = environ.pop(TOKEN_VARIABLE, "")
    if not token:
        yield None
        return
    with private_folder() as folder:
        yield write_private(folder / "token", f"{token}\n")


@contextlib.contextmanager
def inheritable(config: C, environ: MutableMapping[str, str]) -> Iterator[C]:
    """Yield a configuration that says the same to processes that inherit an environment without the token."""
    with token_in_file(environ) as file:
        yield dataclasses.replace(config, auth_token_file=file) if file and not config.auth_token_file else config
