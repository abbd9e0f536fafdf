"""Stories of calls for the console's feed: bars as the router makes them, and an explanation that fits. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diptych.router.console.state import RequestRow, RequestStory, WorkerCard

UNNAMED_S: Final = 0.0003
LOST_S: Final = 0.06  # of an attempt that fails
ANSWER_S: Final = 0.001
MAX_TOKENS: Final = 500
PREPARING: Final = (("read", 0.0004), ("parse", 0.0002), ("check", 0.0003), ("admit", 0.002), ("prepare", 0.006))
WAITS: Final = (("prefill_queue", 0.28), ("prefill_compute", 0.68), ("messages", 0.04))  # shares of the prompt's time
JOINING: Final = (("decode_transfer", 0.012), ("decode_verify", 0.003), ("decode_join", 0.009))
LATER: Final = 0.4
FAILED: Final = "failed: decode leg: UNAVAILABLE: the worker is gone"

Json = dict[str, Any]


class Line:
    """Bars one after the other."""

    def __init__(self, at_s: float = 0.0) -> None:
        self.bars: list[Any] = []
        self.at_s = at_s

    def add(
        self, name: str, duration_s: float, where: str, parts: Sequence[Any] = (), *, is_failure: bool = False
    ) -> None:
        bar = {"name": name, "begun_s": round(self.at_s, 6), "duration_s": round(max(0.0, duration_s), 6)}
        self.bars.append({**bar, "where": where, "is_failure": is_failure, "parts": list(parts)})
        self.at_s += max(0.0, duration_s)


def story_of(row: RequestRow, workers: Mapping[str, WorkerCard], rng: random.Random) -> RequestStory:
    """Return what is known of a call. Of two attempts the first lost its decode worker."""
    lost = _another(row["decode"], workers, "decode") if row["num_attempts"] > 1 else None
    num = row["output_tokens"]
    first_s = row["ttft_s"] or 0.0
    rest_s = row["duration_s"] - first_s - ANSWER_S
    return {
        "row": row,
        "bars": _bars(row, lost),
        "unnamed_s": UNNAMED_S,
        "token_s": [round(first_s + rest_s * i / max(1, num), 4) for i in range(min(num, MAX_TOKENS))],
        "explanation": {
            "request_id": row["id"],
            "requests": [{"attempts": _attempts(row, lost, workers, rng)}],
        },
        "trace_id": f"{rng.getrandbits(128):032x}",
    }


def _another(instance: str, workers: Mapping[str, WorkerCard], role: str) -> str:
    return next((name for name, card in workers.items() if card["role"] == role and name != instance), instance)


def _bars(row: RequestRow, lost: str | None) -> list[Any]:
    line = Line()
    for name, duration_s in PREPARING:
        parts = Line(line.at_s)
        if name == "prepare":
            parts.add("render", 0.001, "router")
            parts.add("tokenize", 0.005, "router")
        line.add(name, duration_s, "router", parts.bars)
    line.at_s += UNNAMED_S
    if lost:
        line.add("select", 0.0008, "router")
        failed = Line(line.at_s)
        failed.add("prefill", LOST_S, row["prefill"])
        line.add("attempt", LOST_S, lost, failed.bars, is_failure=True)
        line.add("pause", 0.002, "router")
    line.add("select", 0.0008, "router")
    attempt, end_s = Line(line.at_s), row["duration_s"] - ANSWER_S
    _serve(attempt, row, end_s)
    line.add("retry" if lost else "attempt", attempt.at_s - line.at_s, row["decode"], attempt.bars)
    if row["phase"] == "ended":
        line.add("answer", ANSWER_S, "router")
    return line.bars


def _serve(line: Line, row: RequestRow, end_s: float) -> None:
    """What both workers do, up to `end_s`."""
    prompt_s = (row["ttft_s"] or end_s) - line.at_s
    for name, share in WAITS:
        beside = Line(line.at_s)
        if name == "prefill_compute" and row["prefill"] != row["decode"]:
            beside.add("decode_queue", prompt_s * share / 2, row["decode"])
        line.add(name, prompt_s * share, row["prefill"], beside.bars)
    if row["ttft_s"] is None:
        return
    for name, duration_s in JOINING:
        line.add(name, min(duration_s, end_s - line.at_s), row["decode"])
    line.add("output", end_s - line.at_s, row["decode"])


def _attempts(row: RequestRow, lost: str | None, workers: Mapping[str, WorkerCard], rng: random.Random) -> list[Any]:
    prefill, decode, outcome = row["prefill"], row["decode"], row["outcome"]
    ended = {"ok": "stop", "": "running"}.get(outcome, outcome)
    last = _attempt(row, (prefill, decode), ended, workers, rng)
    return [_attempt(row, (prefill, lost), FAILED, workers, rng), last] if lost else [last]


def _attempt(
    row: RequestRow, pair: tuple[str, str], outcome: str, workers: Mapping[str, WorkerCard], rng: random.Random
) -> Json:
    has_failed = outcome == FAILED
    return {
        "policy": "pair-cost",
        "reason": "expected to finish first",
        "room": f"{rng.getrandbits(64):016x}",
        "prefill_instance": pair[0],
        "decode_instance": pair[1],
        "outcome": outcome,
        "dispatched_after_s": 0.0099,
        "predicted_ttft_s": round((row["ttft_s"] or 0.4) * rng.uniform(0.7, 1.2), 4),
        "ttft_s": None if has_failed else row["ttft_s"],
        "duration_s": LOST_S if has_failed else row["duration_s"],
        "prompt_tokens": row["prompt_tokens"],
        "session": "",
        "workers": [_worker(name, card, rng) for name, card in workers.items()],
        "pairs": _pairs(pair, workers, rng),
        "scores": {"prefill": {}, "decode": {}},
    }


def _worker(name: str, card: WorkerCard, rng: random.Random) -> Json:
    return {
        "instance": name,
        "cached_tokens": rng.randrange(0, 2000),
        "queued_tokens": card["queued_tokens"],
        "num_requests": card["num_running"],
        "free_tokens": 30_000,
        "has_credit": rng.random() < 0.9,
        "prefill_s": {"base": 0.01, "slope": 4.6e-5},
        "decode_s": {"base": 0.03, "slope": 1e-6},
    }


def _pairs(chosen: tuple[str, str], workers: Mapping[str, WorkerCard], rng: random.Random) -> list[Json]:
    """The cheapest first, which is the chosen one."""
    pairs = [
        (prefill, decode)
        for prefill, first in workers.items()
        for decode, second in workers.items()
        if first["role"] != "decode" and second["role"] != "prefill"
        if (prefill == decode) == (first["role"] == "unified") and (prefill, decode) != chosen
    ]
    costs = sorted((_cost(rng) for _ in range(len(pairs) + 1)), key=lambda cost: float(cost["total_s"]))
    named = zip([chosen, *pairs], costs, strict=True)
    return [{"prefill_instance": pair[0], "decode_instance": pair[1], **cost} for pair, cost in named][:64]


def _cost(rng: random.Random) -> Json:
    most = {"queue_s": 0.6, "grant_s": 0.05, "compute_s": 0.35, "late_s": 0.1, "transfer_s": 0.08, "decode_s": 4.0}
    cost = {name: round(rng.uniform(0.3 if name == "decode_s" else 0, 1) * size, 4) for name, size in most.items()}
    cost["stall_s"] = 0.0
    ttft_s = max(cost["queue_s"], cost["grant_s"]) + cost["compute_s"]
    total_s = ttft_s + cost["late_s"] + LATER * (cost["transfer_s"] + cost["decode_s"] + cost["stall_s"])
    return {**cost, "later": LATER, "ttft_s": ttft_s, "total_s": total_s}
