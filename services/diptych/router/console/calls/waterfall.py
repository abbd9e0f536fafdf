"""Where the time of a call went: bars one after the other, from its first byte to its last. Pure.

What the router did lies between the marks of the call. What a worker did is placed by its duration, from the moment
that the leg was sent: no clock but the router's says when. What both workers did at once is one bar, the one that the
request waited for, with the other as a part of it. Rule: every bar has a name for what was done or waited for in its
time; what has none is counted by `unnamed_s`, and never shown as if it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from diptych.router.console.calls.call_facts import AttemptFacts, CallFacts, LegTimes
from diptych.router.console.state import Bar
from diptych.router.errors import DISCONNECTED
from diptych.router.tracing.record import Mark, Stage

ROUTER: Final = "router"  # where the work was done that no worker does
PREPARING: Final = ("render", "tokenize", "grammar")  # parts of "prepare"
NEXT: Final[Mapping[str, str]] = {  # what a call does after a mark
    "": "read",
    "read": "parse",
    "parse": "check",
    "check": "admit",
    "admit": "prepare",
    "render": "prepare",
    "tokenize": "prepare",
    "grammar": "prepare",
    "prepare": "select",
}


class Span(NamedTuple):
    """A part of a call. Times on the monotonic clock."""

    name: str
    begun_s: float
    ended_s: float
    where: str = ROUTER
    parts: tuple[Span, ...] = ()
    is_failure: bool = False


def bars_of(call: CallFacts, now_s: float) -> list[Bar]:
    """Return the bars of a call up to its end, or to now."""
    return [_bar(span, call.begun_s) for span in _spans(call, now_s)]


def unnamed_s(call: CallFacts, now_s: float) -> float:
    """Return how much of the time of a call no bar names."""
    end_s = now_s if call.ended_s is None else call.ended_s
    return max(0.0, end_s - call.begun_s - sum(span.ended_s - span.begun_s for span in _spans(call, now_s)))


def _spans(call: CallFacts, now_s: float) -> list[Span]:
    end_s = now_s if call.ended_s is None else call.ended_s
    if not call.marks:  # nobody followed it
        return list(_generation(call, end_s)) if call.outputs else _before(call, end_s)
    if not call.outputs:
        return _before(call, end_s)
    asked_s = min(attempts[0].asked_s for attempts in call.outputs)
    before = _marked([mark for mark in call.marks if mark[1] <= asked_s], call.begun_s)
    line = [*before, *_gap("gate", before, call.begun_s, asked_s)]
    line += _generation(call, end_s)
    return [*line, *_after(call, line[-1].ended_s, end_s)]


def _generation(call: CallFacts, end_s: float) -> Iterable[Span]:
    """A call of one output shows its attempts; one of several, outputs beside each other."""
    if len(call.outputs) == 1:
        return list(_output(call.outputs[0], end_s, call.writes))
    outputs = [list(_output(attempts, end_s, ())) for attempts in call.outputs]
    parts = tuple(Span("output", each[0].begun_s, each[-1].ended_s, parts=tuple(each)) for each in outputs)
    return [Span("generate", min(each.begun_s for each in parts), max(each.ended_s for each in parts), parts=parts)]


# before the workers, and after them


def _before(call: CallFacts, end_s: float) -> list[Span]:
    """A call that no worker has heard of: what it did when it ended follows from what it had done."""
    if not call.marks and not call.path:
        return []
    done = _marked(call.marks, call.begun_s)
    last = call.marks[-1][0] if call.marks else ""
    answered_s = call.answered_s if call.answered_s is not None else end_s
    if last in NEXT:
        done += _gap(NEXT[last], done, call.begun_s, answered_s)
    return [*done, *_gap("answer", done, call.begun_s, end_s)]


def _after(call: CallFacts, begun_s: float, end_s: float) -> list[Span]:
    """What comes when no attempt runs any more: first what is left to wait for, then the end of the answer."""
    last = call.last_attempt
    line = [Span(name, *times) for name, times in _late(call.marks, begun_s)]
    from_s = line[-1].ended_s if line else begun_s
    if last is None or last.ended_s is None or end_s <= from_s:
        return line
    if last.is_failure and call.outcome in ("", DISCONNECTED):
        return [*line, Span("pause", from_s, end_s)]
    return [*line, *_cut(Span("answer", from_s, end_s), call.writes)]


def _late(marks: Iterable[Mark], begun_s: float) -> Iterator[tuple[str, tuple[float, float]]]:
    for name, at_s in marks:
        if at_s > begun_s:
            yield name, (begun_s, at_s)
            begun_s = at_s


def _marked(marks: Iterable[Mark], begun_s: float) -> list[Span]:
    """Return the spans between marks; those of which a request is prepared, as one."""
    line: list[Span] = []
    preparing: list[Span] = []
    for name, at_s in marks:
        span = Span(name, begun_s, at_s)
        begun_s = at_s
        if name in PREPARING:
            preparing.append(span)
        elif name == "prepare":
            line.append(_prepare(preparing, at_s) if preparing else span)
            preparing = []
        else:
            line.append(span)
    if preparing:
        line.append(_prepare(preparing, preparing[-1].ended_s))
    return line


def _prepare(parts: Sequence[Span], ended_s: float) -> Span:
    return Span("prepare", parts[0].begun_s, ended_s, parts=tuple(parts))


def _gap(name: str, line: Sequence[Span], begun_s: float, ended_s: float) -> list[Span]:
    """Return a span from the end of a line, if that is not there already."""
    from_s = line[-1].ended_s if line else begun_s
    return [Span(name, from_s, ended_s)] if ended_s > from_s else []


# the attempts of an output


def _output(attempts: Sequence[AttemptFacts], end_s: float, writes: Sequence[Stage]) -> Iterator[Span]:
    """Yield choices, attempts and pauses in their order. What ran beside an attempt is a part of its parts."""
    line = sorted(attempts, key=lambda attempt: attempt.begun_s)
    at_s, index, name = line[0].asked_s, 0, "attempt"
    while index < len(line):
        attempt = line[index]
        beside, upto_s, next_index = _overlap(line, index, end_s)
        yield from _positive(Span("pause", at_s, attempt.asked_s))
        yield from _positive(Span("select", max(at_s, attempt.asked_s), attempt.begun_s))
        yield _attempt(name, attempt, upto_s, beside, writes)
        name = _next_name(name, attempt)
        at_s, index = max(upto_s, attempt.begun_s), next_index


def _next_name(name: str, attempt: AttemptFacts) -> str:
    """Return what the attempt after this one, of such a name, is called."""
    if attempt.outcome == "moved":
        return "move"
    if name == "replay" or attempt.first_token_s is not None:
        return "replay"
    return "hedge" if attempt.outcome == "hedged" else "retry"


def _overlap(line: Sequence[AttemptFacts], index: int, end_s: float) -> tuple[list[Span], float, int]:
    """Return what ran beside an attempt, until when it is what the request waited for, and which comes after it.

    Of two that race, the one that lost is the one beside, unless it began first: then it counts until the other did.
    """
    attempt, beside = line[index], list[Span]()
    upto_s = _end(attempt, end_s)
    index += 1
    while index < len(line) and line[index].begun_s < upto_s:
        other = line[index]
        if attempt.outcome == "hedged" or attempt.is_failure:
            return beside, other.asked_s, index
        beside.append(Span("hedge", other.begun_s, _end(other, end_s), _hex(other.decode_id)))
        index += 1
    return beside, upto_s, index


def _attempt(name: str, attempt: AttemptFacts, upto_s: float, beside: Sequence[Span], writes: Sequence[Stage]) -> Span:
    both = [*_decoding(attempt), *beside]
    tiles = [tile for each in _tiles(attempt, upto_s) for tile in _cut(each, writes if each.name == "output" else ())]
    parts = tuple(tile._replace(parts=(*tile.parts, *_within(tile, both))) for tile in tiles)
    upto_s = max(upto_s, attempt.begun_s)
    return Span(name, attempt.begun_s, upto_s, _hex(attempt.decode_id), parts, attempt.is_failure)


def _tiles(attempt: AttemptFacts, upto_s: float) -> Iterator[Span]:
    """Yield what the request waited for, one after the other, up to `upto_s`, without a gap."""
    prefill, first_s = _hex(attempt.prefill_id), attempt.first_token_s
    at_s, until_s = attempt.begun_s, upto_s if first_s is None else min(first_s, upto_s)
    times = attempt.prompt
    for name, duration_s in _of_prompt(times):
        ended_s = min(at_s + duration_s, until_s)
        chunks = _chunks(times, at_s, ended_s, prefill) if name == "prefill_compute" else ()
        yield from _positive(Span(name, at_s, ended_s, prefill, tuple(chunks)))
        at_s = ended_s
    yield from _positive(Span("prefill" if times is None else "messages", at_s, until_s, prefill))
    at_s = until_s
    for stage in _decoding(attempt):
        ended_s = min(stage.ended_s, upto_s)
        if ended_s > at_s:
            yield stage._replace(begun_s=at_s, ended_s=ended_s)
            at_s = ended_s
    yield from _positive(Span("output", at_s, upto_s, _hex(attempt.decode_id)))


def _of_prompt(times: LegTimes | None) -> Iterator[tuple[str, float]]:
    if times is not None:
        yield "prefill_tokenize", times.tokenize_us / 1e6
        yield "prefill_queue", times.queue_us / 1e6
        yield "prefill_compute", times.compute_us / 1e6


def _chunks(times: LegTimes | None, begun_s: float, ended_s: float, where: str) -> Iterator[Span]:
    """Yield the steps that computed a prompt, if they were several: from the begin of one to that of the next."""
    if times is None or not times.chunk_us:
        return
    begins_s = [begun_s, *(begun_s + chunk_us / 1e6 for chunk_us in times.chunk_us), ended_s]
    for from_s, to_s in itertools.pairwise(begins_s):
        yield from _positive(Span("chunk", from_s, min(to_s, ended_s), where))


def _decoding(attempt: AttemptFacts) -> Iterator[Span]:
    """Yield what the decode leg did before its first own token, if it has told."""
    times, at_s = attempt.decode, attempt.begun_s
    if times is None:
        return
    stages = ("queue", times.queue_us), ("transfer", times.transfer_us), ("verify", times.verify_us)
    for name, duration_us in (*stages, ("join", times.join_us)):
        ended_s = at_s + duration_us / 1e6
        yield from _positive(Span(f"decode_{name}", at_s, ended_s, _hex(attempt.decode_id)))
        at_s = ended_s


# spans


def _cut(span: Span, writes: Sequence[Stage]) -> Iterator[Span]:
    """Yield the span without the writes in it that waited for the client, and those."""
    at_s = span.begun_s
    for write in writes:
        begun_s, ended_s = max(write.begun_s, at_s), min(write.ended_s, span.ended_s)
        if ended_s > begun_s:
            yield from _positive(span._replace(begun_s=at_s, ended_s=begun_s))
            yield Span(write.name, begun_s, ended_s)
            at_s = ended_s
    yield from _positive(span._replace(begun_s=at_s))


def _within(tile: Span, others: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of others that lie within a tile, which is none of them."""
    for other in others:
        begun_s, ended_s = max(other.begun_s, tile.begun_s), min(other.ended_s, tile.ended_s)
        if ended_s > begun_s and other.name != tile.name:
            yield other._replace(begun_s=begun_s, ended_s=ended_s)


def _positive(span: Span) -> Iterator[Span]:
    if span.ended_s > span.begun_s:
        yield span


def _end(attempt: AttemptFacts, end_s: float) -> float:
    return end_s if attempt.ended_s is None else attempt.ended_s


def _bar(span: Span, origin_s: float) -> Bar:
    return {
        "name": span.name,
        "begun_s": span.begun_s - origin_s,
        "duration_s": span.ended_s - span.begun_s,
        "where": span.where,
        "is_failure": span.is_failure,
        "parts": [_bar(part, origin_s) for part in span.parts],
    }


def _hex(number: int) -> str:
    return f"{number:016x}"
