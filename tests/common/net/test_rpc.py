"""Who may call what, and who may not, with a token: real servers, real services."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from guarded_server import (
    INSTANCE,
    KNOWS_ALL,
    METHODS,
    OURS,
    THEIRS,
    TIMEOUT_S,
    call_of,
    cancel,
    code_of,
    count,
    first,
    one_of,
    run,
    serving,
    silent,
    watch,
)

from diptych.common.members.membership_client import Evicted, MembershipWatcher, Registration
from diptych.common.net.rpc import MAX_MESSAGE_BYTES, open_channel, open_sync_channel
from diptych.common.refusals import Refusals
from diptych.common.trust.gatekeeper import NUM_PLACES
from diptych.common.trust.instance_secret import InstanceSecret, shown
from diptych.common.trust.trust import INSECURE, Trust
from diptych.common.verdicts.permissions import Party, may_call, words_for
from diptych.v1 import bootstrap_pb2, bootstrap_pb2_grpc, worker_pb2, worker_pb2_grpc

REGISTER, WATCH = "/diptych.v1.Bootstrap/Register", "/diptych.v1.Bootstrap/Watch"
SESSION = "/diptych.v1.Worker/Session"
SERVED = (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)  # by a worker without an instance


@pytest.mark.parametrize(
    ("stranger", "reason", "words"),
    [
        (INSECURE, "no_token", "no token: give --auth-token-file or set DIPTYCH_AUTH_TOKEN"),
        (THEIRS, "wrong_token", "wrong token: compare --auth-token-file or DIPTYCH_AUTH_TOKEN"),
    ],
    ids=["no token", "wrong token"],
)
def test_who_does_not_know_the_token_can_do_nothing(stranger: Trust, reason: str, words: str) -> None:
    assert {"/diptych.v1.Bootstrap/Register", "/diptych.v1.Worker/Session", "/diptych.v1.WorkerAdmin/Drain"} < METHODS

    async def test() -> None:
        refusals = Refusals()
        async with serving(OURS, refusals) as address:
            for method in [*METHODS, "/diptych.v1.Worker/NotThere"]:
                before = count(refusals, reason)
                code, details = await code_of(call_of(method), address, stranger)
                assert (code, details.startswith(words)) == (grpc.StatusCode.UNAUTHENTICATED, True), method
                assert count(refusals, reason) > before  # by more than one when the call was made again
            assert (await code_of(status, address, stranger))[0] is grpc.StatusCode.UNAUTHENTICATED

    run(test)


@pytest.mark.parametrize("party", Party)
def test_a_token_of_one_party_is_for_what_that_party_may_call(party: Party) -> None:
    async def test() -> None:
        refusals = Refusals()
        async with serving(KNOWS_ALL, refusals, own_host="10.0.0.1") as address:
            for method in sorted(METHODS - {REGISTER, SESSION, WATCH}):
                before = count(refusals, "not_permitted")
                code, words = await code_of(call_of(method, b""), address, one_of(party))
                is_refused = count(refusals, "not_permitted") > before  # more than once when the call was made again
                assert is_refused is not may_call(frozenset({party}), method)
                if is_refused:
                    assert (code, words) == (
                        grpc.StatusCode.PERMISSION_DENIED,
                        words_for(frozenset({party}), method),
                    )
                else:
                    assert code in SERVED
            session = (await code_of(call_of(SESSION, b""), address, one_of(party)))[0]
            assert (session is grpc.StatusCode.PERMISSION_DENIED) == (party is not Party.ROUTER)

    run(test)


def test_a_worker_is_drained_with_its_own_token_from_its_own_host_only() -> None:
    async def test() -> None:
        for own_host, is_served in (("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("", False)):
            async with serving(KNOWS_ALL, own_host=own_host) as address:
                for drain in ("/diptych.v1.WorkerAdmin/Drain", "/diptych.v1.Worker/GetStatus"):
                    code, _ = await code_of(call_of(drain, b""), address, one_of(Party.WORKER))
                    assert (code in SERVED, code is grpc.StatusCode.PERMISSION_DENIED) == (is_served, not is_served)
                update = await code_of(call_of("/diptych.v1.WorkerAdmin/SetRole", b""), address, one_of(Party.WORKER))
                assert update[0] is grpc.StatusCode.PERMISSION_DENIED

    run(test)


def test_who_knows_the_token_is_served_on_channels_of_both_kinds() -> None:
    async def test() -> None:
        async with serving(OURS) as address:
            assert await code_of(watch, address, OURS) == (grpc.StatusCode.OK, "")
            snapshot = await asyncio.to_thread(watch_from_a_thread, address, OURS)
            assert (snapshot.revision, snapshot.snapshot) == (1, True)

    run(test)


def status(channel: grpc.aio.Channel) -> Awaitable[Any]:
    """A call of one message and one answer."""
    call: Awaitable[Any] = worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.StatusRequest())
    return call


def watch_from_a_thread(address: str, trust: Trust) -> Any:
    with open_sync_channel(address, trust) as channel:
        updates = bootstrap_pb2_grpc.BootstrapStub(channel).Watch(bootstrap_pb2.WatchRequest(), timeout=TIMEOUT_S)
        update = next(updates)
        updates.cancel()
        return update


def test_health_is_told_to_everybody_who_asks_and_does_not_stay() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, INSECURE) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="no token"):
                await first(watching)

    run(test)


def test_calls_of_strangers_that_send_nothing_give_way_to_others() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, INSECURE) as channel:
            check = channel.stream_stream("/grpc.health.v1.Health/Check", bytes, bytes)
            calls = [check(silent()) for _ in range(NUM_PLACES)]
            health = health_pb2_grpc.HealthStub(channel)
            ends = [asyncio.ensure_future(first(call)) for call in calls]
            while not any(end.done() for end in ends):  # not all of them have reached the server yet
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            (displaced,) = (end for end in ends if end.done())
            with pytest.raises(grpc.aio.AioRpcError, match="others came since"):
                displaced.result()
            await cancel([end for end in ends if not end.done()])

    run(test)


def test_a_stranger_writes_no_stack_trace_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, INSECURE) as channel:
            for message in (b"\xff\xff", b"\x0a\x7f"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(message)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)
    assert "raised by servicer method" not in caplog.text


def test_a_message_that_is_too_long_ends_its_call_and_unknown_fields_end_none() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, OURS) as channel:
            watch = channel.unary_stream("/diptych.v1.Bootstrap/Watch", bytes, bytes)
            assert await first(watch(b"\xfa\xff\x01\x04more")), "a field of a later version"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first(watch(bytes(MAX_MESSAGE_BYTES + 1)))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test)


def test_a_call_keeps_the_metadata_that_it_brings_itself() -> None:
    async def test() -> None:
        async with serving(OURS) as address, open_channel(address, OURS) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session(silent(), metadata=(("diptych-instance", "00ff"),))
            with pytest.raises(grpc.aio.AioRpcError, match="no instance 00ff here"):
                await first(call)

    run(test)


def test_a_stranger_is_neither_listed_nor_told_who_is_there() -> None:
    async def test() -> None:
        async with serving(OURS) as address:
            watcher, heard = MembershipWatcher([address], OURS), asyncio.Event()
            watcher.add_listener(heard.set)
            stranger = replace_id(2)
            registrations = (
                Registration([address], THEIRS, lambda: stranger),
                Registration([address], OURS, lambda: INSTANCE),
            )
            blind = MembershipWatcher([address], INSECURE)
            tasks = [asyncio.ensure_future(each.run()) for each in (watcher, blind, *registrations)]
            await heard.wait()
            assert (watcher.instances(), blind.instances()) == ({1: watcher.instances()[1]}, {})
            await cancel(tasks)

    run(test)


def replace_id(instance_id: int) -> bootstrap_pb2.Instance:
    other = bootstrap_pb2.Instance()
    other.CopyFrom(INSTANCE)
    other.instance_id, other.address = instance_id, f"a:{instance_id}"
    return other


class Member:
    """An instance with a token of its own party: registers, and follows the others."""

    def __init__(self, address: str, party: Party, role: Any) -> None:
        secret = InstanceSecret.new()
        self.secret, self.instance_id = secret, secret.instance_id
        self.record = replace_id(secret.instance_id)
        self.record.role = role
        self.record.transfer.engine_metadata = b"link key"
        self.registration = Registration([address], one_of(party), lambda: self.record, secret)
        self.watcher = MembershipWatcher([address], one_of(party), instances=[secret])
        self._heard = asyncio.Event()
        self.watcher.add_listener(self._heard.set)

    async def sees(self, everybody: set[int]) -> set[int]:
        """Wait until these are listed; return whose link keys are told."""
        while set(self.watcher.instances()) != everybody:
            self._heard.clear()
            await self._heard.wait()
        return {key for key, each in self.watcher.instances().items() if each.transfer.engine_metadata}


def test_members_with_tokens_of_their_own_find_each_other_and_workers_the_keys_of_their_peers() -> None:
    async def test() -> None:
        async with serving(KNOWS_ALL) as address:
            prefill = Member(address, Party.WORKER, bootstrap_pb2.ROLE_PREFILL)
            decode = Member(address, Party.WORKER, bootstrap_pb2.ROLE_DECODE)
            router = Member(address, Party.ROUTER, bootstrap_pb2.ROLE_ROUTER)
            members = (prefill, decode, router)
            works = [work for each in members for work in (each.registration.run(), each.watcher.run())]
            tasks = [asyncio.ensure_future(work) for work in works]
            everybody = {each.instance_id for each in members}
            workers = {prefill.instance_id, decode.instance_id}
            assert await prefill.sees(everybody) == workers
            assert await decode.sees(everybody) == workers
            assert await router.sees(everybody) == set()
            await cancel(tasks)

    run(test)


@pytest.mark.parametrize(
    ("party", "change", "words"),
    [
        (Party.WORKER, {"role": bootstrap_pb2.ROLE_ROUTER}, "takes the token or certificate of a router"),
        (Party.ROUTER, {}, "takes the token or certificate of a worker"),
        (Party.WORKER, {"state": bootstrap_pb2.INSTANCE_STATE_GONE}, "shows its secret: this is another's"),
        (Party.WORKER, {"started_unix_ns": 2**63}, "shows its secret: this is another's"),
    ],
)
def test_nobody_registers_as_what_it_is_not_nor_speaks_for_another(
    party: Party, change: dict[str, Any], words: str
) -> None:
    async def test() -> None:
        async with serving(KNOWS_ALL) as address:
            victim = Member(address, Party.WORKER, bootstrap_pb2.ROLE_PREFILL)
            tasks = [asyncio.ensure_future(each) for each in (victim.registration.run(), victim.watcher.run())]
            await victim.sees({victim.instance_id})
            forged = bootstrap_pb2.Instance()
            forged.CopyFrom(victim.record)
            forged.MergeFrom(bootstrap_pb2.Instance(**change))
            heartbeat = bootstrap_pb2.Heartbeat(sequence=2**40, instance=forged).SerializeToString()
            code, details = await code_of(call_of(REGISTER, heartbeat), address, one_of(party))
            assert (code, words in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
            assert set(victim.watcher.instances()) == {victim.instance_id}
            await cancel(tasks)

    run(test)


def test_the_address_of_a_living_worker_is_taken_from_its_own_host_only(tmp_path: Path) -> None:
    """Who speaks over the Unix socket speaks from no host."""

    async def test() -> None:
        elsewhere = f"unix:{tmp_path}/socket"
        async with serving(KNOWS_ALL, also_at=elsewhere) as address:
            at_home, away = (Member(address, Party.WORKER, bootstrap_pb2.ROLE_PREFILL) for _ in range(2))
            for each in (at_home, away):
                each.record.address = "127.0.0.1:7100"
            tasks = [asyncio.ensure_future(each) for each in (at_home.registration.run(), at_home.watcher.run())]
            await at_home.sees({at_home.instance_id})
            away.record.started_unix_ns = 2**63
            heartbeat = bootstrap_pb2.Heartbeat(sequence=1, instance=away.record).SerializeToString()

            def register_at(channel: grpc.aio.Channel) -> Awaitable[Any]:
                register = channel.stream_stream(REGISTER, bytes, bootstrap_pb2.HeartbeatReply.FromString)
                return first(register(iter([heartbeat]), metadata=shown([away.secret])))

            code, details = await code_of(register_at, elsewhere, one_of(Party.WORKER))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert details.startswith("address 127.0.0.1:7100 belongs to instance")
            assert set(at_home.watcher.instances()) == {at_home.instance_id}
            assert await code_of(register_at, address, one_of(Party.WORKER)) == (grpc.StatusCode.OK, "")
            with pytest.raises(Evicted):
                await tasks[0]
            await cancel(tasks[1:])

    run(test)
