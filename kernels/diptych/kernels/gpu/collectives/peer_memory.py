"""Memory of a GPU that processes of the same host open to each other: CUDA's IPC handles, by the driver's own calls.

As the transfer engine opens pages (`kvtransfer/ucx/shim/device`). Torch's allocator is left alone: a handle opens a
whole allocation, and those of torch hold other things, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

DRIVER: Final = "libcuda.so.1"
HANDLE_NBYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_NATIVE_ATOMICS: Final = 3  # an attribute of two devices


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * HANDLE_NBYTES),)


class _Described:
    def __init__(self, described: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = described


class PeerMemoryError(Exception):
    """The driver refused; the message says what, and why."""


class PeerMemory:
    """Memory of the current GPU, zeros at first, and that of peers once they have been opened."""

    def __init__(self, nbytes: int) -> None:
        """Allocate it. Raises `PeerMemoryError`."""
        self._driver = ctypes.CDLL(DRIVER)
        self._opened: list[int] = []
        torch.cuda.synchronize()  # the context of the current GPU is there, and current
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address = address.value
        self.nbytes = nbytes
        try:
            self.handle = self._shown(address)  # for the others
        except PeerMemoryError:
            self._call("cuMemFree_v2", address)
            raise

    def _shown(self, address: ctypes.c_uint64) -> bytes:
        """Fill it with zeros; return its handle."""
        handle = _Handle()
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(self.nbytes))
        self._call("cuCtxSynchronize")
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.content)

    def tensor(self) -> torch.Tensor:
        """Return it as bytes; it must outlive the tensor."""
        described = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        return torch.as_tensor(_Described(described), device=torch.device("cuda", torch.cuda.current_device()))

    def open(self, handle: bytes) -> int:
        """Return the address at which another process's memory is ours to write from now on."""
        address, theirs = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._opened.append(address.value)
        return address.value

    def addresses(self, rank: int, handles: Sequence[bytes]) -> list[int]:
        """Open the memory of all ranks but `rank`, which is ours; return where each one's is."""
        return [self.address if each == rank else self.open(handle) for each, handle in enumerate(handles)]

    def close_peers(self) -> None:
        """Give up the peers' memory. No kernel may use it any more."""
        torch.cuda.synchronize()
        for address in self._opened:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._opened.clear()

    def close(self) -> None:
        """Give up ours, too. Peers have closed it, and no kernel uses it any more."""
        self.close_peers()
        self._call("cuMemFree_v2", ctypes.c_uint64(self.address))

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._driver, name, getattr(self._driver, name)(*arguments))


def has_native_atomics(device: int, peer: int) -> bool:
    """Return whether a kernel on GPU `device` may store to GPU `peer` and change its flags: by NVLink, as a rule."""
    if not torch.cuda.can_device_access_peer(device, peer):
        return False
    driver, value = ctypes.CDLL(DRIVER), ctypes.c_int()
    code = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer)
    _check(driver, "cuDeviceGetP2PAttribute", code)
    return value.value == 1


def _check(driver: ctypes.CDLL, name: str, code: int) -> None:
    if code:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(words))
        raise PeerMemoryError(f"{name}: {(words.value or b'error %d' % code).decode()}")
