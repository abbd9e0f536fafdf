"""Formats what `diptych cache` prints: hit rates and tiers, as tables for people or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from diptych.cli.reports.link_report import size
from diptych.cli.reports.status_report import text_table
from diptych.cli.requests.asking import Answer
from diptych.common.members.instances import name_of, role_of
from diptych.kvtransfer.layout import layout_from_wire
from diptych.v1.worker_pb2 import CacheStatus, CacheTier, WorkerStatus

TIER_COLUMNS: Final = ("worker", "role", "tier", "pages", "bytes", "full", "hit", "saved")
AGE_COLUMNS: Final = (
    *("worker", "evicted", "age p50", "age p90", "kept", "of pages", "given up", "away", "calls", "returns", "found"),
)
PREFIX_COLUMNS: Final = ("prefix", "tokens", "requests", "at workers")


def as_text(answers: Sequence[Answer], seen: Mapping[str, Any] | None, problem: str, num_prefixes: int) -> str:
    """Return blocks: what routers have seen, the tiers of each worker, what left the pools and is kept, prefixes.

    `seen`: the console's topic `cache`; None: `problem` says why nothing is known.
    """
    told = [(answer, answer.status) for answer in answers if answer.status is not None]
    blocks = [
        [_hit_words(seen) if seen is not None else f"hit rate: {problem}"],
        text_table(TIER_COLUMNS, (row for answer, status in told for row in _tier_rows(answer, status))),
        text_table(AGE_COLUMNS, (_age_row(answer, status.cache) for answer, status in told)),
        _prefix_lines(seen, num_prefixes) if seen is not None else [],
        [f"{name_of(answer.member)} does not answer: {answer.problem}" for answer in answers if answer.problem],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(answers: Sequence[Answer], seen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the same for programs."""
    return {"seen": seen, "workers": [_worker_json(answer) for answer in answers]}


def saved_s(status: WorkerStatus, tier: CacheTier) -> float:
    """Return how long what was found would have taken to compute, at the worker's present speed; 0: not measured."""
    return tier.found_tokens / status.prefill_tokens_per_s if status.prefill_tokens_per_s else 0.0


def page_nbytes(status: WorkerStatus) -> int:
    """Return what a page takes; 0: the worker does not say, as it has no peers."""
    if not status.instance.HasField("transfer"):
        return 0
    return layout_from_wire(status.instance.transfer.layout).page_nbytes


def _hit_words(seen: Mapping[str, Any]) -> str:
    if seen["hit_rate"] is None:
        return "hit rate: no request has ended of late"
    ceiling = "not known: routers read no prompts" if seen["ceiling"] is None else f"{seen['ceiling']:.1%}"
    return f"hit rate of the last {seen['window_s'] / 60:.0f} min: {seen['hit_rate']:.1%}; infinite cache: {ceiling}"


def _tier_rows(answer: Answer, status: WorkerStatus) -> Iterator[tuple[str, ...]]:
    asked, nbytes = status.cache.prompt_tokens, page_nbytes(status)
    for tier in status.cache.tiers:
        yield (
            name_of(answer.member),
            role_of(answer.member),
            tier.name,
            str(tier.pages),
            size(tier.pages * nbytes) if nbytes else "",
            f"{tier.pages / tier.capacity_pages:.0%}" if tier.capacity_pages else "-",
            f"{tier.found_tokens / asked:.1%}" if asked else "-",
            f"{seconds:.1f} s" if (seconds := saved_s(status, tier)) else "-",
        )


def _age_row(answer: Answer, cache: CacheStatus) -> tuple[str, ...]:
    ages = (f"{age_s:.3g} s" if age_s else "-" for age_s in (cache.evicted_p50_s, cache.evicted_p90_s))
    pages = f"{cache.pinned_pages}/{cache.most_pinned_pages}"
    counts = cache.pins_given_up, cache.sessions_away, cache.tool_calls, cache.tool_returns, cache.kept_returns
    return (name_of(answer.member), str(cache.evicted_pages), *ages, str(cache.pins), pages, *map(str, counts))


def _prefix_lines(seen: Mapping[str, Any], most: int) -> list[str]:
    rows = [
        (name, str(prefix["num_tokens"]), str(prefix["num_requests"]), str(len(prefix["workers"])))
        for name, prefix in list(seen["prefixes"].items())[:most]
    ]
    return text_table(PREFIX_COLUMNS, rows) if rows else []


def _worker_json(answer: Answer) -> dict[str, Any]:
    worker: dict[str, Any] = {"instance": f"{answer.member.instance_id:016x}", "role": role_of(answer.member)}
    if answer.status is None:
        return worker | {"problem": answer.problem}
    status, cache = answer.status, answer.status.cache
    nbytes = page_nbytes(status)
    tiers = [
        {
            **{name: getattr(tier, name) for name in ("name", "pages", "capacity_pages", "found_tokens")},
            "bytes": tier.pages * nbytes,
            "saved_s": saved_s(status, tier),
        }
        for tier in cache.tiers
    ]
    said = {field.name: getattr(cache, field.name) for field in cache.DESCRIPTOR.fields if field.name != "tiers"}
    return worker | said | {"tiers": tiers}
