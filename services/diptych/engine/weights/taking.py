"""Takes a model's weights from a worker that runs, into memory that has their form already.

Whatever goes wrong, the caller reads them from disk: nothing serves before all pieces are here and verified.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from diptych.engine.weights import wire
from diptych.engine.weights.memory import WeightMemory
from diptych.engine.weights.staging import new_staging

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0  # for a giver that says nothing
LEAST_BYTES_PER_S: Final = 50e6  # from a giver that is slower weights are read from disk
FIRST_S: Final = 5.0  # beside that
STREAMS_ON_GPU: Final = 4  # one thread can't copy, hash and receive as fast as a GPU takes it


class TakingFailed(Exception):
    """Not all came, or not as it should be."""


class Taking:
    """From whom the first weights of a process may be taken, and what came of it."""

    def __init__(self, givers: Sequence[wire.Giver]) -> None:
        self._givers = givers
        self.nbytes = 0  # that were taken
        self.num_failed = 0  # givers that were asked in vain

    @property
    def is_hopeful(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._givers)

    def fill(self, memory: WeightMemory) -> bool:
        """Take all from the first giver that has it; False if none has: then anything may be in `memory`."""
        for giver in self._givers:
            began_s = time.monotonic()
            try:
                _take_from(giver, memory)
            except (OSError, RuntimeError, wire.Refused, TakingFailed) as error:  # RuntimeError: no memory to stage it
                self.num_failed += 1
                logger.warning("no weights from %s:%d: %s", giver.host, giver.port, error)
            else:
                self.nbytes = memory.nbytes
                took_s = time.monotonic() - began_s
                words = "took %.2f GB of weights from %s:%d in %.2f s"
                logger.info(words, memory.nbytes / 1e9, giver.host, giver.port, took_s)
                return True
        return False


def _take_from(giver: wire.Giver, memory: WeightMemory) -> None:
    num_streams = STREAMS_ON_GPU if memory.is_on_gpu else 1
    until_s = time.monotonic() + FIRST_S + memory.nbytes / LEAST_BYTES_PER_S
    with ThreadPoolExecutor(num_streams, thread_name_prefix="weights") as pool:
        wanted = [wire.Wanted(memory.form, stream, num_streams) for stream in range(num_streams)]
        for done in [pool.submit(_take_stream, giver, memory, each, until_s) for each in wanted]:
            done.result()


@torch.inference_mode()
def _take_stream(giver: wire.Giver, memory: WeightMemory, wanted: wire.Wanted, until_s: float) -> None:
    with socket.create_connection((giver.host, giver.port), PATIENCE_S) as sock:
        sock.settimeout(PATIENCE_S)
        wire.prove(sock, giver.key, b"taker", min(until_s, time.monotonic() + PATIENCE_S))
        given = wire.ask(sock, wanted, until_s)
        if given != memory.nbytes:
            raise TakingFailed("it gives nothing of that form" if not given else f"it has {given} bytes")
        staging = new_staging(memory.parts)
        for piece in wire.pieces_of([len(part) for part in memory.parts], wanted.stream, wanted.num_streams):
            expected = wire.received(sock, wire.DIGEST_NBYTES, until_s)
            place = staging.place(memory.parts[piece.part], piece)
            wire.receive_into(sock, place, until_s)
            if wire.digest(place) != expected:
                raise TakingFailed("what came is not what was sent")
            staging.settle(memory.parts[piece.part], piece)
