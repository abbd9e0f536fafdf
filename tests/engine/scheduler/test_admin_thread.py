from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait

from diptych.common.errors import InvalidRequest, Unavailable
from diptych.engine.scheduler.admin_thread import AdminThread, Effect, Handler
from diptych.v1.admin_pb2 import AdminAnswer, AdminCommand, DropWeights, SwitchWeights

DROP = AdminCommand(query=1, drop_weights=DropWeights())
SWITCH = AdminCommand(query=2, switch_weights=SwitchWeights())


@contextmanager
def admin_thread(
    handlers: Mapping[str, Handler], waiting: Mapping[str, Handler] | None = None
) -> Iterator[Callable[[int], list[AdminAnswer]]]:
    """Yield a function that submits the commands and waits for so many answers."""
    admin = AdminThread(handlers, waiting)

    def answers(count: int) -> list[AdminAnswer]:
        found: list[AdminAnswer] = []
        for command in (DROP, SWITCH)[:count]:
            admin.submit(command)
        while len(found) < count:
            assert wait([admin.fileno()], 200), "no answer"
            found += admin.poll()
        return found

    yield answers
    admin.close()


def refuse() -> AdminAnswer:
    raise Unavailable("not yet")


def test_a_command_is_prepared_on_the_thread_and_takes_effect_on_the_callers() -> None:
    threads: list[threading.Thread] = []

    def prepare(command: AdminCommand) -> Effect:
        threads.append(threading.current_thread())
        return answer

    def answer() -> AdminAnswer:
        threads.append(threading.current_thread())
        return AdminAnswer()

    with admin_thread({"drop_weights": prepare}) as answers:
        assert answers(1) == [AdminAnswer(query=1)]
    assert threads[0] is not threads[1] is threading.current_thread()


def test_commands_are_answered_in_order() -> None:
    handlers: dict[str, Handler] = dict.fromkeys(("drop_weights", "switch_weights"), lambda command: AdminAnswer)
    with admin_thread(handlers) as answers:
        assert [answer.query for answer in answers(2)] == [1, 2]


def test_an_error_before_or_at_the_effect_is_the_answer() -> None:
    def fail(command: AdminCommand) -> Effect:
        raise InvalidRequest("bad path")

    with admin_thread({"drop_weights": fail, "switch_weights": lambda command: refuse}) as answers:
        assert answers(2) == [
            AdminAnswer(query=1, grpc_status="INVALID_ARGUMENT", message="bad path"),
            AdminAnswer(query=2, grpc_status="UNAVAILABLE", message="not yet"),
        ]


def test_a_bug_is_answered_too() -> None:
    with admin_thread({}) as answers:
        [answer] = answers(1)
    assert (answer.query, answer.grpc_status) == (1, "INTERNAL")


def test_who_waits_for_the_loop_does_not_keep_others_waiting() -> None:
    switched = threading.Event()

    def wait(command: AdminCommand) -> Effect:
        assert switched.wait(60), "the other command was not prepared"
        return AdminAnswer

    def switch() -> AdminAnswer:
        switched.set()
        return AdminAnswer()

    with admin_thread({"switch_weights": lambda command: switch}, {"drop_weights": wait}) as answers:
        assert [each.query for each in answers(2)] == [2, 1]
