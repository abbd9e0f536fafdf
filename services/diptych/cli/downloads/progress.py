"""Says at intervals how far a download has come."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


class Progress:
    """Bytes that are there, of all; many threads count."""

    def __init__(self, total_nbytes: int) -> None:
        self._total = total_nbytes
        self._lock = threading.Lock()
        self._done = 0
        self.fetched = 0  # over the network, those again that were lost with a connection or a process
        self._began_s = time.monotonic()

    def found(self, nbytes: int) -> None:
        """They were there already. Negative: they are worth nothing after all."""
        with self._lock:
            self._done += nbytes

    def received(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self.fetched += nbytes

    def words(self) -> str:
        with self._lock:
            done, fetched = self._done, self.fetched
        speed = fetched / max(1e-9, time.monotonic() - self._began_s)
        share = 100 * done // self._total if self._total else 100
        left = f", {(self._total - done) / speed:.0f} s left" if speed and done < self._total else ""
        return f"{_size(done)} of {_size(self._total)} ({share} %), {_size(int(speed))}/s{left}"

    @contextlib.contextmanager
    def told(self, every_s: float) -> Iterator[None]:
        """Log it every so often within the block."""
        ends = threading.Event()

        def tell() -> None:
            while not ends.wait(every_s):
                logger.info("downloaded %s", self.words())

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ends.set()
            teller.join()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
