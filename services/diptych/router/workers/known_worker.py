"""What this router knows of a worker: its newest record and its newest load. Nothing here talks to anybody.

Rule: a state only moves forward; a record that says otherwise is older.

What workers tell of themselves becomes values when it comes, not whenever a request asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from diptych.common.members.record import State
from diptych.common.members.roles import WORKER_ROLES, Role
from diptych.common.members.terms import Feature, terms_of
from diptych.kvtransfer.dtypes import DTYPE_NBYTES
from diptych.router.workers.worker_view import TierPrice, WorkerLoad, WorkerView
from diptych.v1 import bootstrap_pb2
from diptych.v1.bootstrap_pb2 import Instance

_STATES: Final[frozenset[int]] = frozenset(State)


class Price(Protocol):
    """What a worker says of a tier, likewise."""

    @property
    def name(self) -> str: ...
    @property
    def base_s(self) -> float: ...
    @property
    def page_s(self) -> float: ...


class Counts(Protocol):
    """What a worker counts of itself, as values or as a message."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    @property
    def total_pages(self) -> int: ...
    @property
    def window_pages(self) -> int: ...
    @property
    def next_beside_pages(self) -> int: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def num_waiting_prompts(self) -> int: ...
    @property
    def grantable_pages(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def output_step_s(self) -> float: ...
    @property
    def context_token_s(self) -> float: ...
    @property
    def prompt_token_s(self) -> float: ...
    @property
    def tiers(self) -> Iterable[Price]: ...


def reported_load(load: bootstrap_pb2.WorkerLoad, page_size: int) -> WorkerLoad:
    link_speeds = {link.peer_instance_id: link.bytes_per_s for link in load.link_speeds}
    prompt_budget = load.prompt_budget if load.HasField("prompt_budget") else -1
    return counted_load(load, page_size, prompt_budget, load.queued_transfer_bytes, link_speeds)


def counted_load(
    load: Counts, page_size: int, prompt_budget: int, queued_transfer_bytes: int, link_speeds: Mapping[int, float]
) -> WorkerLoad:
    return WorkerLoad(
        num_requests=load.num_waiting + load.num_running,
        queued_tokens=load.waiting_tokens,
        free_tokens=max(0, load.free_pages - load.next_beside_pages) * page_size,
        has_credit=load.grantable_pages > 0,
        queued_transfer_bytes=queued_transfer_bytes,
        link_speeds=link_speeds,
        num_queued=load.num_waiting_prompts,
        context_tokens=max(0, load.total_pages - load.free_pages - load.window_pages) * page_size,
        prompt_budget=prompt_budget,
        output_tokens=load.output_tokens,
        output_step_s=load.output_step_s,
        context_token_s=load.context_token_s,
        prompt_token_s=load.prompt_token_s,
        left_tokens=load.waiting_tokens,
        tiers=tuple([_price(each, page_size) for each in load.tiers]),
    )


def _price(told: Price, page_size: int) -> TierPrice:
    """Return the price of a tier. From one whose price is no time nothing is loaded: a worker may say anything."""
    if not (told.base_s >= 0.0 and 0.0 <= told.page_s < math.inf):  # NaN is neither
        return TierPrice(told.name, math.inf)
    return TierPrice(told.name, told.base_s, told.page_s / max(1, page_size))


def token_bytes(layout: bootstrap_pb2.KvLayout) -> int:
    """Return how much KV a token takes, of all ranks of a worker."""
    return sum(
        len(region.total_layers or region.layers)
        * region.num_planes
        * region.total_heads
        * region.head_dim
        * DTYPE_NBYTES.get(region.dtype, 0)
        for region in layout.regions
    )


def _lends(record: Instance) -> str:
    """Return what a worker's cached pages are, by all that must be the same for another one to use them."""
    if not terms_of(record.terms).has(Feature.PULL):
        return ""
    layout = record.transfer.layout
    return f"{record.compat} {layout.page_size} {[region.dtype for region in layout.regions]}"


class KnownWorker:
    """One instance, from its first record on."""

    page_size: int  # tokens
    token_bytes: int  # of KV
    lends: str  # to whom it lends cached prefixes: to those that say the same; empty: to nobody
    reported: WorkerLoad

    def __init__(self, record: Instance) -> None:
        self.record = record
        self.load = record.load  # as the worker told it last
        self._linked = frozenset(record.load.linked_instances)
        self._note_layout()

    def __str__(self) -> str:
        return f"{self.role.value} worker {self.record.instance_id:016x} at {self.record.address}"

    @property
    def role(self) -> Role:
        """What the worker serves now: it may change, while no leg of ours is there."""
        return WORKER_ROLES[self.record.role]

    @property
    def state(self) -> State:
        return State(self.record.state)

    @property
    def started_as(self) -> str:
        """The model that it was started with: its weights may have been updated since."""
        return self.record.started_as or self.record.model_id

    @property
    def has_loaded(self) -> bool:
        """Whether it has its model."""
        return bool(self.record.compat)

    @property
    def linked(self) -> frozenset[int]:
        """The peers to which it has a transfer endpoint."""
        return self._linked

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that the worker has loaded: name to fingerprint."""
        return {adapter.name: adapter.fingerprint for adapter in self.record.loras}

    @property
    def takes_legs(self) -> bool:
        """Whether it is ready, not paused, and was heard lately."""
        return self.state is State.READY and not self.record.paused and not self.load.silent_s

    def reads_rows_of(self, encoder: KnownWorker) -> bool:
        """Whether steps here may read the rows of images that an encode worker has made, once they are pulled."""
        is_alike = bool(self.lends) and self.lends == encoder.lends and self.started_as == encoder.started_as
        return self._has_rows and encoder._has_rows and is_alike and encoder.record.instance_id in self._linked

    @property
    def _has_rows(self) -> bool:
        return terms_of(self.record.terms).has(Feature.ROWS)

    def view(self, *, is_reached: bool) -> WorkerView:
        """Return what decides who may serve; `is_reached`: a session to it is open."""
        record = self.record
        return WorkerView(
            record.instance_id,
            self.role,
            self.state,
            self.started_as,
            terms_of(record.terms),
            is_reached,
            self._linked,
            self.adapters,
            record.paused,
            record.not_ready,
            self.load.silent_s > 0,
            record.pool,
        )

    def on_record(self, record: Instance) -> None:
        """Keep a newer record. One that we can't read is none."""
        is_readable = record.role in WORKER_ROLES and record.state in _STATES
        if is_readable and record.instance_id == self.record.instance_id and record.state >= self.record.state:
            self.record = record
            self._note_layout()

    def on_load(self, load: bootstrap_pb2.WorkerLoad) -> bool:
        """Keep a newer load; return whether others may serve with it, or rather without it, than before, or more."""
        was_silent, total_pages, self.load = self.load.silent_s > 0, self.load.total_pages, load
        self.reported = reported_load(load, self.page_size)
        before, self._linked = self._linked, frozenset(load.linked_instances)
        return self._linked != before or was_silent != (load.silent_s > 0) or total_pages != load.total_pages

    def _note_layout(self) -> None:
        """Keep what every choice of a pair asks for."""
        layout = self.record.transfer.layout
        self.page_size = layout.page_size
        self.token_bytes = token_bytes(layout)
        self.lends = _lends(self.record)
        self.reported = reported_load(self.load, self.page_size)
