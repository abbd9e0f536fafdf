"""Receives for `diptych bench kv`: links to every peer that asks, echoes notes, digests pages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np

from diptych.cli.requests.bench_pool import open_bench
from diptych.common.net import rpc
from diptych.common.net.reachable import bracketed
from diptych.common.refusals import Refusals
from diptych.common.trust.trust import Trust
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.pool import HostPool
from diptych.kvtransfer.transport import LinkDown, LinkUp, NoteReceived, OpDone, Transport
from diptych.v1 import bench_pb2, bench_pb2_grpc


class BenchService(bench_pb2_grpc.KvBenchServicer):
    """Implements `diptych.v1.KvBench`. `read` must be called whenever the transport has events."""

    def __init__(self, transport: Transport, pool: HostPool) -> None:
        self._transport = transport
        self._pool = pool
        self._digests: dict[int, asyncio.Future[OpDone]] = {}

    async def Join(self, request: bench_pb2.BenchPeer, context: Any) -> bench_pb2.BenchPeer:
        try:
            self._transport.connect(request.instance_id, request.engine_metadata)
        except TransferError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return bench_pb2.BenchPeer(
            instance_id=self._transport.instance_id,
            engine_metadata=self._transport.metadata(),
            num_pages=self._pool.layout.num_pages,
        )

    async def Digest(self, request: bench_pb2.BenchPages, context: Any) -> bench_pb2.BenchDigest:
        try:
            operation = self._transport.digest_pages(np.array(request.pages, dtype=np.int64))
        except TransferError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._digests[operation] = asyncio.get_running_loop().create_future()
        done = await self._digests[operation]
        return bench_pb2.BenchDigest(digest=done.digest or 0)

    def read(self) -> None:
        for event in self._transport.poll():
            match event:
                case LinkUp(peer):
                    print(f"linked to {peer:016x}: {self._transport.describe(peer)}", flush=True)
                case LinkDown(peer, reason):
                    print(f"link to {peer:016x} is down: {reason}", flush=True)
                case NoteReceived(peer, data):
                    self._transport.send_note(peer, data)
                case OpDone(operation) if operation in self._digests:
                    self._digests.pop(operation).set_result(event)


async def serve(host: str, port: int, trust: Trust, pool_mib: int, transports: Transports, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    transport, pool = open_bench(pool_mib, transports)
    service = BenchService(transport, pool)
    server = rpc.new_server(trust, Refusals())
    bench_pb2_grpc.add_KvBenchServicer_to_server(service, server)
    bound = rpc.listen(server, host, port, trust)
    asyncio.get_running_loop().add_reader(transport.fileno(), service.read)
    try:
        await server.start()
        print(f"ready: diptych bench kv --peer {bracketed(host)}:{bound}", flush=True)
        await stop.wait()
    finally:
        asyncio.get_running_loop().remove_reader(transport.fileno())
        await server.stop(grace=0)
        transport.close()
