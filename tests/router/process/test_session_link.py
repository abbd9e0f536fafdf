"""The sessions of several processes: links to one desk, over real pairs of sockets, in one event loop."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from diptych.common.errors import Conflict, InternalError, InvalidRequest, Overloaded, Unavailable
from diptych.router.admission.session_line import TICKET_S, Key
from diptych.router.metrics import SessionLineUsage
from diptych.router.process import session_link
from diptych.router.process.session_host import SessionHost
from diptych.router.process.session_link import ENDS, PoolsOfModel, SessionLink
from diptych.router.process.session_words import (
    MAX_BYTES,
    Answer,
    Begin,
    Close,
    Come,
    Counted,
    Go,
    Keep,
    Leave,
    Open,
    Pools,
    Uncounted,
    Word,
    encoded,
    failed,
    failure_in,
    read_word,
)
from diptych.router.values.kept_sessions import MAX_OF_OWNER, MAX_TOKENS, TOKEN_TYPE, Follow, Terms

A, B, C = (Key("", name) for name in "abc")
TERMS = Terms(1000, 600.0, 100)
LONG_S = 600.0


class Router:
    """Two processes, each of which may fill pools of 50 tokens with sessions of each of two models."""

    def __init__(self, look_s: float = LONG_S) -> None:
        self.now_s = 0.0
        self.host = SessionHost(2, lambda: self.now_s, look_s)
        self.capacity = [50, 50]  # of each process
        self.problem: str | None = None
        self.changed = asyncio.Event()
        self.tasks = [asyncio.ensure_future(self.host.run())]
        self.links: list[SessionLink] = []
        self.links = [self.start(index) for index in range(2)]

    def start(self, index: int) -> SessionLink:
        own, its = socket.socketpair()
        pools = PoolsOfModel(lambda: self.capacity[index], lambda: self.problem, self.wait_for_change)
        link = SessionLink(its, [pools, pools])
        self.tasks += [asyncio.ensure_future(self.host.serve(index, own)), asyncio.ensure_future(link.run())]
        return link

    async def wait_for_change(self) -> None:
        await self.changed.wait()

    def change(self, *capacity: int, problem: str | None = None) -> None:
        """Let so much of the pools be there for each process."""
        self.capacity, self.problem = list(capacity), problem
        self.changed.set()
        self.changed = asyncio.Event()

    async def kill(self, index: int) -> None:
        """A process dies: its end of the sockets is closed."""
        task = self.tasks[2 + 2 * index]
        task.cancel()
        await asyncio.wait([task, self.tasks[1 + 2 * index]])

    async def waiting(self, process: int, key: Key, terms: Terms = TERMS) -> asyncio.Task[None]:
        """Return a call of a client that is in line."""
        task = asyncio.ensure_future(self.links[process].open(key, terms, LONG_S))
        await self.until(lambda: self.place(key, terms.model) > 0 and self.host.desk.doors[terms.model].num_calls > 0)
        return task

    def place(self, key: Key, model: int = 0) -> int:
        return self.host.desk.doors[model].line.place(key)

    def num_tokens(self, model: int = 0) -> int:
        return self.host.desk.doors[model].line.num_tokens

    async def until(self, condition: Callable[[], bool], most: int = 60_000) -> None:
        for round in range(most):
            if condition():
                return
            await asyncio.sleep(0.001 if round > 100 else 0)
        raise AssertionError("it never happened")

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await asyncio.sleep(0)  # sockets are closed then


def in_router(test: Callable[[Router], Awaitable[None]], look_s: float = LONG_S) -> None:
    async def run() -> None:
        router = Router(look_s)
        await router.until(lambda: router.host.desk.doors[1].capacity_tokens == sum(router.capacity))
        try:
            await test(router)
        finally:
            await router.close()

    asyncio.run(run())


def test_one_line_is_counted_once_for_all_processes() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        await first.open(A, TERMS, LONG_S)  # as large as the shares of both together
        waits = [await router.waiting(1, B), await router.waiting(0, C)]
        assert [router.place(key) for key in (A, B, C)] == [0, 1, 2]
        assert await second.close(A), "whoever let it in"
        await waits[0]
        assert not waits[1].done()
        assert await first.close(B)
        await waits[1]
        assert await first.close(B) is False

    in_router(test)


def test_each_model_has_a_line_of_its_own() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        other = replace(TERMS, model=1)
        await first.open(A, TERMS, LONG_S)
        await second.open(B, other, LONG_S)
        assert [router.num_tokens(model) for model in (0, 1)] == [100, 100]
        with pytest.raises(InvalidRequest, match="open already"):
            await second.open(A, other, LONG_S)
        waits = await router.waiting(0, C, other)
        assert await first.close(A)
        assert await first.close(B)
        await waits

    in_router(test)


def test_requests_of_a_session_count_whichever_process_serves_them_and_wait_for_nothing() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, TERMS, LONG_S)
        with router.links[1].request(0, A) as context:
            context.num_tokens = 20
        await router.until(lambda: router.num_tokens() == 30)
        with router.links[0].request(0, Key("", "")) as context:  # of no session: nobody is told
            context.num_tokens = 90
        with router.links[0].request(1, A) as context:  # of another model
            context.num_tokens = 90
        assert await router.links[0].close(B) is False  # all that was told before has been heard
        assert router.num_tokens() == 30

    in_router(test)


def test_a_process_that_dies_takes_neither_sessions_nor_places_along() -> None:
    async def test(router: Router) -> None:
        await router.links[1].open(A, TERMS, LONG_S)
        lost, waits = await router.waiting(1, B), await router.waiting(0, C)
        held = router.links[1].request(0, A)
        held.__enter__()
        member = router.host.desk.doors[0].line._in[A]
        await router.until(lambda: member.num_open == 1)
        await router.kill(1)
        with pytest.raises(Unavailable, match=ENDS):
            await lost
        assert member.num_open == 0, "its requests have ended"
        assert [router.place(key) for key in (B, C)] == [1, 2]
        await router.links[0].open(A, TERMS, LONG_S)  # who did not get the answer asks again
        again = asyncio.ensure_future(router.links[0].open(B, TERMS, LONG_S))
        assert await router.links[0].close(A)
        await again
        assert not waits.done()

    in_router(test)


def test_the_pools_are_what_the_processes_that_are_there_tell_of_them() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, replace(TERMS, expected_tokens=60), LONG_S)
        door = router.host.desk.doors[0]
        assert door.capacity_tokens == 100
        await router.kill(1)
        assert door.capacity_tokens == 50
        waits = await router.waiting(0, B, replace(TERMS, expected_tokens=30))
        again = await router.waiting(0, C, replace(TERMS, expected_tokens=30))
        router.links[1] = router.start(1)
        await waits
        assert door.capacity_tokens == 100
        assert not again.done()
        router.change(50, 70)
        await again

    in_router(test)


def test_pools_are_known_before_anybody_waits_and_followed_while_nobody_does() -> None:
    async def test(router: Router) -> None:
        door = router.host.desk.doors[0]
        assert door.capacity_tokens == 100
        router.change(50, 0)
        await router.until(lambda: door.capacity_tokens == 50)

    in_router(test)


def test_news_of_the_pools_lets_in_who_waits_and_what_is_no_news_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Word] = []

    def hear(host: SessionHost, process: Any, word: Word) -> None:
        heard.append(word)
        heard_by_host(host, process, word)

    heard_by_host = SessionHost._hear
    monkeypatch.setattr(SessionHost, "_hear", hear)

    async def test(router: Router) -> None:
        heard.clear()
        router.change(0, 0)
        waits = await router.waiting(0, A)
        router.change(0, 0)
        await router.waiting(1, B)
        router.change(0, 50)
        await waits
        told = [word for word in heard if isinstance(word, Pools)]
        assert told == [
            Pools(model, tokens, "") for tokens, model in ((0, 0), (0, 1), (0, 0), (0, 1), (50, 0), (50, 1))
        ]

    in_router(test)


def test_a_long_reason_why_nothing_may_be_served_ends_no_link() -> None:
    async def test(router: Router) -> None:
        router.change(0, 0, problem="not ready: its links are not up; " * 5000)
        waits = await router.waiting(0, A)
        await router.until(lambda: waits.done() or router.host._problem(0) is not None)
        router.change(50, 50)
        await waits

    in_router(test)


def test_a_client_that_leaves_keeps_its_place_for_a_while() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, TERMS, LONG_S)
        waits, behind = await router.waiting(1, B), await router.waiting(0, C)
        waits.cancel()
        await router.until(lambda: router.host.desk.doors[0].num_calls == 1)
        assert router.place(B) == 1
        router.now_s += TICKET_S + 1
        with router.links[0].request(0, A):
            pass
        assert await router.links[0].close(A)
        await behind

    in_router(test)


def test_refusals_are_told_as_they_are() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        await first.open(A, TERMS, LONG_S)
        with pytest.raises(Unavailable, match="number 1 in line") as given_up:
            await second.open(B, TERMS, 0.001)
        assert given_up.value.retry_after_s > 1
        router.change(0, 0, problem="no worker is ready")
        await router.until(lambda: router.host._problem(0) is not None and not router.host._capacity(0))
        with pytest.raises(Unavailable, match="no worker is ready"):
            await second.open(B, TERMS, 0.01)
        with pytest.raises(InvalidRequest, match="open already") as refused:
            await second.open(A, replace(TERMS, idle_s=9.0), LONG_S)
        assert refused.value.param == "session_id"
        waits = await router.waiting(0, B)
        latest = await router.waiting(1, B)
        with pytest.raises(Conflict, match="another call"):
            await waits
        for number in range(MAX_OF_OWNER):
            with suppress(Unavailable):
                await first.open(Key("alice", str(number)), TERMS, 1e-6)
        with pytest.raises(Overloaded, match="of yours"):
            await first.open(Key("alice", "more"), TERMS, LONG_S)
        latest.cancel()

    in_router(test)


async def serve(link: SessionLink, name: str, new: Sequence[int], output: Sequence[int], **follow: Any) -> list[int]:
    """Serve a turn at a process; return its whole prompt."""
    async with link.turn(0, "", Follow("a", **follow), name) as turn:
        prompt = [*turn.before, *new]
        turn.on_output(output)
        await turn.ended(prompt)
    return prompt


def test_a_turn_goes_on_behind_another_whichever_processes_serve_them() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        await first.open(A, replace(TERMS, expected_tokens=0), 0.0)
        assert await serve(first, "x", [1, 2], [3]) == [1, 2]
        assert await serve(second, "y", [4], [5], rid="x") == [1, 2, 3, 4]
        await router.kill(1)  # it takes nothing along
        assert await serve(first, "z", [6], [], rid="y", offset=-1) == [1, 2, 3, 4, 6]
        assert await serve(first, "x", [7], [], replace=True) == [7]
        with pytest.raises(InvalidRequest, match="no turn 'y'") as refused:
            await serve(first, "q", [], [], rid="y")
        assert refused.value.param == "session_params.rid"
        assert await first.close(A)
        with pytest.raises(InvalidRequest, match="no session 'a'"):
            await serve(first, "q", [], [])

    in_router(test)


def test_the_longest_turn_that_a_session_has_room_for_is_kept_and_read_at_another_process() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        await first.open(A, Terms(MAX_TOKENS, 600.0), 0.0)
        whole = range(MAX_TOKENS)
        await serve(first, "x", whole[:-1], whole[-1:])
        await serve(second, "y", whole, [1])  # nobody has room for it
        async with second.turn(0, "", Follow("a", "x"), "z") as turn:
            assert turn.before == array(TOKEN_TYPE, whole)
        with pytest.raises(InvalidRequest, match="no turn 'y'"):
            await serve(second, "z", [], [], rid="y")

    in_router(test)


def test_a_turn_that_fails_or_whose_process_dies_is_not_kept_and_leaves_nothing_behind() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, replace(TERMS, expected_tokens=0), 0.0)
        with pytest.raises(ZeroDivisionError):
            async with router.links[0].turn(0, "", Follow("a"), "x"):
                raise ZeroDivisionError
        process = router.host._processes[0]
        await router.until(lambda: not process._turns)
        turn = router.links[1].turn(0, "", Follow("a"), "x")
        await turn.__aenter__()
        await router.kill(1)
        await turn.__aexit__(None, None, None)
        assert await serve(router.links[0], "x", [1], []) == [1], "the name is free"

    in_router(test)


def test_a_turn_whose_client_leaves_in_the_moment_in_which_it_begins_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(router: Router) -> None:
        link, hear = router.links[0], router.links[0]._hear
        await link.open(A, replace(TERMS, expected_tokens=0), 0.0)
        clients: list[asyncio.Task[Any]] = []

        def hear_and_leave(word: Word) -> None:
            hear(word)
            for client in clients:
                client.cancel()

        monkeypatch.setattr(link, "_hear", hear_and_leave)
        await link.close(B)  # the link hears so from its next word on
        begins = asyncio.ensure_future(serve(link, "x", [1], []))
        clients.append(begins)
        with pytest.raises(asyncio.CancelledError):
            await begins
        process = router.host._processes[0]
        await router.until(lambda: not process._turns)

    in_router(test)


def test_a_session_is_not_unused_while_a_turn_of_it_runs_at_any_process() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        await first.open(A, replace(TERMS, expected_tokens=0), 0.0)
        async with first.turn(0, "", Follow("a"), "x") as turn:
            router.now_s = TERMS.idle_s + 1
            assert await serve(second, "y", [1], []) == [1]
            await turn.ended([1, 2])
        router.now_s += TERMS.idle_s - 1
        dies = second.turn(0, "", Follow("a", "x"), "z")
        assert list((await dies.__aenter__()).before) == [1, 2]
        await router.kill(1)
        await dies.__aexit__(None, None, None)
        router.now_s += TERMS.idle_s + 1
        with pytest.raises(InvalidRequest, match="not used for too long"):
            await serve(first, "q", [], [])

    in_router(test)


def test_what_is_too_long_to_be_read_is_not_said_and_ends_no_link() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, replace(TERMS, expected_tokens=0), 0.0)
        with pytest.raises(ValueError, match="a word of"):
            await serve(router.links[0], "x", [1], [], rid="x" * MAX_BYTES)
        assert not router.links[0]._calls
        with pytest.raises(InternalError):  # the refusal names it, in more characters than it has
            await serve(router.links[0], "x", [1], [], rid="\U000e0001" * (MAX_BYTES // 5))
        assert await serve(router.links[0], "x", [1], []) == [1]

    in_router(test)


def test_a_turn_whose_parent_ends_before_it_is_answered_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, replace(TERMS, expected_tokens=0), 0.0)
        async with router.links[0].turn(0, "", Follow("a"), "x") as turn:
            await router.kill(0)
            await turn.ended([1])
        with pytest.raises(Unavailable, match=ENDS):
            await serve(router.links[0], "y", [], [])

    in_router(test)
    assert "a turn of a session is not kept: the processes of this router end" in caplog.text


def test_a_router_that_leaves_lets_nobody_wait() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, TERMS, LONG_S)
        waits = await router.waiting(1, B)
        router.links[1].leave()
        with pytest.raises(Unavailable, match="another one"):
            await waits
        with pytest.raises(Unavailable, match="another one"):
            await router.links[1].open(C, TERMS, LONG_S)
        await router.until(lambda: router.host.desk.doors[0].num_calls == 0)
        assert router.place(B) == 1

    in_router(test)


def test_a_router_that_leaves_ends_no_turn_and_no_close_that_is_on_its_way() -> None:
    async def test(router: Router) -> None:
        first, second = router.links
        for key in (A, B):
            await first.open(key, replace(TERMS, expected_tokens=0), 0.0)
        on_their_way = asyncio.gather(serve(first, "x", [1], []), first.close(B))
        await asyncio.sleep(0)
        first.leave()
        prompt, was_open = await on_their_way
        assert (prompt, was_open) == ([1], True)
        assert await serve(second, "y", [], [], rid="x") == [1]

    in_router(test)


def test_a_router_that_leaves_uses_and_closes_what_is_open() -> None:
    async def test(router: Router) -> None:
        await router.links[0].open(A, TERMS, LONG_S)
        for link in router.links:
            link.leave()
        with router.links[1].request(0, A) as context:
            context.num_tokens = 20
        await router.until(lambda: router.num_tokens() == 30)
        assert await router.links[1].close(A)

    in_router(test)


def in_uvloop(test: Coroutine[Any, Any, None]) -> None:
    """As routers run: there it is an error to write to what is closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)


