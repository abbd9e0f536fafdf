"""Those whom a scheduler's loop has work done by, as far as it needs to know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.engine.lora.registry import Loaded
from diptych.engine.scheduler.links.links import PeerLinks
from diptych.engine.scheduler.step_watch import StepWatch
from diptych.engine.values.events import CompileGrammar, GrammarFailed, GrammarReady
from diptych.v1 import admin_pb2, bootstrap_pb2


class Grammars(Protocol):
    """Compiles grammars."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has events."""
        ...

    def submit(self, effect: CompileGrammar) -> None: ...

    def drop(self, room: int) -> None:
        """The room has ended: its grammar, if it waits for one, is not wanted any more."""
        ...

    def poll(self) -> Sequence[GrammarReady | GrammarFailed]: ...


class Admin(Protocol):
    """Executes the commands of operators."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        ...

    def submit(self, command: admin_pb2.AdminCommand) -> None: ...

    def poll(self) -> Sequence[admin_pb2.AdminAnswer]: ...


class Adapters(Protocol):
    """Has the adapters."""

    def news(self) -> Sequence[bootstrap_pb2.LoraAdapter] | None:
        """Return all adapters, if they have changed."""
        ...

    def start(self, room: int, name: str) -> Loaded:
        """Return what a request runs with, up to its `end`. Raises `NotFound`."""
        ...

    def end(self, room: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each."""

    links: PeerLinks
    grammars: Grammars
    admin: Admin
    adapters: Adapters
    watch: StepWatch  # over the steps that run in the loop's thread

    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that are readable while one of these has news."""
        return (*self.links.descriptors(), self.grammars.fileno(), self.admin.fileno())
