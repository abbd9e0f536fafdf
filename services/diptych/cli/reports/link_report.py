"""Formats what `diptych links` prints: workers and their links, as a table for people or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from diptych.cli.reports.status_report import text_table
from diptych.cli.requests.asking import Answer
from diptych.common.members.instances import name_of, role_of, state_of
from diptych.v1 import worker_pb2
from diptych.v1.worker_pb2 import LinkStatus, WorkerStatus

COLUMNS: Final = ("peer", "state", "path", "lanes", "GB/s", "RTT", "sent", "in flight", "queued")
LINK_FIELDS: Final = (
    *("reason", "path", "lanes", "library", "bytes_per_s", "rtt_s", "bytes_sent", "in_flight_bytes", "queued_bytes"),
    "last_heard_s",
)


def is_well(answer: Answer) -> bool:
    """Whether a worker answers, and all of its links are up."""
    return answer.status is not None and all(link.state == worker_pb2.LINK_STATE_UP for link in answer.status.links)


def as_text(answers: Sequence[Answer]) -> str:
    """Return one block a worker."""
    names = {answer.member.instance_id: name_of(answer.member) for answer in answers}
    return "\n\n".join(_block(answer, names) for answer in answers) or "no workers are registered"


def as_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [_worker_json(answer) for answer in answers]


def _block(answer: Answer, names: Mapping[int, str]) -> str:
    worker, status = answer.member, answer.status
    why = f" ({worker.not_ready})" if worker.not_ready else ""
    head = f"{name_of(worker)}: {state_of(worker)}{why}"
    if status is None:
        return f"{head}; does not answer: {answer.problem}"
    counts = ", ".join(f"{number} {state}" for state, number in sorted(status.pages_by_state.items()) if number)
    lines = [
        head,
        f"  pages: {counts}{_quarantine(status)}",
        f"  metrics: http://{worker.metrics_address}/metrics",
    ]
    lines += [f"  problem: {problem}" for problem in status.problems]
    if not status.links:
        return "\n".join([*lines, "  no peers"])
    table = [f"  {line}" for line in text_table(COLUMNS, [_row(link, names) for link in status.links])]
    reasons = [f"  {_peer(link, names)}: {link.reason}" for link in status.links if link.reason]
    failed = [(link, test) for link in status.links for test in link.tests if test.error]
    tests = [f"  {_peer(link, names)}: {test.path}: {test.error}" for link, test in failed]
    return "\n".join([*lines, *table, *reasons, *tests])


def _row(link: LinkStatus, names: Mapping[int, str]) -> tuple[str, ...]:
    return (
        _peer(link, names),
        _link_state(link),
        link.path or "-",
        link.lanes or "-",
        f"{link.bytes_per_s / 1e9:.2f}" if link.bytes_per_s else "-",
        f"{link.rtt_s * 1e6:.0f} us" if link.rtt_s else "-",
        *(size(number) for number in (link.bytes_sent, link.in_flight_bytes, link.queued_bytes)),
    )


def link_words(link: LinkStatus) -> str:
    """Say in a line what a link runs on."""
    speed = f", {link.bytes_per_s / 1e9:.2f} GB/s when it was tested" if link.bytes_per_s else ""
    return f"lanes: {link.lanes or 'none'}; path: {link.path or 'none'}{speed}"


def size(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}" if value < 1024 else f"{value / 1024:.4g} TiB"


def _quarantine(status: WorkerStatus) -> str:
    oldest_s = status.quarantine_oldest_s
    return f"; oldest in quarantine {oldest_s:.1f} s" if oldest_s else ""


def _peer(link: LinkStatus, names: Mapping[int, str]) -> str:
    return names.get(link.peer_instance_id, f"{link.peer_instance_id:016x}, unknown")


def _link_state(link: LinkStatus) -> str:
    return worker_pb2.LinkState.Name(link.state).removeprefix("LINK_STATE_").lower()


def _worker_json(answer: Answer) -> dict[str, Any]:
    worker, status = answer.member, answer.status
    record = {
        "instance_id": f"{worker.instance_id:016x}",
        "role": role_of(worker),
        "address": worker.address,
        "dp_rank": worker.dp_rank,
        "state": state_of(worker),
        "not_ready": worker.not_ready,
        "metrics_address": worker.metrics_address,
    }
    if status is None:
        return {**record, "problem": answer.problem}
    return {
        **record,
        "pages": dict(status.pages_by_state),
        "quarantine_oldest_s": status.quarantine_oldest_s,
        "integrity_failures": status.integrity_failures,
        "leaks_found": status.leaks_found,
        "link_failures": status.link_failures,
        "links": [_link_json(link) for link in status.links],
    }


def _link_json(link: LinkStatus) -> dict[str, Any]:
    return {
        "peer": f"{link.peer_instance_id:016x}",
        "state": _link_state(link),
        **{name: getattr(link, name) for name in LINK_FIELDS},
        "tests": [{"path": each.path, "bytes_per_s": each.bytes_per_s, "error": each.error} for each in link.tests],
    }
