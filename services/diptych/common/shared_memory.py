"""Makes memory that processes share, without a file behind it: a writer never waits for a disk."""

from __future__ import annotations

import os
import sys


class SharedMemory:
    """Zeros, for other processes to inherit by the descriptor and to map."""

    def __init__(self, name: str, num_bytes: int) -> None:
        if sys.platform.startswith("linux"):
            self.descriptor = os.memfd_create(name)
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.ftruncate(self.descriptor, num_bytes)

    def close(self) -> None:
        """Whoever has mapped it keeps it."""
        os.close(self.descriptor)
