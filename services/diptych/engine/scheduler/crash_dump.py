"""What a scheduler did last, written to a file when its loop dies, or when it gets SIGUSR1: steps, rooms, pages.

No token and no name of a tenant is in it. Each section is told by itself: what is broken may be what tells of it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from diptych.common.errors import DiptychError
from diptych.common.own_files import new_file, own_folder, sweep
from diptych.common.version import own_version
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.values.core_report import CoreReport
from diptych.engine.values.request import Request
from diptych.engine.values.scheduler_core import SchedulerCore

logger = logging.getLogger(__name__)

MAX_FILES: Final = 8
MAX_ROOMS: Final = 4096
MAX_WORDS: Final = 500  # of an error


class CrashDump:
    """Tells of one scheduler. It reads what it tells of only when it writes."""

    def __init__(
        self, core: SchedulerCore, cache: KvCache, meter: PrefillMeter, name: str, folder: Path | None = None
    ) -> None:
        """`name` goes into the names of files."""
        self._core = core
        self._cache = cache
        self._meter = meter
        self._name = name
        self._folder = folder

    def on_signal(self) -> None:
        """Write one whenever SIGUSR1 comes, between two instructions of the loop. Only the main thread can be asked."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda number, frame: self.write(None))

    def write(self, error: BaseException | None) -> Path | None:
        """Write a file, and say in the log where; never raises, for there is something else to be told."""
        try:
            folder = self._folder or own_folder("dumps")
            path, at_s = new_file(folder, self._name, ".json")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"at": at_s, **self.told(error, time.monotonic())}, file, indent=1)
            sweep(folder, self._name, MAX_FILES)
        except (OSError, DiptychError) as problem:
            logger.warning("no crash dump could be written: %s", problem)
            return None
        logger.error("what the scheduler did last is in %s", path)
        return path

    def told(self, error: BaseException | None, now_s: float) -> Mapping[str, Any]:
        """Return what is written. Times are ago, in seconds."""
        sections: Mapping[str, Callable[[], Any]] = {
            "error": lambda: None if error is None else _error(error),
            "steps": lambda: [
                {**step._asdict(), "began_s": round(now_s - step.began_s, 6)} for step in self._meter.last_steps()
            ],
            "step_rooms": lambda: (
                [f"{room:016x}" for room in sorted(self._core.rooms_of_step())] if self._meter.is_running else []
            ),
            "load": lambda: self._core.load()._asdict(),
            "core": lambda: _core(self._core.report(), now_s),
            "pages": lambda: dict(self._cache.pool.counts()),
            "cache": lambda: asdict(self._cache.report()),
            "problems": lambda: list(self._cache.audit(self._core.report().holders)),
        }
        head = {"version": own_version(), "process": self._name, "pid": os.getpid()}
        return {**head, **{name: _section(tell) for name, tell in sections.items()}}


def _section(tell: Callable[[], Any]) -> Any:
    try:
        found = tell()
        json.dumps(found)
    except Exception as error:  # whatever is broken: the others are told all the same
        return {"not_told": f"{type(error).__name__}: {error}"[:MAX_WORDS]}
    return found


def _error(error: BaseException) -> Mapping[str, Any]:
    frames = [
        f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in traceback.extract_tb(error.__traceback__)
    ]
    return {"type": type(error).__name__, "words": str(error)[:MAX_WORDS], "frames": frames}


def _core(report: CoreReport, now_s: float) -> Mapping[str, Any]:
    held = report.holders
    return {
        "open_rooms": report.num_open_rooms,
        "counts": asdict(report.counts),
        "owning": [_room(request) for request in held.owning[:MAX_ROOMS]],
        "importing": [_room(request) for request in held.importing[:MAX_ROOMS]],
        "quarantined_pages": sum(len(pages) for pages in held.quarantined),
        "quarantined_s": None if report.quarantined_since_s is None else now_s - report.quarantined_since_s,
        "arriving_pages": sum(len(pages) for pages in held.arriving),
    }


def _room(request: Request) -> Mapping[str, Any]:
    return {
        "room": f"{request.room:016x}",
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.num_output_tokens,
        "computed_tokens": request.computed_len,
        "cached_tokens": request.cached_len,
        "max_tokens": request.params.max_tokens,
        "pages": request.num_pages,
        "adapter": request.adapter,
        "has_ended": request.has_ended,
    }
