"""What a scheduler tells of itself when it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from diptych.engine.schedule.adapter_turns import AdapterTurns
from diptych.engine.schedule.pace.prefill_meter import PrefillMeter
from diptych.engine.scheduler.links.links import links_of_nobody
from diptych.engine.scheduler.news import News
from diptych.engine.values.core_report import CoreCounts, CoreReport, DraftReport, Holders, SourceCounts
from diptych.v1.worker_pb2 import DraftCounts, Drafting

NAMES = [each.name for each in fields(CoreCounts)]
COUNTS = CoreCounts(*range(1, len(NAMES) + 1))


def test_every_counter_of_a_core_stands_in_the_status_under_its_name(
    new_engine: Callable[..., Any], monkeypatch: Any
) -> None:
    engine = new_engine()
    nobody: Any = SimpleNamespace(turns=AdapterTurns(0))
    monkeypatch.setattr(engine.core, "report", lambda: CoreReport(4, Holders(), COUNTS))
    status = News(engine.core, engine.cache, links_of_nobody(), nobody, PrefillMeter()).status()
    assert {name: getattr(status, name) for name in NAMES} == {name: getattr(COUNTS, name) for name in NAMES}
    assert (status.open_rooms, status.leaks_found, status.quarantine_oldest_s) == (4, 0, 0.0)
    assert status.pages_by_state == engine.cache.pool.counts()


def test_what_came_of_drafts_stands_in_the_status(new_engine: Callable[..., Any], monkeypatch: Any) -> None:
    engine = new_engine()
    nobody: Any = SimpleNamespace(turns=AdapterTurns(0))
    news = News(engine.core, engine.cache, links_of_nobody(), nobody, PrefillMeter())
    assert not news.status().HasField("drafting")
    drafts = DraftReport([SourceCounts("suffix", [5, 4], [3, 1])], 9, 0.5, 2.5, 640)
    monkeypatch.setattr(engine.core, "report", lambda: CoreReport(4, Holders(), COUNTS, drafts=drafts))
    assert news.status().drafting == Drafting(
        sources=[DraftCounts(source="suffix", verified=[5, 4], accepted=[3, 1])],
        asked=9,
        asking_s=0.5,
        saved_s=2.5,
        held_bytes=640,
    )


def test_drafts_are_those_of_the_core_that_has_a_drafter() -> None:
    drafts = DraftReport([SourceCounts("ngram", [1], [1])])
    without, with_some = CoreReport(1, Holders(), COUNTS), CoreReport(1, Holders(), COUNTS, drafts=drafts)
    assert (without + with_some).drafts == (with_some + without).drafts == drafts


def test_reports_of_cores_that_share_a_cache_are_added_up() -> None:
    one, other = CoreReport(1, Holders(), COUNTS, 5.0), CoreReport(2, Holders(), COUNTS, None)
    twice = CoreCounts(*(2 * getattr(COUNTS, name) for name in NAMES))
    assert one + other == other + one == CoreReport(3, Holders([], [], [], []), twice, 5.0)
