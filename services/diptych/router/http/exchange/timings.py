"""The `diptych` object that a client gets with `x-diptych-timings: 1`: where time and bytes of a request went."""

from __future__ import annotations

from typing import Any, Final

from diptych.common.members.roles import LegKind
from diptych.router.values.leg_results import Report
from diptych.v1.worker_pb2 import LegStats

HEADER: Final = "x-diptych-timings"


def timings(report: Report) -> dict[str, Any]:
    """Return the object. Durations are in microseconds on the clock of the worker that measured them.

    What a worker that served alone measured stands under prefill: it has waited for no peer, and moved nothing. What
    is not known is not there: a leg may have been lost after it had done its part, or have been cut short.
    """
    return {
        "room": hex_id(report.room),
        "prefill_instance": hex_id(report.pair.prefill_id),
        "decode_instance": hex_id(report.pair.decode_id),
        "whole": report.is_whole,
        **_of_prefill(report),
        **_of_decode(report),
    }


def _of_prefill(report: Report) -> dict[str, Any]:
    kind = LegKind.LOCAL if LegKind.LOCAL in report.stats else LegKind.PREFILL
    stats = report.stats.get(kind)
    if stats is None:
        return {}
    known = {
        "prefill_queue_us": stats.queue_us,
        "prefill_compute_us": stats.compute_us,
        "prefill_pages_moved": stats.pages_moved,
        "prefill_bytes_moved": stats.bytes_moved,
        "prefill_cached_tokens": stats.cached_tokens,
    }
    if kind not in report.told:
        return known
    at_the_end = {"prefill_transfer_us": stats.transfer_us, "prefill_added_ttft_us": stats.added_ttft_us}
    return {**known, **at_the_end, **_digest("prefill_kv_digest", stats)}


def _of_decode(report: Report) -> dict[str, Any]:
    if LegKind.DECODE not in report.stats and LegKind.LOCAL not in report.stats:
        return {}
    stats = report.stats.get(LegKind.DECODE, LegStats())
    return {
        "decode_queue_us": stats.queue_us,
        "decode_transfer_us": stats.transfer_us,
        "decode_verify_us": stats.verify_us,
        "decode_join_us": stats.join_us,
        "pages_moved": stats.pages_moved,
        "bytes_moved": stats.bytes_moved,
        "decode_cached_tokens": stats.cached_tokens,
        **_digest("decode_kv_digest", stats),
    }


def _digest(name: str, stats: LegStats) -> dict[str, str]:
    return {name: hex_id(stats.kv_digest)} if stats.HasField("kv_digest") else {}


def hex_id(number: int) -> str:
    """64 bits do not fit into a JSON number."""
    return f"{number:016x}"
