"""UCX's own round trip of a small message, with nothing of ours: what notes of the transfer engine are held against.

Two processes, each asleep on UCX's event descriptor while it waits; all in C, or called from Python, as our callers
are. Runs alone: `python bench/ucx_ping.py`.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from diptych.common.native import build_library
from diptych.kvtransfer.ucx import loader

TRANSPORTS: Final = {"shm": "sysv,posix,self", "tcp": "tcp,self"}
MESSAGE: Final = b"x" * 64
PAUSE_S: Final = 0.001  # before each round: the other process is asleep by then


class UcxPing:
    """Two processes that play; `language` is "c" or "python"."""

    def __init__(self, transports: str, language: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._answering = _start(transports, language, "answer", theirs)
            self._asking = _start(transports, language, "ask", ours)

    def once(self) -> float:
        """Return the seconds of one round trip, measured by the process that asks."""
        assert self._asking.stdin is not None
        assert self._asking.stdout is not None
        self._asking.stdin.write("\n")
        self._asking.stdin.flush()
        return float(self._asking.stdout.readline())

    def close(self) -> None:
        for process in (self._asking, self._answering):
            process.kill()
            process.communicate()


def _start(transports: str, language: str, part: str, end: socket.socket) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, transports, language, part, str(end.fileno())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, pass_fds=[end.fileno()], stdin=pipe, stdout=pipe, text=True)


class InC:
    """One of the two processes."""

    def __init__(self, transports: str, descriptor: int) -> None:
        headers = loader.include_folder(loader.load())
        built = build_library(Path(__file__).with_suffix(".c"), include_dirs=lambda: [headers])
        self.library: Any = ctypes.CDLL(str(built))
        self.library.ping_open.restype = ctypes.c_void_p
        self.library.ping_once.restype = ctypes.c_double
        self.ready = ctypes.c_int()
        names = TRANSPORTS[transports].encode()
        self.player = ctypes.c_void_p(self.library.ping_open(names, descriptor, ctypes.byref(self.ready)))
        self.message = (ctypes.c_char_p(MESSAGE), ctypes.c_size_t(len(MESSAGE)))

    def answer(self) -> None:
        self.library.ping_answer(self.player, *self.message)

    def once(self) -> float:
        return float(self.library.ping_once(self.player, *self.message))


class InPython(InC):
    """The same, but Python sends and waits."""

    def __init__(self, transports: str, descriptor: int) -> None:
        super().__init__(transports, descriptor)
        self.poller = select.poll()
        self.poller.register(self.ready.value, select.POLLIN)

    def answer(self) -> None:
        while True:
            self.wait()
            self.library.ping_send(self.player, *self.message)

    def once(self) -> float:
        began = time.perf_counter()
        self.library.ping_send(self.player, *self.message)
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        while not self.library.ping_receive(self.player):
            self.poller.poll()


def play(transports: str, language: str, part: str, descriptor: int) -> None:
    """Be one of the two processes, until killed."""
    player = {"c": InC, "python": InPython}[language](transports, descriptor)
    if part == "answer":
        player.answer()
    for _ in sys.stdin:
        time.sleep(PAUSE_S)
        print(player.once(), flush=True)
    os._exit(0)


def main() -> None:
    for transports in TRANSPORTS:
        for language in ("c", "python"):
            ping = UcxPing(transports, language)
            median_us = statistics.median(ping.once() for _ in range(500)) * 1e6
            print(f"{transports}, called from {language}: {median_us:.1f} us")
            ping.close()


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 1 else main()
