"""What is short beside what is long: digests beside copies, a short prompt's pages behind long ones', small notes.

Limits in the same run: memcpy; the same short transfer on an idle link; UCX's own round trip, measured by two processes
that have nothing of ours. Runs alone: `python bench/kv_flow.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from report import Report, arguments
from ucx_ping import UcxPing

from diptych.cli.requests.kv_bench import scatter
from diptych.kvtransfer.flow import Flow
from diptych.kvtransfer.transport import NoteReceived, OpDone, PageWrite
from kvtransfer import PAGE_NBYTES, Initiator, Memcpy

PIECE_KIB: Final = (16, 64, 2048)
LONG_TOKENS: Final = 128 << 10
NUM_LONG: Final = 4
SHORT_TOKENS: Final = 200
TOKENS_PER_PAGE: Final = 16
DIGESTED: Final = Flow(stream=1, with_digest=True)
PAUSE_S: Final = 0.001  # before each round trip: the other process is asleep by then
NOTE: Final = b"x" * 64


def digest_own(one: Initiator) -> float:
    """Return the seconds of a digest of the whole pool."""
    pages = np.arange(one.pool.layout.num_pages)
    began = time.perf_counter()
    op = one.transport.digest_pages(pages)
    one.wait(lambda event: isinstance(event, OpDone) and event.op == op)
    return time.perf_counter() - began


def measure_digests(report: Report, one: Initiator, rounds: int) -> None:
    memcpy, nbytes, limit = Memcpy(one.bytes), one.bytes.nbytes, "memcpy, same run"
    pieces = scatter(nbytes // PAGE_NBYTES, PAGE_NBYTES, 2 << 20)
    digest, copy = best_speeds(nbytes, [(digest_own(one), memcpy.copy(pieces)) for _ in range(rounds)])
    report.row("kv_flow", "digest of own pages", digest, "GB/s", copy, limit, digest / copy)
    for piece_kib in PIECE_KIB:
        pieces = scatter(nbytes // PAGE_NBYTES, PAGE_NBYTES, piece_kib << 10)
        times = [(one.write(pieces, DIGESTED), one.write(pieces), memcpy.copy(pieces)) for _ in range(rounds)]
        one.verify(pieces)
        digested, plain, copy = best_speeds(nbytes, times)
        case, peers = f"shm/{piece_kib}KiB with digest", {"without digest": plain}
        report.row("kv_flow", case, digested, "GB/s", copy, limit, digested / copy, peers)


def best_speeds(nbytes: int, times: Sequence[tuple[float, ...]]) -> list[float]:
    """Return GB/s of the best of each column."""
    return [nbytes / min(column) / 1e9 for column in zip(*times, strict=True)]


def short_transfer(one: Initiator) -> float:
    """Return the seconds until the pages and the note of a short prompt were complete."""
    pages = np.arange(-(-SHORT_TOKENS // TOKENS_PER_PAGE))
    began = time.perf_counter()
    op = one.transport.write_pages(2, PageWrite(pages, pages), flow=Flow(stream=2))
    one.wait(lambda event: isinstance(event, OpDone) and event.op == op)
    return time.perf_counter() - began


def behind_a_long_one(one: Initiator) -> float:
    """The same while the pages of long prompts move, on another stream."""
    pages = np.tile(np.arange(LONG_TOKENS // TOKENS_PER_PAGE), NUM_LONG)
    sent = one.transport.describe(2).bytes_sent
    long = one.transport.write_pages(2, PageWrite(pages, pages), flow=Flow(stream=1))
    while one.transport.describe(2).bytes_sent == sent:
        time.sleep(0)  # until it moves
    seconds = short_transfer(one)
    if not one.transport.describe(2).queued_bytes:
        raise RuntimeError("the long transfer had ended before the short one")
    one.wait(lambda event: isinstance(event, OpDone) and event.op == long)
    return seconds


def measure_fairness(report: Report, name: str, one: Initiator, rounds: int) -> None:
    alone_us, behind_us = (
        statistics.median(run(one) for _ in range(rounds)) * 1e6 for run in (short_transfer, behind_a_long_one)
    )
    case = f"{name}/{SHORT_TOKENS} tokens behind {NUM_LONG} x {LONG_TOKENS >> 10}k"
    report.row("kv_flow", case, behind_us, "us", alone_us, "alone, same run", alone_us / behind_us)


def note_round_trip(one: Initiator) -> float:
    """Return the seconds of one note there and back."""
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    one.transport.send_note(2, NOTE)
    one.wait(lambda event: isinstance(event, NoteReceived))
    return time.perf_counter() - began


def raw_round_trip(one: Initiator) -> float:
    time.sleep(PAUSE_S)
    return one.target.raw_ping()


def measure_round_trip(report: Report, name: str, one: Initiator, rounds: int) -> None:
    in_c, in_python = UcxPing(name, "c"), UcxPing(name, "python")
    times = [(note_round_trip(one), in_c.once(), in_python.once(), raw_round_trip(one)) for _ in range(rounds)]
    note, c, python, raw = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    peers = {"UCX from C": c, "raw TCP from Python": raw}
    report.row(
        "kv_flow", f"{name}/note round trip", note, "us", python, "UCX from Python, same run", python / note, peers
    )
    for ping in (in_c, in_python):
        ping.close()


def main() -> None:
    options = arguments(__doc__).parse_args()
    rounds = 5 if options.quick else 20
    pool_nbytes = LONG_TOKENS // TOKENS_PER_PAGE * PAGE_NBYTES
    with Report(as_json=options.json) as report:
        for name in ("shm", "tcp"):
            one = Initiator(name, pool_nbytes)
            one.write(scatter(pool_nbytes // PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES))  # warm
            if name == "shm":
                measure_digests(report, one, rounds)
            measure_fairness(report, name, one, 4 * rounds)
            measure_round_trip(report, name, one, 40 * rounds)
            one.close()


if __name__ == "__main__":
    main()
