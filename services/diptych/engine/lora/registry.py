"""What an adapter is once it is read; which ones a scheduler has, and when one may go.

    absent --load--> LOADED --unload--> UNLOADING --last request ended--> absent

A request takes the adapter that is LOADED under a name when it arrives, and keeps it to its end. An UNLOADING adapter
has no name any more, but its number: another one may be loaded under that name meanwhile. Which of them are in the
model's slots, `AdapterTurns` decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from diptych.common.arrays import F32
from diptych.common.errors import InvalidRequest, NotFound, Overloaded

# matrices that see every token and are multiplied or looked up as they are: not experts, not "kv_b" of latents
TARGETS: Final = re.compile(r"\d+\.(qkv|q|q_a|q_b|kv_a|o|(shared\.)?(gate_up|down))|embed|lm_head")
EMBEDDING: Final = "embed"  # which is looked up
OUTPUT: Final = "lm_head"  # which is the embedding again in some models, to which an adapter is one of its own
WITHOUT_ADAPTERS: Final = (
    "this worker takes no adapters: start it with --max-loras above 0 "
    "and without --deterministic, --dp-attention and --device sim"
)
NO_ADAPTER: Final = -1  # in place of a number, or of a slot

_NAME: Final = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)


class InvalidAdapter(InvalidRequest):
    """This model can't run the adapter, or the folder holds none. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """To add: `out[:, start : start + num_rows] += (x @ a.T) @ b.T`; with `EMBEDDING`, `a.T[ids] @ b.T`."""

    target: str  # the matrix, as the model calls it: "0.qkv", ...
    start: int
    a: F32  # [rank, num_columns]
    b: F32  # [num_rows, rank]; the adapter's scale is in it


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter's weights. Equal fingerprints: equal products."""

    fingerprint: str  # 32 hex digits
    products: tuple[Product, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that requests may use."""

    name: str
    number: int
    fingerprint: str


NONE: Final = Loaded("", NO_ADAPTER, "")


@dataclass(slots=True)
class _Entry:
    adapter: Loaded
    rooms: set[int] = field(default_factory=set)  # of requests that run with it


class LoraRegistry:
    """At most `max_loaded` adapters by name and by number, `0 <= number < max_loaded`."""

    def __init__(self, max_loaded: int, model_id: str) -> None:
        self._max_loaded = max_loaded
        self._model_id = model_id
        self._entries: dict[int, _Entry] = {}  # by number: LOADED and UNLOADING
        self._by_name: dict[str, Loaded] = {}  # LOADED
        self._by_room: dict[int, _Entry] = {}

    def loaded(self) -> tuple[Loaded, ...]:
        """Return what requests may use now, by name."""
        return tuple(adapter for _, adapter in sorted(self._by_name.items()))

    def load(self, name: str, fingerprint: str) -> tuple[Loaded, bool]:
        """Return the adapter, and whether it is new: then its weights are needed before any request."""
        present = self._by_name.get(name)
        if present is None:
            return self._add(name, fingerprint), True
        if present.fingerprint != fingerprint:
            raise InvalidRequest(f"{name!r} is loaded with other weights: unload it first")
        return present, False

    def unload(self, name: str) -> int | None:
        """Take the name away; return its number if that is free now, None if requests still run. Raises `NotFound`."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise NotFound(f"no adapter {name!r} is loaded")
        return self._collect(self._entries[adapter.number])

    def start(self, room: int, name: str) -> Loaded:
        """Return the adapter that a request runs with; `NONE` for an empty name. Raises `NotFound`."""
        if not name:
            return NONE
        adapter = self._by_name.get(name)
        if adapter is None:
            raise NotFound(f"no adapter {name!r} is loaded here")
        entry = self._by_room[room] = self._entries[adapter.number]
        entry.rooms.add(room)
        return adapter

    def end(self, room: int) -> int | None:
        """Note that a request ended; return a number that is free with it."""
        entry = self._by_room.pop(room, None)
        if entry is None:
            return None
        entry.rooms.remove(room)
        return self._collect(entry)

    def _add(self, name: str, fingerprint: str) -> Loaded:
        if not _NAME.fullmatch(name):
            raise InvalidAdapter(f"{name!r} can't name an adapter: use 1 to 128 of A-Z a-z 0-9 _ . : / @ + -")
        if name == self._model_id:
            raise InvalidAdapter(f"{name!r} is the model's own name")
        if self._max_loaded == 0:
            raise InvalidRequest(WITHOUT_ADAPTERS)
        if len(self._entries) == self._max_loaded:
            words = f"{self._max_loaded} adapters are loaded, as many as --max-loaded-loras or --max-loras allows"
            raise Overloaded(f"{words}: unload one first")
        number = next(number for number in range(self._max_loaded) if number not in self._entries)
        adapter = self._by_name[name] = Loaded(name, number, fingerprint)
        self._entries[number] = _Entry(adapter)
        return adapter

    def _collect(self, entry: _Entry) -> int | None:
        number = entry.adapter.number
        if entry.rooms or self._by_name.get(entry.adapter.name) is entry.adapter:
            return None
        del self._entries[number]
        return number
