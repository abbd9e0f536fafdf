"""The end of a log whose ranks are objects of the same test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from diptych.engine.tensor_parallel.rank_log import RankLog


def end_log(log: RankLog, *ranks: Callable[[], bool]) -> None:
    """Close a log while each rank reads on, until it returns that it has read the end: else the log would wait."""
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(log.close)
        for reads in ranks:
            while not closing.done() and not reads():
                pass
        closing.result()
