"""The scheduler process of a decode worker: `python -m diptych.decode.scheduler JSON`, started by its frontend."""

from __future__ import annotations

import sys

from diptych.decode.core import DecodeCore
from diptych.engine.runtime.kv_backends import open_transport
from diptych.engine.runtime.link_tester import reader_tester
from diptych.engine.runtime.scheduler_process import Peering, run_scheduler


def main() -> int:
    return run_scheduler(
        sys.argv,
        lambda cache, limits, rules, layout: DecodeCore(cache, limits, layout.page_nbytes),
        Peering(open_transport, reader_tester),
    )


if __name__ == "__main__":
    sys.exit(main())
