"""A worker of the smallest world: a real core with its memory, and its end of a link that is data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from recurrent_runner import new_states

from diptych.common.arrays import U64
from diptych.decode.core import DecodeCore
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.schedule.pace.step_pace import StepPace
from diptych.engine.values.events import DigestPages, Event, SendNote, StreamPages, UnpackPages, WriteDone, WritePages
from diptych.engine.values.limits import Limits
from diptych.engine.values.prompt_cost import PromptCost
from diptych.engine.values.transfer_rules import TransferRules
from diptych.engine.values.window_pages import NO_WINDOWS, WindowPages
from diptych.prefill.core import PrefillCore
from simulation.pools import Pools, Shape
from simulation.requests import VOCAB

PREFILL, DECODE = 1, 2  # instance ids


@dataclass(slots=True, eq=False)
class Operation:
    """An effect on its way to the other side."""

    effect: WritePages | StreamPages | SendNote
    parts: list[int] = field(default_factory=list)  # ranks that have not written what they have of it
    digest: int = 0  # of what they wrote
    error: str | None = None

    @property
    def has_landed(self) -> bool:
        return not self.parts

    @property
    def stream(self) -> int:
        return self.effect.stream if isinstance(self.effect, SendNote) else self.effect.flow.stream

    def __str__(self) -> str:
        effect = self.effect
        if isinstance(effect, SendNote):
            return f"{type(effect.note).__name__} of room {effect.note.room}"
        return f"pages {effect.write.dst.tolist()} of room {effect.room}"


@dataclass(slots=True, eq=False)
class Side:
    """What a process and its transport know."""

    role: str
    instance_id: int
    pools: Pools
    states: U64  # [num_slots, num_cells]
    cache: KvCache
    core: PrefillCore | DecodeCore
    linked: frozenset[int] = frozenset()  # not asked for here
    is_alive: bool = True
    is_linked: bool = False  # as its transport knows; the core hears of it later
    wire: list[Operation] = field(default_factory=list)
    digests: dict[int, int] = field(default_factory=dict)  # stream -> of what was written since its last note
    broken: set[int] = field(default_factory=set)  # streams of which a write failed
    following: list[StreamPages] = field(default_factory=list)  # the step that runs next
    reading: list[DigestPages | UnpackPages] = field(default_factory=list)
    lands_in_parts: bool = False  # what is written here
    completed: list[WriteDone] = field(default_factory=list)  # not heard yet
    news: list[Event] = field(default_factory=list)  # of the link, not heard yet

    @property
    def kv(self) -> U64:
        return self.pools.kv

    def is_clean(self) -> bool:
        """Nothing is open and no page is held."""
        counts = self.cache.pool.counts()
        held = [count for state, count in counts.items() if state not in ("free", "cached")]
        return self.core.report().num_open_rooms == 0 and not any(held)

    def lose_link(self, event: Event) -> None:
        """What was not done ends with an error; then the core hears `event`."""
        writes = [operation.effect for operation in self.wire if not isinstance(operation.effect, SendNote)]
        self.news += [*self.completed, *(WriteDone(write.room, "lost") for write in writes), event]
        self.completed, self.wire, self.digests, self.broken = [], [], {}, set()
        self.is_linked = False

    def die(self) -> None:
        self.is_alive = self.is_linked = False
        self.wire, self.completed, self.news, self.reading = [], [], [], []


def new_side(
    role: str,
    instance_id: int,
    rules: TransferRules,
    shape: Shape,
    windows: WindowPages = NO_WINDOWS,
) -> Side:
    pools = Pools.new(shape)
    states = new_states(2, shape.num_state_cells)
    cache = KvCache(
        num_pages=shape.num_pages,
        page_size=shape.page_size,
        max_requests=2,
        max_tokens_per_request=16,
        pages_per_state=shape.pages_per_state,
        windows=replace(windows, step_tokens=4),
    )
    cost = PromptCost(step_cost=0)  # whose prefix is coming waits, however short it is
    limits = Limits(16, VOCAB, frozenset(), max_step_tokens=4, max_requests=2, prompt_cost=cost)
    page_nbytes, pace = pools.kv[0].nbytes, StepPace(limits.mixed_step_s)
    if role == "prefill":
        return Side(role, instance_id, pools, states, cache, PrefillCore(cache, limits, rules, page_nbytes, pace))
    return Side(role, instance_id, pools, states, cache, DecodeCore(cache, limits, page_nbytes, pace))
