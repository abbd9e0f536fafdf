"""UCX's own round trip of a small message, without anything of ours: what the notes of the transfer engine are held against.

Two processes, each asleep on UCX's event descriptor while it waits. Runs alone: `python bench/ucx_ping.py`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from diptych.common.native import build_library
from diptych.kvtransfer.ucx import loader

TRANSPORTS: Final = {"shm": "sysv,posix,self", "tcp": "tcp,self"}
MESSAGE_NBYTES: Final = 64


def ping_s(name: str, rounds: int) -> float:
    """Return the median of round trips between two new processes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        processes = [_start(name, end, rounds, begins) for begins, end in ((1, ours), (0, theirs))]
    answers = [process.communicate(timeout=60)[0] for process in processes]
    return float(answers[0])


def _start(name: str, end: socket.socket, rounds: int, begins: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, name, str(end.fileno()), str(begins), str(rounds)]
    return subprocess.Popen(command, pass_fds=[end.fileno()], stdout=subprocess.PIPE, text=True)


def _play(name: str, descriptor: int, begins: int, rounds: int) -> None:
    """Be one of the two processes."""
    headers = loader.include_folder(loader.load())
    library = ctypes.CDLL(str(build_library(Path(__file__).with_name("ucx_ping.c"), include_dirs=[headers])))
    library.ucx_ping.restype = ctypes.c_double
    library.ucx_ping.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    print(library.ucx_ping(TRANSPORTS[name].encode(), descriptor, begins, rounds, MESSAGE_NBYTES), flush=True)
    os._exit(0)  # UCX's own end is not what is measured


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _play(sys.argv[1], *map(int, sys.argv[2:]))
    for name in TRANSPORTS:
        print(f"{name}: {ping_s(name, 2000) * 1e6:.1f} us")