def test_a_process_whose_parent_is_gone_keeps_nothing_to_tell() -> None:
    async def test() -> None:
        its, parent = socket.socketpair()
        link = SessionLink(its, [])
        running = asyncio.ensure_future(link.run())
        await asyncio.sleep(0)
        with link.request(0, A):
            parent.close()
            await running
        for _ in range(3):
            with link.request(0, A):
                await asyncio.sleep(0)
        assert link._unsent == []

    in_uvloop(test())


def test_what_is_said_to_a_process_that_has_just_gone_is_dropped() -> None:
    """The parent hears of its end later than its end of the sockets is closed, and may have counted meanwhile."""

    async def test() -> None:
        own, its = socket.socketpair()
        host = SessionHost(1)
        serving = asyncio.ensure_future(host.serve(0, own))
        for _ in range(5):
            await asyncio.sleep(0)
        process = host._processes[0]
        its.close()
        await serving
        await asyncio.sleep(0)
        process.say(Uncounted())

    in_uvloop(test())


def test_a_process_that_cannot_be_understood_loses_its_part_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        own, its = socket.socketpair()
        host = SessionHost(1)
        its.sendall(encoded(Come(1, "", "a", 0)) + b"\xff" * (1 << 17))
        await host.serve(0, own)
        assert host._processes == {}
        its.close()

    asyncio.run(test())
    assert "process 0 has no part in the line of sessions any more" in caplog.text


