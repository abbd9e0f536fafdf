"""The scheduler process of a prefill worker: `python -m diptych.prefill.scheduler JSON`, started by its frontend."""

from __future__ import annotations

import sys

from diptych.engine.runtime.kv_backends import open_transport
from diptych.engine.runtime.link_tester import writer_tester
from diptych.engine.runtime.scheduler_process import Peering, run_scheduler
from diptych.prefill.core import PrefillCore


def main() -> int:
    return run_scheduler(
        sys.argv,
        lambda cache, limits, rules, layout: PrefillCore(cache, limits, rules, layout.page_nbytes),
        Peering(open_transport, writer_tester),
    )


if __name__ == "__main__":
    sys.exit(main())
