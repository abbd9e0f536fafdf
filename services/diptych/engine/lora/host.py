"""What a process does with adapters, whatever computes there: reads them from folders, and brings them into slots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, Protocol, TypeVar

from diptych.common.errors import InvalidRequest
from diptych.engine.lora.registry import WITHOUT_ADAPTERS

W = TypeVar("W")  # an adapter's weights, as the model wants them


@dataclass(frozen=True, slots=True)
class ReadAdapter(Generic[W]):
    """An adapter that only has to be put into a slot."""

    fingerprint: str
    weights: W


class AdapterHost(Protocol[W]):
    """The model that is served, as adapters see it. `read` runs in a thread, the rest between two steps."""

    def read(self, folder: Path) -> ReadAdapter[W]:
        """Read an adapter and lay it out. One thread at a time. Raises `DiptychError`."""
        ...

    def install(self, slot: int, weights: W) -> None:
        """Put an adapter into a slot, in place of what is there, for the steps that are launched from now on."""
        ...

    def remove(self, slot: int) -> None:
        """Nobody will have what is in the slot."""
        ...

    def drop(self, weights: W) -> None:
        """What was read will not be installed any more."""
        ...


class NoAdapters:
    """Implements `AdapterHost` where nothing is multiplied."""

    def read(self, folder: Path) -> NoReturn:
        raise InvalidRequest(WITHOUT_ADAPTERS)

    def install(self, slot: int, weights: object) -> NoReturn:
        raise AssertionError("none is read")

    def remove(self, slot: int) -> NoReturn:
        raise AssertionError("none is installed")

    def drop(self, weights: object) -> NoReturn:
        raise AssertionError("none is read")
