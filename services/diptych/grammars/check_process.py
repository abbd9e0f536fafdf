"""A process that checks grammars, one after another: `python -m diptych.grammars.check_process PARENT_PID`.

It writes an empty line when it is ready, then reads a grammar a line and writes an answer a line, both JSON. A check
that takes more CPU time, memory or stack than it may ends the process: whoever has it starts another. Nothing else is
in it, no secret and no socket.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from diptych.common import lifecycle
from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar
from diptych.grammars.check_terms import MAX_BYTES, MAX_CPU_S, OUT_OF_MEMORY, decode
from diptych.grammars.source import check

MAX_STACK_BYTES: Final = 8 << 20
WORN_BYTES: Final = 64 << 20  # more than at the start: what is left over from checks would be missed by the next


def main() -> None:
    """Answer until nobody asks any more."""
    lifecycle.die_with_parent(signal.SIGKILL, parent_pid=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group; our parent ends us
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    at_start = _address_bytes()
    _limit(at_start)
    _write(b"\n")
    for asked in sys.stdin.buffer:
        _write(json.dumps(_answer(asked, at_start)).encode() + b"\n")


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _answer(asked: bytes, at_start: int) -> dict[str, Any]:
    """Return the source, or the problem; what it took; and whether another process should take the next."""
    begun_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
    found = _found(decode(asked))
    signal.setitimer(signal.ITIMER_PROF, 0)
    is_worn = _address_bytes() > at_start + WORN_BYTES
    return {**found, "took_s": time.process_time() - begun_s, "is_worn": is_worn}


def _found(grammar: Grammar) -> dict[str, Any]:
    try:
        return {"source": check(grammar)}
    except InvalidRequest as error:
        return {"problem": str(error)}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # a panic of the compiler, which is no `Exception`
        return {"problem": f"{grammar.kind.value} can't be compiled: the compiler fails on it"}


def _limit(at_start: int) -> None:
    """What the process has is its own, so the limit is for what checks add."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, MAX_STACK_BYTES)]
    if at_start:
        limits.append((resource.RLIMIT_AS, at_start + MAX_BYTES))
    for kind, value in limits:
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    adjustment = Path("/proc/self/oom_score_adj")
    if adjustment.exists():
        adjustment.write_text("1000")  # a machine without memory ends this process before any other


def _address_bytes() -> int:
    """Return how much address space this process has; 0 where nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
