"""What tells unit tests from integration tests, and holds unit tests to it.

A unit test needs no process but its own, no UCX, and no model that somebody serves. What starts a process, opens UCX,
loads the small model or interprets a kernel of GPUs is an integration test: it lies in one of `FOLDERS`, uses one of
`FIXTURES`, or is marked `integration`, itself, its parameter or its file.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, Final

import pytest

UNITS: Final = "not integration"  # what `-m` says for unit tests alone
FOLDERS: Final = ("chaos", "console", "embedded", "helm", "platform")  # of tests
FIXTURES: Final = frozenset(("make_child_end", "make_host_end", "new_authority", "small_model", "small_model_path"))
STARTS: Final = frozenset(
    ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen")
)
TESTS: Final = Path(__file__).parents[1]


@cache  # of each file once, not of each of its tests
def lies_among_integration_tests(path: Path) -> bool:
    return any((TESTS / folder) in path.parents for folder in FOLDERS)


def mark_integration_tests(items: list[pytest.Item]) -> None:
    """Mark those that folders and fixtures make integration tests, and put them behind the unit tests.

    So no unit test finds a process of a fixture that an integration test started. Otherwise folders are in the order of
    their names.
    """
    for item in items:
        if lies_among_integration_tests(item.path) or FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("integration")
    items.sort(key=lambda item: (is_integration_test(item), item.nodeid.split("/")[:2]))


def is_integration_test(item: pytest.Item) -> bool:
    return item.get_closest_marker("integration") is not None


class OneProcess:
    """Fails the unit test that starts a process or opens UCX, or whose fixtures do, once it has ended."""

    def __init__(self) -> None:
        platform.processor()  # clients of APIs ask it, and the first answer is a process's
        self._is_held = False
        self._seen: list[str] = []
        sys.addaudithook(self._audit)
        self._spawn = util.spawnv_passfds
        util.spawnv_passfds = self._note_and_spawn  # of which interpreters tell no hook

    @contextmanager
    def holds(self, item: pytest.Item) -> Iterator[None]:
        """What happens meanwhile is of this test."""
        self._is_held, self._seen = not is_integration_test(item), []
        yield
        self._is_held = False

    def taken(self) -> list[str]:
        """Return what the test that runs has started or opened since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def check(self) -> None:
        if seen := self.taken():
            words = (
                f"a unit test starts {', '.join(seen)}: mark it as `@pytest.mark.integration`, or have it do without"
            )
            pytest.fail(words, pytrace=False)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_held:
            return
        if event in STARTS and not _compiles_a_part(arguments):
            self._seen.append(f"{event} {arguments[:2]}")
        if event == "ctypes.dlopen" and "libucp" in str(arguments[0]):
            self._seen.append("UCX")

    def _note_and_spawn(self, path: Any, args: Any, passfds: Any) -> int:
        if self._is_held:
            self._seen.append(f"multiprocessing {path}")
        return self._spawn(path, args, passfds)


def _compiles_a_part(arguments: tuple[Any, ...]) -> bool:
    """Tell whether a part of the product in C is compiled, as the first test behind its change does."""
    return len(arguments) > 1 and "-shared" in (arguments[1] or ())
