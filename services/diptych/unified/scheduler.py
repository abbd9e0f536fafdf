"""The scheduler process of every worker: `python -m diptych.unified.scheduler JSON`, started by its frontend."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from diptych.common.members.roles import Role
from diptych.engine.cache.kv_cache import KvCache
from diptych.engine.options.config import SchedulerConfig
from diptych.engine.options.speculation import parse_speculate
from diptych.engine.schedule.adapter_turns import Turns
from diptych.engine.schedule.running import Drafter
from diptych.engine.scheduler.kv_backends import open_transport
from diptych.engine.scheduler.process import run_scheduler
from diptych.engine.values.batch import DraftModel, GraphUse
from diptych.engine.values.limits import Limits
from diptych.engine.values.scheduler_core import SchedulerCore
from diptych.generation.request_groups import NO_DRAFTS
from diptych.kvtransfer.layout import PoolLayout
from diptych.unified.core import UnifiedCore


def build_core(
    cache: KvCache,
    limits: Limits,
    config: SchedulerConfig,
    layout: PoolLayout,
    turns: Turns,
    draft_model: DraftModel,
    graph_use: Callable[[], GraphUse],
) -> SchedulerCore:
    drafter = _drafter(cache, limits, parse_speculate(config.engine.speculate).source, draft_model, graph_use)
    return UnifiedCore(
        cache, limits, config.transfer, layout.page_nbytes, Role(config.role), turns=turns, drafter=drafter
    )


def _drafter(
    cache: KvCache, limits: Limits, source: str, draft_model: DraftModel, graph_use: Callable[[], GraphUse]
) -> Drafter | None:
    """Return who drafts, if anybody does. Raises `ConfigError`."""
    if source == NO_DRAFTS:
        return None
    from diptych.engine.drafting.ahead import AHEAD
    from diptych.engine.drafting.late_costs import LateCosts
    from diptych.engine.drafting.new_drafter import new_drafter

    asks = AHEAD.get(source)
    ahead = None if asks is None else asks(draft_model, cache.page_table, cache.page_size)
    return new_drafter(source, limits, time.monotonic, ahead, LateCosts(lambda: graph_use().late_times))


def main() -> NoReturn:
    run_scheduler(sys.argv, build_core, open_transport)


if __name__ == "__main__":
    main()
