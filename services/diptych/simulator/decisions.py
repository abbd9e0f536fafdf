"""One digest over all decisions of a run: who was let in, each pair, and what each step computed. Pure.

No times are in it: two runs have the same digest when they decided the same in the same order, each worker by itself.
A step that continues the same requests as the one before it counts as one more of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from diptych.engine.values.batch import ForwardBatch, ForwardMode


class StepRecord:
    """The steps of one worker."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._rooms: list[int] = []  # that the last steps continued
        self._times = 0
        self.num_steps = 0

    def launched(self, rooms: Iterable[int], batch: ForwardBatch) -> None:
        """A step is launched, for rooms as calls are numbered."""
        if batch.mode is ForwardMode.DECODE:
            self.repeated(rooms, 1)
            return
        self._close()
        self.num_steps += 1
        self._hash.update(
            repr(("prompts", sorted(rooms), batch.extend_lens.tolist(), batch.seq_lens.tolist())).encode()
        )

    def repeated(self, rooms: Iterable[int], times: int) -> None:
        """So many steps continued these rooms, and did nothing else."""
        listed = sorted(rooms)
        if listed != self._rooms:
            self._close()
            self._rooms = listed
        self._times += times
        self.num_steps += times

    def digest(self) -> bytes:
        self._close()
        return self._hash.digest()

    def _close(self) -> None:
        if self._times:
            self._hash.update(repr((self._rooms, self._times)).encode())
        self._rooms, self._times = [], 0


class Decisions:
    """The router's, and the steps of all workers."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._workers: dict[int, StepRecord] = {}

    def of_worker(self, worker_id: int) -> StepRecord:
        return self._workers.setdefault(worker_id, StepRecord())

    def admitted(self, call: int, outcome: str) -> None:
        """A call was let in, or refused for a reason."""
        self._hash.update(repr((call, outcome)).encode())

    def paired(self, call: int, prefill_id: int, decode_id: int) -> None:
        self._hash.update(repr((call, prefill_id, decode_id)).encode())

    def changed(self, worker_id: int, change: str) -> None:
        """A worker came, went, or got another role."""
        self._hash.update(repr((worker_id, change)).encode())

    @property
    def num_steps(self) -> int:
        return sum(record.num_steps for record in self._workers.values())

    def digest(self) -> str:
        whole = self._hash.copy()
        for worker_id in sorted(self._workers):
            whole.update(self._workers[worker_id].digest())
        return whole.hexdigest()
