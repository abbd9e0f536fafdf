"""The `diptych` object that a client gets with `x-diptych-timings: 1`: where time and bytes of a request went."""

from __future__ import annotations

from typing import Any, Final

from diptych.common.roles import LegKind
from diptych.router.request import Report
from diptych.v1.worker_pb2 import LegStats

HEADER: Final = "x-diptych-timings"


def timings(report: Report) -> dict[str, Any]:
    """Return the object. Durations are in microseconds on the clock of the worker that measured them.

    What a worker that served alone measured stands under prefill: it has waited for no peer, and moved nothing.
    """
    prefill = report.stats.get(LegKind.PREFILL, report.stats.get(LegKind.LOCAL, LegStats()))
    decode = report.stats.get(LegKind.DECODE, LegStats())
    return {
        "room": _hex(report.room),
        "prefill_instance": _hex(report.pair.prefill_id),
        "decode_instance": _hex(report.pair.decode_id),
        "prefill_queue_us": prefill.queue_us,
        "prefill_compute_us": prefill.compute_us,
        "prefill_transfer_us": prefill.transfer_us,
        "prefill_added_ttft_us": prefill.added_ttft_us,
        "decode_queue_us": decode.queue_us,
        "decode_transfer_us": decode.transfer_us,
        "decode_verify_us": decode.verify_us,
        "decode_join_us": decode.join_us,
        "pages_moved": decode.pages_moved,
        "bytes_moved": decode.bytes_moved,
        "prefill_pages_moved": prefill.pages_moved,
        "prefill_bytes_moved": prefill.bytes_moved,
        "prefill_kv_digest": _hex(prefill.kv_digest),
        "decode_kv_digest": _hex(decode.kv_digest),
        "prefill_cached_tokens": prefill.cached_tokens,
        "decode_cached_tokens": decode.cached_tokens,
    }


def _hex(number: int) -> str:
    """64 bits do not fit into a JSON number."""
    return f"{number:016x}"
