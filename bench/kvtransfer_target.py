"""The process that `kvtransfer.py` writes to: echoes notes, and answers commands on a socket of its own.

The socket also carries the raw TCP stream and round trip that the TCP cases are measured against.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.kvtransfer.layout import PoolLayout, layout_from_wire, layout_to_wire
from diptych.kvtransfer.transport import NoteReceived, OpDone
from diptych.kvtransfer.ucx import UcxOptions, UcxTransport, open_transport
from diptych.v1.bootstrap_pb2 import KvLayout

STREAM_CHUNK = 256 << 10
COMMAND_NBYTES = 64 << 10  # of a command read at once


class Target:
    """The other process, as the initiator sees it."""

    def __init__(self, transports: str, layout: PoolLayout, peer_metadata: bytes) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            setup = {
                "port": listener.getsockname()[1],
                "transports": transports,
                "layout": layout_to_wire(layout).SerializeToString().hex(),
                "peer_metadata": peer_metadata.hex(),
            }
            self._process = subprocess.Popen([sys.executable, __file__, json.dumps(setup)])
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("r")
        self.metadata = bytes.fromhex(self._answer())

    def digest(self, pages: npt.NDArray[np.int64]) -> int:
        return int(self._ask("digest", pages=pages.tolist()))

    def cpu_s(self) -> float:
        return float(self._ask("cpu"))

    def raw_stream(self, nbytes: int) -> float:
        """Send so many bytes down the socket; return the seconds until the target had them all.

        Both sides use one buffer over and over, as iperf does: nothing is faster, and nothing is delivered anywhere.
        """
        chunk = memoryview(bytearray(STREAM_CHUNK))
        self._ask("stream", nbytes=nbytes)
        began = time.perf_counter()
        for sent in range(0, nbytes, STREAM_CHUNK):
            self._socket.sendall(chunk[: nbytes - sent])
        self._answer()
        return time.perf_counter() - began

    def raw_ping(self) -> float:
        """Return the seconds of one short line there and back."""
        began = time.perf_counter()
        self._ask("ping")
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()
        self._process.wait(10)

    def _ask(self, do: str, **fields: Any) -> Any:
        self._socket.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        return json.loads(self._lines.readline())


class Server:
    """The target process itself."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", setup["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport: UcxTransport = open_transport(2, options=UcxOptions(transports=setup["transports"]))
        self._pool = self._transport.allocate_pool(_layout(bytes.fromhex(setup["layout"])))
        self._sink = memoryview(bytearray(STREAM_CHUNK))
        self._transport.connect(1, bytes.fromhex(setup["peer_metadata"]))
        self._answer(self._transport.metadata().hex())

    def run(self) -> None:
        """Serve until the initiator hangs up."""
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        line = b""
        while True:
            for fd, _ in poller.poll():
                if fd == self._transport.fileno():
                    self._echo_notes()
                    continue
                data = self._socket.recv(COMMAND_NBYTES)
                if not data:
                    return self._transport.close()
                line += data
                if line.endswith(b"\n"):
                    self._obey(json.loads(line))
                    line = b""

    def _echo_notes(self) -> None:
        for event in self._transport.poll():
            if isinstance(event, NoteReceived):
                self._transport.send_note(event.peer, event.data)

    def _obey(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "ping":
                self._answer(None)
            case "cpu":
                self._answer(time.process_time())
            case "digest":
                self._answer(self._digest(np.array(command["pages"])))
            case "stream":
                self._answer(None)
                self._receive(command["nbytes"])
                self._answer(None)

    def _digest(self, pages: npt.NDArray[np.int64]) -> int | None:
        operation = self._transport.digest_pages(pages)
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        while True:
            poller.poll()
            for event in self._transport.poll():
                if isinstance(event, OpDone) and event.op == operation:
                    return event.digest

    def _receive(self, nbytes: int) -> None:
        taken = 0
        while taken < nbytes:
            taken += self._socket.recv_into(self._sink[: nbytes - taken])

    def _answer(self, answer: Any) -> None:
        self._socket.sendall(json.dumps(answer).encode() + b"\n")


def _layout(wire: bytes) -> PoolLayout:
    return layout_from_wire(KvLayout.FromString(wire))


if __name__ == "__main__":
    Server(json.loads(sys.argv[1])).run()
