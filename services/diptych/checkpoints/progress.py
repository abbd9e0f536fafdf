"""Shows how far a download is: a bar on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


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
