"""A step as a list of operations, with places where it may yield to another one.

A layer whose tokens travel to experts of other ranks yields where they are on their way. Of a step that is cut into two
micro-batches each has a list of its own: while one's tokens travel, the other computes. A step as a whole runs the same
list, and yields to nobody. (SGLang calls the two *operations strategy* and *two-batch overlap*.)

What the lists of all ranks have in common is how often they yield: so all ranks send in one order, whoever has tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

Operation = Callable[[], object]  # what it returns is nobody's


def _yield() -> None:
    """Alone it does nothing."""


YIELD: Final[Operation] = _yield  # where another list may go on


def in_order(operations: Iterable[Operation]) -> None:
    """Run a list by itself."""
    for operation in operations:
        operation()


def in_turn(lists: Iterable[Iterable[Operation]]) -> Iterator[tuple[int, Operation]]:
    """Yield the operations of all lists, each with the number of its own: from one `YIELD` to the next in turn.

    What a list has next is asked for when all that came before it, of all lists, has been run.
    """
    turns = deque(enumerate(map(iter, lists)))
    while turns:
        number, operations = turns.popleft()
        for operation in operations:
            if operation is YIELD:
                turns.append((number, operations))
                break
            yield number, operation
