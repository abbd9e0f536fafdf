"""The NIXL agent of this process, with its errors mapped, and how NIXL is found. Every call on one thread."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from diptych.common.errors import ConfigError
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.lanes import Transports
from diptych.kvtransfer.ucx.options import ucx_settings

PATH_VARIABLE: Final = "DIPTYCH_NIXL_PATH"  # a folder that packages were installed into, beside those of Python
PACKAGES: Final = {"nixl_cu13": "nixl-cu13", "nixl_cu12": "nixl-cu12", "nixl": "nixl"}  # module: distribution
LOCAL: Final = "NIXL_INIT_AGENT"
_SHARED_MEMORY: Final = "sysv,posix,cma,self"  # only cma can put where UCX has not allocated
_EARLY: Final = {
    "NIXL_LOG_LEVEL": "FATAL",  # a dead peer is an event of ours, not several errors of NIXL's
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",  # signal handlers are the program's
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_MEMORY: Final = "DRAM"
_BACKEND: Final = "UCX"

Indices = npt.NDArray[np.integer[Any]]


class Agent:
    """Named after its instance. Handles are NIXL's own objects."""

    def __init__(self, name: str, transports: Transports) -> None:
        api, self.version = load(transports)
        # NIXL's progress thread would spin, on a core of its own; polling moves things as well
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND]))
        if _BACKEND not in self._agent.backends:
            raise TransferError(f"{self.version} has no usable {_BACKEND} plugin; it has {self._agent.plugin_list}")

    def register(self, address: int, nbytes: int) -> None:
        self._call(self._agent.register_memory, [(address, nbytes, 0, "")], _MEMORY)

    def metadata(self) -> bytes:
        data: bytes = self._call(self._agent.get_agent_metadata)
        return data

    def add(self, metadata: bytes) -> str:
        """Know a peer; return its name."""
        name = self._call(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Close the connection to a peer."""
        self._call(self._agent.remove_remote_agent, name)

    def prepare(self, name: str, address: int, nbytes: int, stride: int, count: int) -> Any:
        """Return a handle of `count` pieces of memory of a peer, or of ours (`LOCAL`)."""
        pieces = np.array([[address, nbytes, 0, stride, count]], dtype=np.uint64)
        return self._call(self._agent.prep_xfer_dlist, name, pieces, _MEMORY)

    def write(self, ours: Any, src: Indices, theirs: Any, dst: Indices) -> Any:
        """Begin to copy pieces; return a handle."""
        chosen = (np.ascontiguousarray(each, dtype=np.int32) for each in (src, dst))
        handle = self._call(self._agent.make_prepped_xfer, "WRITE", ours, next(chosen), theirs, next(chosen))
        if self._call(self._agent.transfer, handle) == "ERR":
            raise TransferError("NIXL refused a transfer")
        return handle

    def is_complete(self, handle: Any) -> bool:
        """Whether the peer has all of it. Raises `TransferError` when it failed."""
        state = self._call(self._agent.check_xfer_state, handle)
        if state == "ERR":
            raise TransferError("a transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        self._call(handle.release)

    def send(self, name: str, data: bytes) -> None:
        self._call(self._agent.send_notif, name, data)

    def receive(self) -> list[bytes]:
        """Return what came since the last call; moves everything else on, too."""
        return [data for some in self._call(self._agent.get_new_notifs).values() for data in some]

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:  # NIXL's errors have no base of their own
            raise TransferError(f"{type(error).__name__}: {error}") from error


def load(transports: Transports) -> tuple[Any, str]:
    """Return NIXL's API and its version. Raises `ConfigError` that says how to get it.

    Once a process, and not beside another UCX: NIXL brings its own.
    """
    os.environ.update(environment(transports, os.environ))
    folder = os.environ.get(PATH_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    tried = []
    for module, distribution in PACKAGES.items():
        try:
            api = importlib.import_module(f"{module}._api")
            return api, f"NIXL {version(distribution)}"
        except (ImportError, PackageNotFoundError) as error:
            tried.append(f"{module}: {error}")
    raise ConfigError(f"no usable NIXL ({'; '.join(tried)}): `pip install --no-deps nixl-cu13`, or --kv-backend ucx")


def environment(transports: Transports, present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before NIXL is loaded: its plugins take no other settings."""
    wanted = {f"UCX_{name}": value for name, value in ucx_settings(transports, present).items()}
    if transports == "shm":
        wanted["UCX_TLS"] = _SHARED_MEMORY
    return {name: value for name, value in _EARLY.items() if name not in present} | wanted
