"""Pages in the objects of a store, which many workers fill and read. Implements `Medium`.

Each object is a run of a text, or an end (see `runs`): records as in files, one behind the other, nothing else. It is
written as a whole, and never changed: two who write it at once write pages that are worth the same. What is there is
asked for when a text comes; that is believed for a while, and a load finds out what has gone meanwhile.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from diptych.common.arrays import I32
from diptych.engine.cache.beside import NOTHING_BESIDE, Beside
from diptych.engine.cache.page_ids import NOBODYS, PageId
from diptych.engine.cache.tier import Lookup
from diptych.engine.tiers.medium import MediumCounts
from diptych.engine.tiers.object_asker import AskCounts, Asked, ObjectAsker, Question
from diptych.engine.tiers.page_format import PageFormat
from diptych.engine.tiers.page_reader import RUN_PAGES, PageReader
from diptych.engine.tiers.page_writer import PageWriter
from diptych.engine.tiers.records import Run
from diptych.engine.tiers.runs import RunIndex, object_name
from diptych.engine.tiers.stores.object_room import Room
from diptych.engine.tiers.stores.object_store import ObjectStore
from diptych.engine.values.events import PagesRestored
from diptych.kvtransfer.ownership import Pages

NUM_READERS: Final = 8
READ_S: Final = 5.0  # after which a read counts as hanging
NUM_BUFFERS: Final = 16  # of objects that wait to be written
BUFFERED_NBYTES: Final = 2**28  # of these, but for two
MOST_PAGES: Final = 2**17  # that are known to be there
MOST_NAMES: Final = 2**17  # of runs that were given or found
KNOWN_S: Final = 600.0  # that these are not given again: then they may have been deleted
BELIEVED_S: Final = 60.0  # that what was there is there
PROBE: Final = "probe"  # an object that is read to measure the store
PROBE_NBYTES: Final = 2**20
NUM_SIZES: Final = 3  # that it is asked for its size: the soonest answer counts


@dataclass(frozen=True, slots=True)
class Objects:
    """What all objects of some terms have in common."""

    record: PageFormat
    run_pages: int
    folder: str  # in which they are
    beside: Beside = NOTHING_BESIDE  # of which ends are
    other_folders: Sequence[str] = ()  # of other ranks: an object is there if they have theirs

    @property
    def nbytes(self) -> int:
        """Bytes of the largest one."""
        return max(self.run_pages, self.beside.most_places) * self.record.record_nbytes


class PageObjects:
    """`close` it before the memory goes that it reads and writes."""

    def __init__(
        self,
        store: ObjectStore,
        objects: Objects,
        pool: Any,
        room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool`: bytes `[number, page_nbytes]`. `room`: bounds the store; None: somebody else does."""
        self.capacity = MOST_PAGES
        self.objects = objects
        self.index = RunIndex(MOST_PAGES)
        self.asker = ObjectAsker(store, clock, objects.other_folders)
        self._clock = clock
        self._known: OrderedDict[tuple[int, int], float] = OrderedDict()  # last pages of objects, and since when
        self._bad: deque[str] = deque()  # objects in which readers have found what is wrong
        self._gone: deque[str] = deque()  # objects that they have not found
        self._written: deque[Sequence[PageId]] = deque()  # runs that the writer has written or found
        self.reader = PageReader(
            _Source(store, self._bad, self._gone, self.asker.measured),
            objects.record,
            pool,
            clock,
            num_readers=NUM_READERS,
            hangs_s=READ_S,
        )
        self.writer = PageWriter(
            _Putting(store, objects, room, self._written),
            objects.record,
            pool,
            clock,
            _nothing,
            num_buffers=max(2, min(NUM_BUFFERS, BUFFERED_NBYTES // objects.nbytes)),
            buffer_nbytes=objects.nbytes,
        )
        self.reader.measure()

    @property
    def run_pages(self) -> int:
        return self.objects.run_pages

    @property
    def asked(self) -> AskCounts:
        return self.asker.counts

    @property
    def counts(self) -> MediumCounts:
        num_opened = self.reader.breaker.num_opened + self.writer.breaker.num_opened
        nbytes = self.num_pages * self.objects.record.record_nbytes
        return MediumCounts(self.num_pages, nbytes, self.writer.counts, self.reader.counts, num_opened)

    @property
    def num_pages(self) -> int:
        return self.index.num_pages

    @property
    def is_asked(self) -> bool:
        return self.reader.is_asked

    def has(self, page_id: PageId) -> bool:
        return self.index.find(page_id, self._clock()) is not None

    def lose(self, page_id: PageId) -> None:
        self._lose_run(self.index.run_of(page_id))

    def load_s(self, num_pages: int) -> float:
        return self.reader.load_s(num_pages)

    def keep(self, places: I32, ids: Sequence[PageId]) -> list[bool]:
        """What the level above lets go was given before, or is not kept."""
        return [*map(self.has, ids)]

    def finish_copies(self) -> None:
        """All is copied on return of `offer`."""

    @property
    def look_up_s(self) -> float:
        """How long an answer takes; infinity: nobody knows, or it is not asked now."""
        self.reader.measure()
        is_asked = self.is_asked and self.reader.is_measured and not self.asker.is_busy
        return self.asker.usual_s if is_asked else math.inf

    def look_up(
        self, first: int, ids: Sequence[PageId], until_s: float, before: Sequence[PageId] = ()
    ) -> Lookup | None:
        """Ask which runs are there that hold these pages, which follow the first ones of a text, and which end."""
        size = self.objects.run_pages
        wholes = range(size - 1 - first % size, len(ids), size)
        last = [*itertools.takewhile(lambda end: not self.writer.is_forgotten(ids[end]), wholes)]
        runs = [object_name(self.objects.folder, ids[end]) for end in last]
        ends = self._ends([ids[end] for end in last], first // size)
        if self._are_known(runs, first % size, ends):
            return None
        self.reader.begin()
        return self.asker.ask(Asked(runs, first, ids[: last[-1] + 1], before, ends), until_s)

    def _ends(self, last: Sequence[PageId], num_before: int) -> dict[int, str]:
        """Return the objects of the ends that may be behind runs, by these; some runs of the text are before them."""
        beside = self.objects.beside
        if beside.is_nothing:
            return {}
        size = self.objects.run_pages
        ends = {run: beside.last(page_id) for run, page_id in enumerate(last)}
        return {
            run: object_name(self.objects.folder, end)
            for run, end in ends.items()
            if beside.is_needed((num_before + run + 1) * size) and not self.writer.is_forgotten(end)
        }

    def _are_known(self, runs: Sequence[str], first: int, ends: Mapping[int, str]) -> bool:
        """Whether all runs of a text are known to be there, and are found: the first one from page `first` of it on.

        And an end, if there are some.
        """
        now_s = self._clock()
        are_known = all([self.index.refind(run, 0 if number else first, now_s) for number, run in enumerate(runs)])
        return are_known and (not ends or any(self.index.refind(end, 0, now_s) for end in reversed([*ends.values()])))

    @property
    def takes_pages(self) -> bool:
        return self.writer.breaker.allows(self._clock())

    def lacks(self, group: int, name: int) -> bool:
        return self._clock() - self._known.get((group, name), -math.inf) > KNOWN_S

    def offer(self, pages: Pages, ids: Sequence[PageId]) -> bool:
        """Have an object written that is in these pages; False: it is dropped."""
        is_given = self.writer.give_run(ids, pages.tolist())
        if is_given:
            self._note(ids[-1])
        return is_given

    def forget(self, ids: Sequence[PageId]) -> None:
        self.forget_runs(ids, ids)

    def forget_runs(self, ids: Sequence[PageId], ends: Sequence[PageId]) -> Sequence[PageId]:
        """Let nobody find runs that have any of these pages, as far as they are known, nor those that end with `ends`.

        Nor what is asked for now, which may be answered by them. Return the last pages of all that go.
        """
        self.asker.void()
        self.writer.forget(ids, ends)  # first: what it has written before is in the news
        self._take_news()
        runs = {self.index.run_of(page_id) for page_id in ids} - {None}
        last = [self.index.ids_of(run)[-1] for run in runs if run is not None]
        self.writer.forget((), last)
        for run in runs:
            self._lose_run(run)
        self._known.clear()
        return [*ends, *last]

    def runs_of(self, ids: Sequence[PageId]) -> Sequence[tuple[int, Sequence[PageId]]]:
        """Return what is known of the objects that have these pages: the number of the first page, and the pages."""
        names = dict.fromkeys(self.index.run_of(page_id) for page_id in ids)
        return [self.index.known(name) for name in names if name is not None]

    def learn(self, first: int, ids: Sequence[PageId]) -> None:
        """Somebody knows that an object is there, of which these are the pages from number `first` on."""
        self.index.add(object_name(self.objects.folder, ids[-1]), first, ids, self._clock() + BELIEVED_S)

    def load(self, number: int, ids: Sequence[PageId], pages: Pages) -> None:
        runs, is_whole = self._runs(ids, pages)
        self.reader.load(number, runs, is_whole)

    def restored(self) -> Sequence[PagesRestored]:
        if self.asker.waits_since_s < self._clock() - READ_S:
            self.reader.end(f"a question was not answered within {READ_S:g} s")
        for question in self.asker.answered():
            self.reader.end(question.error)
            if not question.is_void:
                self._believe(question)
        ended = self.reader.restored()
        self._take_news()  # then: with all that these have found
        return ended

    def _believe(self, question: Question) -> None:
        size, until_s, asked = self.objects.run_pages, self._clock() + BELIEVED_S, question.asked
        first = asked.first % size
        for run in range(question.search.num_found):
            ids = asked.ids[max(0, run * size - first) : (run + 1) * size - first]
            self.index.add(asked.runs[run], first if run == 0 else 0, ids, until_s)
            self._note(ids[-1])
        if question.search.end is not None:
            ids = self._ids_of_end(asked, (asked.first // size + question.search.end + 1) * size)
            self.index.add(asked.ends[question.search.end], 0, ids, until_s)
            self._note(ids[-1])

    def _ids_of_end(self, asked: Asked, end: int) -> Sequence[PageId]:
        """Return the pages of the end behind the first `end` pages of a text."""
        beside, start = self.objects.beside, asked.first - len(asked.before)
        pages = [*asked.before, *asked.ids][: end - start]
        return beside.ids(pages[beside.first(end) - start :], pages[-1])

    def descriptors(self) -> Sequence[int]:
        return (self.reader.fileno(), self.asker.fileno())

    def close(self) -> None:
        self.asker.close()
        self.writer.close()
        self.reader.close()

    def finish_writes(self) -> None:
        self.writer.finish()

    def _take_news(self) -> None:
        """Take what threads have found out."""
        while self._written:
            ids = self._written.popleft()
            if not self.objects.other_folders:  # else it is asked whether these have been written, too
                self.learn(0, ids)
        while self._gone:
            self._lose_run(self._gone.popleft())
        while self._bad:
            run = self._bad.popleft()
            if ids := self.index.ids_of(run):
                self.asker.void()
                self.writer.forget(ids, ids[-1:])  # or it would be found, and not be written again
            self._lose_run(run)

    def _lose_run(self, run: str | None) -> None:
        if run is not None and (ids := self.index.ids_of(run)):
            self._known.pop((ids[-1].group, ids[-1].name), None)
            self.index.drop(run)

    def _note(self, last: PageId) -> None:
        key = last.group, last.name
        self._known[key] = self._clock()
        self._known.move_to_end(key)
        if len(self._known) > MOST_NAMES:
            self._known.popitem(last=False)

    def _runs(self, ids: Sequence[PageId], pages: Pages) -> tuple[list[Run], bool]:
        """Return what to read, and whether that is all."""
        runs: list[Run] = []
        size = self.objects.record.record_nbytes
        for page_id, page in zip(ids, pages.tolist(), strict=True):
            place = self.index.find(page_id, self._clock())
            if place is None:
                return runs, False
            last, offset = runs[-1] if runs else None, place.number * size
            follows = last is not None and last.where == place.run and last.offset + len(last.ids) * size == offset
            if last is None or not follows or len(last.ids) == RUN_PAGES:
                last = Run(place.run, offset, [], [])
                runs.append(last)
            last.ids.append(page_id)
            last.pages.append(page)
        return runs, True


def _nothing() -> None:
    pass


class _Source:
    """Implements `Source`."""

    def __init__(self, store: ObjectStore, bad: deque[str], gone: deque[str], learn: Callable[[float], None]) -> None:
        self._store = store
        self._learn = learn
        self._bad = bad
        self._gone = gone
        self.name = store.url

    def new_reader(self) -> ObjectReader:
        return ObjectReader(self._store, self._learn)

    def to_measure(self) -> str:
        return PROBE

    def lose(self, run: Run, page_id: PageId) -> None:
        self._bad.append(run.where)

    def miss(self, run: Run) -> None:
        self._gone.append(run.where)


class ObjectReader:
    """Implements `RecordReader`."""

    def __init__(self, store: ObjectStore, learn: Callable[[float], None]) -> None:
        """`learn` is told how many seconds an answer took."""
        self._store = store
        self._learn = learn
        parts = store.new_parts()
        self.prepare, self.read_cached, self.read, self.rest = parts.prepare, parts.read_cached, parts.read, parts.rest

    def measure(self, where: str) -> tuple[int, float]:
        """The first one to measure a store writes what is read."""
        times = []
        for _ in range(NUM_SIZES):
            began_s = time.monotonic()
            size = self._store.size(where)
            times.append(time.monotonic() - began_s)
        self._learn(min(times))
        if size != PROBE_NBYTES:
            self._store.write(where, memoryview(bytes(PROBE_NBYTES)))
        began_s = time.monotonic()
        num_read = memoryview(self._store.read(where, 0, PROBE_NBYTES)).nbytes
        return num_read, time.monotonic() - began_s


class _Putting:
    """Implements `Sink`: each batch is a run."""

    def __init__(
        self, store: ObjectStore, objects: Objects, room: Room | None, written: deque[Sequence[PageId]]
    ) -> None:
        self._store = store
        self._objects = objects
        self._room = room
        self._written = written
        self.name = store.url

    def write(self, data: memoryview, used: int, ids: Sequence[PageId]) -> int:
        """Write a run, unless it is there or some of it is not to be found."""
        if NOBODYS in ids:
            return 0
        name = object_name(self._objects.folder, ids[-1])
        if self._store.size(name) == used:
            return 0
        if self._room is not None:
            self._room.make(used)
        self._store.write(name, data[:used])
        return used

    def publish(self, ids: Sequence[PageId], lost: Set[bytes]) -> None:
        if NOBODYS not in ids and lost.isdisjoint(page_id.key for page_id in ids):
            self._written.append(tuple(ids))

    def drop(self, ids: Sequence[PageId]) -> None:
        """Delete all runs that end with one of these pages."""
        self._store.delete([object_name(self._objects.folder, page_id) for page_id in ids])

    def make_room(self) -> None:
        if self._room is not None:
            self._room.make_at_once(self._objects.nbytes)

    def close(self) -> None:
        pass
