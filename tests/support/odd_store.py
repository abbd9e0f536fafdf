"""A store of objects in memory, which a test makes fail, hang, lie or lose what it has."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from diptych.engine.tiers.page_format import Buffer
from diptych.engine.tiers.stores.object_store import Entry, PartsByRequest

SOON_S: Final = 60.0  # so long a thread of a busy machine may take


class OddStore:
    """Implements `ObjectStore` and `Ranges`. Several processes' worth of caches may use one."""

    url = "odd:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.opens = threading.Event()  # or nothing is answered
        self.opens.set()
        self.error: OSError | None = None
        self.write_error: OSError | None = None
        self.delete_error: OSError | None = None
        self.deleted: list[str] = []  # names that were asked to be
        self.lists = True
        self.num_sizes = 0
        self.num_writes = 0
        self._written: dict[str, int] = {}
        self._numbers = itertools.count()

    def runs(self) -> dict[str, bytes]:
        return {name: data for name, data in self.objects.items() if name != "probe"}

    def size(self, name: str) -> int | None:
        self._answer()
        self.num_sizes += 1
        data = self.objects.get(name)
        return None if data is None else len(data)

    def read(self, name: str, offset: int, nbytes: int) -> Buffer:
        self._answer()
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][offset : offset + nbytes]

    def new_parts(self) -> PartsByRequest:
        return PartsByRequest(self)

    def write(self, name: str, data: memoryview) -> None:
        self._answer(self.write_error)
        self.num_writes += name != "probe"
        self.objects[name] = bytes(data)
        self._written[name] = next(self._numbers)

    def delete(self, names: Sequence[str]) -> None:
        self._answer(self.delete_error)
        self.deleted += names
        for name in names:
            self.objects.pop(name, None)

    def entries(self) -> Iterator[Entry]:
        self._answer()
        known = [Entry(name, len(data), self._written[name]) for name, data in self.objects.items()]
        return iter(known if self.lists else ())

    def _answer(self, error: OSError | None = None) -> None:
        assert self.opens.wait(SOON_S)
        if (failure := self.error or error) is not None:
            raise failure
