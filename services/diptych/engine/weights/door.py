"""Where a running worker gives its weights to one that starts: a port, a key that members know, threads that send.

Rule: no step waits for it. What is sent is read where it lies, by threads that hold no lock of the scheduler; so many
streams are open at a time, and others are turned away. Where steps run on the same cores, a stream rests after each
piece for as long as that took. Whoever does not prove in time that it knows the key hears
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from diptych.common.net.ports import binding
from diptych.engine.weights import wire
from diptych.engine.weights.memory import WeightMemory
from diptych.engine.weights.staging import new_staging

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0  # for all that the other side says, and for each piece that it takes
RETRY_S: Final = 0.1  # after a failure to accept: without descriptors, the next try fails, too
MOST_REST_S: Final = 0.1  # after a piece: a slow taker is waited for already
Current = Callable[[], WeightMemory | None]  # what is served now; None: nothing that is given


class WeightsDoor:
    """Opened by its making; all threads are its own."""

    def __init__(self, host: str, current: Current) -> None:
        """Listen at `host`, which others reach."""
        self.key = secrets.token_bytes(wire.KEY_NBYTES)
        self.num_given = 0  # streams that were sent whole, since start
        self._current = current
        family, bound = binding(host)
        self._listener = socket.socket(family)
        self._listener.bind((bound, 0))
        self._listener.listen(wire.MAX_STREAMS)
        self.port: int = self._listener.getsockname()[1]
        self._free = threading.BoundedSemaphore(wire.MAX_STREAMS)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of what follows, and of `num_given`
        self._open = set[socket.socket]()  # whose streams are served
        self._senders = ThreadPoolExecutor(wire.MAX_STREAMS, thread_name_prefix="weights")
        self._accepting = threading.Thread(target=self._accept, name="weights-door", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Take nobody in any more; whoever is being given something hears no more of it. Waits for nobody."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):  # it may have ended by itself
                    sock.shutdown(socket.SHUT_RDWR)
        self._senders.shutdown()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it is closed, whoever came is gone, or there is no descriptor
                self._closing.wait(RETRY_S)
                continue
            if self._free.acquire(blocking=False):
                with self._lock:
                    self._open.add(sock)
                self._senders.submit(self._serve, sock)
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(PATIENCE_S)
            self._give(sock)
        except (OSError, wire.Refused) as error:
            logger.warning("weights were not given: %s", error)
        except Exception:
            logger.exception("giving weights failed")
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()
            self._free.release()

    @torch.inference_mode()
    def _give(self, sock: socket.socket) -> None:
        until_s = time.monotonic() + PATIENCE_S
        wire.prove(sock, self.key, b"giver", until_s)
        wanted, memory = wire.read_wanted(sock, until_s), self._current()
        if memory is None or memory.form != wanted.form:
            wire.answer(sock, 0)
            return
        wire.answer(sock, memory.nbytes)
        sizes = [len(part) for part in memory.parts]
        staging = new_staging(memory.parts)
        for piece in wire.pieces_of(sizes, wanted.stream, wanted.num_streams):
            began_s = time.monotonic()
            data = staging.out(memory.parts[piece.part], piece)
            sock.sendall(wire.digest(data))
            sock.sendall(data)
            rest_s = 0.0 if memory.is_on_gpu else min(time.monotonic() - began_s, MOST_REST_S)
            if self._closing.wait(rest_s):
                return
        with self._lock:
            self.num_given += 1