def test_one_process_shows_what_all_have_counted() -> None:
    def shown(link: SessionLink) -> Sequence[float]:
        return [each.samples[0].value for each in SessionLineUsage(link).collect()]

    async def test(router: Router) -> None:
        await router.links[1].open(A, TERMS, LONG_S)
        await router.until(lambda: shown(router.links[0])[1:5] == [1, 100, 200, 1])
        assert shown(router.links[1]) == []
        await router.kill(0)
        await router.until(lambda: shown(router.links[1])[1:5] == [1, 100, 100, 1])
        first = router.start(0)
        await router.until(lambda: shown(first)[1:4] == [1, 100, 200])
        await router.until(lambda: shown(router.links[1]) == [])

    in_router(test, look_s=0.001)


def test_a_parent_that_does_not_answer_makes_no_request_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_link, "ANSWER_S", 0.01)
    monkeypatch.setattr(session_link, "MAX_UNSENT_BYTES", 1 << 12)

    async def test() -> None:
        its, parent = socket.socketpair()
        link = SessionLink(its, [])
        running = asyncio.ensure_future(link.run())
        with pytest.raises(Unavailable, match="does not answer"):
            await link.open(A, TERMS, 0.001)
        for _ in range(200):
            for _ in range(100):
                with link.request(0, Key("alice", "s" * 100)):
                    pass
            await asyncio.sleep(0)
        for _ in range(9):
            await link._keep(1, array(TOKEN_TYPE, range(1000)), array(TOKEN_TYPE))
        assert link._num_unsent < 1 << 16, "what is not read is bounded"
        parent.close()
        await running
        with pytest.raises(Unavailable, match=ENDS):
            await link.close(A)

    asyncio.run(test())


