"""NIXL in `kvtransfer.py`: its UCX plugin, prepared lists, and no thread that polls, as it is fastest on few cores."""

from __future__ import annotations

import os
from typing import Any, Final

import kvtransfer_rival
import numpy as np

BATCH_NBYTES: Final = 16 << 20
LANES: Final = {"shm": {}, "tcp": {"UCX_TLS": "tcp,self"}}  # left alone, it copies between processes of a host


class NixlEnd:
    def __init__(self, transports: str, memory: Any, *, is_target: bool) -> None:
        os.environ |= {"NIXL_LOG_LEVEL": "FATAL", "UCX_WARN_UNUSED_ENV_VARS": "n"} | LANES[transports]
        from nixl_cu13._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found, unused-ignore]

        self._memory = memory
        name = "target" if is_target else "initiator"
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._peer = ""
        self._base = 0
        self._lists: dict[int, tuple[Any, Any]] = {}

    def address(self) -> Any:
        return self._agent.get_agent_metadata().hex(), self._memory.ctypes.data

    def connect(self, address: Any) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(address[0]))
        self._peer, self._base = name.decode() if isinstance(name, bytes) else name, address[1]

    def write(self, src: Any, dst: Any, nbytes: int) -> None:
        if nbytes not in self._lists:
            self._lists[nbytes] = (
                self._prepare("NIXL_INIT_AGENT", self._memory.ctypes.data, nbytes),
                self._prepare(self._peer, self._base, nbytes),
            )
        ours, theirs = self._lists[nbytes]
        pieces, flying = max(1, BATCH_NBYTES // nbytes), []
        for first in range(0, len(src), pieces):
            some = [(each[first : first + pieces] // nbytes).astype(np.int32) for each in (src, dst)]
            handle = self._agent.make_prepped_xfer("WRITE", ours, some[0], theirs, some[1])
            self._agent.transfer(handle)
            flying.append(handle)
        for handle in flying:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                pass
            if state != "DONE":
                raise RuntimeError("a transfer failed")
            self._agent.release_xfer_handle(handle)

    def poll(self) -> None:
        self._agent.get_new_notifs()

    def _prepare(self, name: str, base: int, nbytes: int) -> Any:
        blocks = np.array([[base, nbytes, 0, nbytes, self._memory.nbytes // nbytes]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(name, blocks, "DRAM")


if __name__ == "__main__":
    kvtransfer_rival.main(NixlEnd)
