"""Has grammars checked in a process of its own, and starts another where a check has ended it.

`Verdicts` keeps what became of those that were checked, so that the same one does not pay again; it is told the time.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any, Final

from diptych.generation.grammar import Grammar
from diptych.grammars.check_terms import MAX_BYTES, MAX_CPU_S, OUT_OF_MEMORY, encode

logger = logging.getLogger(__name__)

MODULE: Final = "diptych.grammars.check_process"
STALL_S: Final = 30.0  # a process that has had no CPU for so long is given up: its limit is of CPU time
START_S: Final = 0.1  # about what another process costs, counted to who made us need it
MAX_VERDICTS: Final = 4096  # up to 1 KiB each, mostly far less: words of refusals, and a hash
LIMIT_KEPT_S: Final = 60.0  # a grammar that took too long might not, on a machine less busy

_NO_MEMORY: Final = frozenset({OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL})
_ADVICE: Final = "make it smaller, with fewer patterns in `allOf` and less that is nested or repeated"


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    REFUSED = "refused"  # by the compiler's rules
    TIME = "time"  # it took more than it may
    MEMORY = "memory"  # likewise
    FAILED = "failed"  # something is wrong with this machine, or with us
    LEFT = "left"  # nobody wants to know any more


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check has found."""

    outcome: Outcome
    words: str = ""  # why not; empty if it passed


class Verdicts:
    """The last verdicts, by hash of the grammar."""

    def __init__(self, max_verdicts: int = MAX_VERDICTS) -> None:
        self._max_verdicts = max_verdicts
        self._kept: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # and until when

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, grammar: Grammar, now_s: float) -> Verdict | None:
        """Return what is known of `grammar`."""
        key = _key(grammar)
        verdict, until_s = self._kept.get(key, (None, 0.0))
        if verdict is None:
            return None
        if now_s >= until_s:
            del self._kept[key]
            return None
        self._kept.move_to_end(key)
        return verdict

    def add(self, grammar: Grammar, verdict: Verdict, now_s: float) -> None:
        """Keep what was found, unless nothing was."""
        if verdict.outcome in (Outcome.LEFT, Outcome.FAILED):
            return
        is_limit = verdict.outcome in (Outcome.TIME, Outcome.MEMORY)
        self._kept[_key(grammar)] = (verdict, now_s + LIMIT_KEPT_S if is_limit else float("inf"))
        if len(self._kept) > self._max_verdicts:
            self._kept.popitem(last=False)


def _key(grammar: Grammar) -> bytes:
    marks = (grammar.preamble.opening, grammar.preamble.closing) if grammar.preamble else ()
    parts = (grammar.kind.value, *marks, grammar.text)
    return hashlib.blake2b("\0".join((str(len(marks)), *parts)).encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check has found, and what it took."""

    verdict: Verdict
    took_s: float
    source: str = ""  # what the compiler reads, if the grammar passed


class Checker:
    """Owns one process. One thread calls `start`, `begin` and `check`, in this order; any may `interrupt`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_checking = False
        self._is_interrupted = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process else None

    def start(self) -> None:
        """Have a process that is ready for the next check."""
        with self._lock:
            if self._process is not None:
                return
            process = self._process = _start()
        with contextlib.suppress(TimeoutError):  # the check will find out
            _read_line(_pipe(process.stdout))

    def begin(self) -> None:
        """There is a grammar to check: from now on `interrupt` means it."""
        with self._lock:
            self._is_checking, self._is_interrupted = True, False

    def check(self, grammar: Grammar) -> Checked:
        """Return what there is to say of `grammar`, in bounded time and without more memory here."""
        begun_s = time.monotonic()
        line = encode(grammar)
        answer = self._exchange(line)
        if answer == -signal.SIGKILL:  # somebody else ended the process, before or while it was asked
            answer = self._exchange(line)
        with self._lock:
            self._is_checking = False
        if isinstance(answer, int):
            return Checked(self._why_ended(grammar, answer), min(time.monotonic() - begun_s, MAX_CPU_S) + START_S)
        return self._read(json.loads(answer))

    def interrupt(self) -> None:
        """Nobody wants to know the answer any more."""
        with self._lock:
            if self._is_checking:
                self._is_interrupted = True
                if self._process is not None:
                    self._process.kill()

    def close(self) -> None:
        """End the process; the next check would start another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _exchange(self, line: bytes) -> bytes | int:
        """Return the answer, or the code with which the process has ended."""
        process = self._running()
        if process is None:
            return -signal.SIGKILL
        try:
            _pipe(process.stdin).write(line)
            _pipe(process.stdin).flush()
            answer = _read_line(_pipe(process.stdout))
        except BrokenPipeError:
            answer = b""
        except TimeoutError:
            self.close()
            return -signal.SIGPROF
        if answer:
            return answer
        code = process.wait()
        self.close()
        return code

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Return the process; None if it needn't be asked any more."""
        if self._is_interrupted:
            return None
        self.start()
        return self._process

    def _read(self, answer: dict[str, Any]) -> Checked:
        if answer["is_worn"]:
            self.close()
        if "problem" in answer:
            return Checked(Verdict(Outcome.REFUSED, answer["problem"]), answer["took_s"])
        return Checked(Verdict(Outcome.PASSED), answer["took_s"], answer["source"])

    def _why_ended(self, grammar: Grammar, code: int) -> Verdict:
        kind = grammar.kind.value
        if self._is_interrupted:
            return Verdict(Outcome.LEFT)
        if code == -signal.SIGPROF:
            return Verdict(Outcome.TIME, f"{kind} takes more than {MAX_CPU_S:g} s to check: {_ADVICE}")
        if code in _NO_MEMORY:
            words = f"{kind} takes more than {MAX_BYTES >> 20} MiB to check, or is nested too deep: {_ADVICE}"
            return Verdict(Outcome.MEMORY, words)
        logger.error("a process that checks grammars ended with code %d", code)
        return Verdict(Outcome.FAILED, f"{kind} could not be checked: try again")


def _start() -> subprocess.Popen[bytes]:
    """What hostile input runs in needs none of our secrets, and has nothing to tell the log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(BrokenPipeError):  # of what it was not asked
        _pipe(process.stdin).close()
    _pipe(process.stdout).close()


def _read_line(pipe: IO[bytes]) -> bytes:
    """Return the next line; empty: there is none any more."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    if not poller.poll(STALL_S * 1000):
        raise TimeoutError
    return pipe.readline()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
