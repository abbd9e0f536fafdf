"""The processes of another transfer library in `kvtransfer.py`. Their interpreter has it, numpy, nothing of ours.

    python kvtransfer_nixl.py TRANSPORTS POOL_NBYTES [target]        (started by kvtransfer_rivals.py)

The initiator starts its target, then answers lines of JSON. `{"write": size}`: it writes every byte of its pool once,
as pieces of that size in random order on both sides; the answer is how many seconds that took. `{"verify": size}`:
whether the target holds what was written. The target polls only while it is written to.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import select
import subprocess
import sys
import time
from typing import IO, Any, Protocol

import numpy as np


class End(Protocol):
    """One side of a library, over registered memory."""

    def address(self) -> Any:
        """What the other side needs to connect, as JSON."""
        ...

    def connect(self, address: Any) -> None: ...

    def write(self, src: Any, dst: Any, nbytes: int) -> None:
        """Write pieces of `nbytes` from the offsets `src` to the other side's `dst`; return when all are there."""
        ...

    def poll(self) -> None:
        """Let the other side's writes make progress, where they need that."""
        ...


class OpenEnd(Protocol):
    def __call__(self, transports: str, memory: Any, *, is_target: bool) -> End: ...


def scatter(pool_nbytes: int, piece_nbytes: int) -> tuple[Any, Any]:
    """Offsets of every piece at the source and at the target."""
    random = np.random.default_rng(piece_nbytes)
    count = pool_nbytes // piece_nbytes
    return tuple(random.permutation(count).astype(np.int64) * piece_nbytes for _ in range(2))  # type: ignore[return-value]


def digest(memory: Any, offsets: Any, nbytes: int) -> str:
    """Return the digest of pieces, in order."""
    found = hashlib.blake2b()
    for offset in offsets.tolist():
        found.update(memory[offset : offset + nbytes])
    return found.hexdigest()


def main(open_end: OpenEnd) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to standard output
    transports, pool_nbytes, *role = sys.argv[1:]
    memory = np.frombuffer(mmap.mmap(-1, int(pool_nbytes)), dtype=np.uint8)
    memory[:] = 1 if role else np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    end = open_end(transports, memory, is_target=bool(role))
    serve_target(end, memory, answers) if role else serve(end, memory, answers)
    os._exit(0)  # some libraries fail in the destructors of an orderly exit


def serve(end: End, memory: Any, answers: IO[str]) -> None:
    command, pipe = [sys.executable, *sys.argv, "target"], subprocess.PIPE
    target = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(question: Any) -> Any:
        assert target.stdin is not None
        assert target.stdout is not None
        print(json.dumps(question), file=target.stdin, flush=True)
        return json.loads(target.stdout.readline())

    end.connect(ask(end.address()))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        ((what, nbytes),) = json.loads(line).items()
        src, dst = scatter(len(memory), nbytes)
        if what == "verify":
            answer: Any = ask({"digest": nbytes}) == digest(memory, src, nbytes)
        else:
            ask({"poll": True})
            began = time.perf_counter()
            end.write(src, dst, nbytes)
            answer = time.perf_counter() - began
            ask({"poll": False})
        print(json.dumps(answer), file=answers, flush=True)
    target.kill()


def serve_target(end: End, memory: Any, answers: IO[str]) -> None:
    def answer(something: Any) -> None:
        print(json.dumps(something), file=answers, flush=True)

    end.connect(json.loads(sys.stdin.readline()))
    answer(end.address())
    is_polling = False
    while True:
        if is_polling and not select.select([sys.stdin], [], [], 0)[0]:
            end.poll()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        ((what, value),) = json.loads(line).items()
        if what == "digest":
            answer(digest(memory, scatter(len(memory), value)[1], value))
        else:
            is_polling = value
            answer(None)
