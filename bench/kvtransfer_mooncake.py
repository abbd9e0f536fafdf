"""Mooncake's transfer engine in `kvtransfer.py`: its TCP transport, the only one between host memories without RDMA."""

from __future__ import annotations

import os
from typing import Any, Final

import kvtransfer_rival

BATCH_PIECES: Final = 128  # its queue takes no more of a batch than some hundreds


class MooncakeEnd:
    def __init__(self, transports: str, memory: Any, *, is_target: bool) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found, unused-ignore]

        self._memory = memory
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit("Mooncake's transfer engine did not start")
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
            raise SystemExit("Mooncake's transfer engine registered nothing")
        self._peer = ""
        self._base = 0

    def address(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._memory.ctypes.data

    def connect(self, address: Any) -> None:
        self._peer, self._base = address

    def write(self, src: Any, dst: Any, nbytes: int) -> None:
        ours, theirs = (src + self._memory.ctypes.data).tolist(), (dst + self._base).tolist()
        for first in range(0, len(ours), BATCH_PIECES):
            some = slice(first, first + BATCH_PIECES)
            lengths = [nbytes] * len(ours[some])
            status = self._engine.batch_transfer_sync_write(self._peer, ours[some], theirs[some], lengths)
            if status != 0:
                raise RuntimeError(f"a batch failed with {status}")

    def poll(self) -> None:
        """Its own threads do that."""


if __name__ == "__main__":
    kvtransfer_rival.main(MooncakeEnd)
