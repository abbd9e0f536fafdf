"""Writes into another process by UCX's own remote memory access: `intruder.py UCX_ADDRESS_IN_HEX MEMORY_ADDRESS`."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from diptych.common.native import build_library
from diptych.kvtransfer.ucx import loader


def main() -> None:
    ucx = loader.load()
    source = Path(__file__).with_name("intruder.c")
    strike = ctypes.CDLL(str(build_library(source, include_dirs=lambda: [loader.include_folder(ucx)]))).strike
    address = bytes.fromhex(sys.argv[1])
    strike.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
    assert strike(address, int(sys.argv[2])) == 0, "the intruder's own UCX failed"


if __name__ == "__main__":
    main()
