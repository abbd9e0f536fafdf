"""The scheduler process of a decode worker: `python -m diptych.decode.scheduler JSON`, started by its frontend."""

from __future__ import annotations

import sys

from diptych.decode.core import DecodeCore
from diptych.engine.runtime.link_tester import reader_tester
from diptych.engine.runtime.scheduler_config import SchedulerConfig
from diptych.engine.runtime.scheduler_process import Peering, run_scheduler
from diptych.kvtransfer.transport import Transport
from diptych.kvtransfer.ucx import UcxOptions, open_transport


def main() -> int:
    return run_scheduler(
        sys.argv,
        lambda cache, limits, rules, layout: DecodeCore(cache, limits, layout.page_nbytes),
        Peering(_open_transport, reader_tester),
    )


def _open_transport(config: SchedulerConfig) -> Transport:
    return open_transport(config.instance_id, options=UcxOptions(transports=config.transports))


if __name__ == "__main__":
    sys.exit(main())
