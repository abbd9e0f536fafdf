"""Shows how far a download is: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@contextmanager
def console_progress() -> Iterator[Progress]:
    """Yield a `Progress` that draws on stderr when that is a terminal and rich is installed, and logs otherwise."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn
        from rich.progress import Progress as Bars
    except ImportError:
        yield _logged()
        return
    if not sys.stderr.isatty():
        yield _logged()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

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