WORDS: Sequence[Word] = (
    Open(1, "alice", 'a\n"ü', 9, 1.5, 3, 1, 0.5),
    Leave(1),
    Close(2, "", "a"),
    Come(3, "", "a", 0),
    Go(3, 7),
    Begin(4, 1, "", "a", "x", -1, True, False, "y"),
    Keep(5, 4, 2, b"\n12345678\n"),
    Pools(0, 100, "none\nis ready"),
    Answer(1, True),
    Answer(1, True, tokens=b"\n\0\0\0"),
    Uncounted(),
    Counted(1, 2, 3, 4, 5, 6, 7, 8.5),
)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_a_word_is_read_as_it_was_said_and_no_more_than_it(word: Word) -> None:
    async def read() -> tuple[Word, Word]:
        reader = asyncio.StreamReader()
        reader.feed_data(encoded(word) + encoded(Leave(1)))
        return await read_word(reader), await read_word(reader)

    found, next_one = asyncio.run(read())
    assert (type(found), found, next_one) == (type(word), word, Leave(1))


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("a", retry_after_s=5),
        Overloaded("b", retry_after_s=2),
        InvalidRequest("c", param="p"),
        Conflict("d"),
        InternalError("e"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_is_the_same_on_the_other_side(error: Exception) -> None:
    found = failure_in(failed(1, error))  # type: ignore[arg-type]
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
