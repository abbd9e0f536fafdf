"""Sees to it that what an operator declares is so, on workers that join later, too: level-triggered, again and again.

The declaration comes from a file, which is read again when it changes, or by `replace` where there is no file. That one
is a part of this router's record as a member, with a version that is above all that were known. Of several the newest
holds, so a router that starts later takes over what those of before declare, as long as one of them is there.

Several routers do the same beside each other: to load an adapter that is loaded changes nothing.

Rule: what takes effect at once, as pools' weights do, waits for no adapter. Those are loaded and unloaded by who holds
another lock, one after the other, each as it is declared by then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from diptych.common import logging as logs
from diptych.common.errors import ConfigError, DiptychError, InvalidRequest
from diptych.common.members.record import State
from diptych.common.trust.reloaded import Reloaded
from diptych.router.choose.pools import Weights
from diptych.router.values.declaration import Declaration, changes, parse_declaration
from diptych.router.workers.known_worker import KnownWorker
from diptych.v1.bootstrap_pb2 import Instance

logger = logging.getLogger(__name__)

EVERY_S: Final = 0.5
FAILED_EVERY_S: Final = 30.0  # for an adapter that could not be loaded


class Adapters(Protocol):
    """Loads and unloads on all workers."""

    async def load(self, name: str, path: str) -> int: ...

    async def unload(self, name: str) -> int: ...


class Workers(Protocol):
    """What declarations are about."""

    def own_workers(self) -> Iterable[KnownWorker]: ...

    def declare(self, pools: Weights) -> None: ...

    def expect(self, adapters: frozenset[str]) -> None:
        """Hear which adapters are declared that have not failed: whoever asks for one may wait for it."""
        ...

    def routers(self) -> Mapping[int, Instance]:
        """The records of all routers."""
        ...


class Version(NamedTuple):
    """What an operator declared, and which of several is the newest: of equal numbers the greater text, anywhere."""

    number: int = 0
    text: str = ""


def missing(declared: Mapping[str, str], workers: Iterable[KnownWorker]) -> list[str]:
    """Return the declared adapters that some ready worker has not, in their order."""
    loaded = [worker.adapters for worker in workers if worker.state is State.READY]
    return [name for name in declared if any(name not in each for each in loaded)]


class Reconciler:
    """`run` must be running."""

    def __init__(self, workers: Workers, adapters: Adapters, path: Path | None, clock: Callable[[], float]) -> None:
        """`path` is a file with the declaration; None: there is none yet. Raises `ConfigError`."""
        self._workers = workers
        self._adapters = adapters
        self._path = path
        self._file = Reloaded([path], lambda: _read(path)) if path is not None else None
        self._clock = clock
        self._failed: dict[str, tuple[float, str]] = {}  # adapters: when it was tried last, and why it failed
        self._withdrawn: dict[str, None] = {}  # adapters that are to be unloaded, in their order
        self._turn = asyncio.Lock()  # of who reads what is declared, and takes it
        self._loading = asyncio.Lock()  # of who loads and unloads
        self.version = Version()  # what `replace` was told last, at any router
        self.declared = Declaration()
        self._apply(self._file.current() if self._file else Declaration())

    @property
    def problems(self) -> Mapping[str, str]:
        """Why declared adapters are not loaded, by name."""
        return {name: words for name, (_, words) in self._failed.items() if name in self.declared.adapters}

    async def replace(self, text: str) -> list[str]:
        """Declare something else, in TOML; return what that changes, in words. Raises `InvalidRequest`.

        Not where a file declares it. It waits until adapters were loaded, unless it changes only something else.
        """
        if self._path is not None:
            raise InvalidRequest(f"{self._path} declares this (--declared-file): change the file instead")
        try:
            declaration = parse_declaration(text, "the body")
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        async with self._turn:
            self.version = Version(max(self.version, self._newest_elsewhere()).number + 1, text)
            before, words = self.declared, self._apply(declaration)
        if not words or declaration.adapters != before.adapters:
            await self._load_missing()
        return words

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._keep_loaded())

    async def _follow(self) -> None:
        while True:
            async with self._turn:
                self._apply(self._file.current() if self._file else self._newest())
            await asyncio.sleep(EVERY_S)

    async def _keep_loaded(self) -> None:
        while True:
            await self._load_missing()
            await asyncio.sleep(EVERY_S)

    def _newest(self) -> Declaration:
        """Return what is declared at this router, or later at another one."""
        newest = self._newest_elsewhere()
        if newest <= self.version:
            return self.declared
        self.version = newest
        try:
            return parse_declaration(newest.text, "what another router declares")
        except ConfigError as error:  # of a later version of the software
            logger.error("%s", error)
            return self.declared

    def _newest_elsewhere(self) -> Version:
        told = (Version(each.declared_version, each.declared) for each in self._workers.routers().values())
        return max(told, default=Version())

    def _apply(self, declaration: Declaration) -> list[str]:
        """Have it hold from now on; return what that changes, in words."""
        before, words = self.declared, changes(self.declared, declaration)
        if not words:
            return []
        for each in words:
            logger.info("declared: %s", each)
        if declaration.pools != self.declared.pools:
            self._workers.declare(declaration.pools)
        if declaration.log_level and declaration.log_level != self.declared.log_level:
            logs.set_level(declaration.log_level)
        self.declared = declaration
        gone = [name for name, path in before.adapters.items() if declaration.adapters.get(name) != path]
        self._withdrawn |= dict.fromkeys(gone)
        self._note_failed({name: each for name, each in self._failed.items() if name not in gone})
        return words

    def _note_failed(self, failed: dict[str, tuple[float, str]]) -> None:
        self._failed = failed
        self._workers.expect(frozenset(self.declared.adapters.keys() - failed.keys()))

    async def _unload_withdrawn(self) -> None:
        while self._withdrawn:
            name = next(iter(self._withdrawn))
            try:
                await self._adapters.unload(name)
            except DiptychError as error:  # nobody has it, or somebody could not be asked
                logger.info("adapter %s is withdrawn: %s", name, error)
            del self._withdrawn[name]

    async def _load_missing(self) -> None:
        """Unload what is withdrawn, and load what is missing: whatever is declared by the time of each."""
        async with self._loading:
            await self._unload_withdrawn()
            lacking = missing(self.declared.adapters, self._workers.own_workers())
            self._note_failed({name: each for name, each in self._failed.items() if name in lacking})
            for name in lacking:
                if path := self.declared.adapters.get(name):
                    await self._load(name, path)
                await self._unload_withdrawn()

    async def _load(self, name: str, path: str) -> None:
        tried_s, before = self._failed.get(name, (-math.inf, ""))
        if self._clock() - tried_s < FAILED_EVERY_S:
            return
        try:
            num_workers = await self._adapters.load(name, path)
        except DiptychError as error:
            if self.declared.adapters.get(name) == path:
                self._note_failed({**self._failed, name: (self._clock(), str(error))})
            if str(error) != before:
                logger.warning("adapter %s is declared, and can't be loaded: %s", name, error)
        else:
            self._note_failed({other: each for other, each in self._failed.items() if other != name})
            logger.info("adapter %s is loaded on %d workers", name, num_workers)


def _read(path: Path) -> Declaration:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--declared-file: {path} can't be read: {error}") from None
    return parse_declaration(text, str(path))
