"""How fast workers and links are, learned from the timings of the requests that they served. Pure.

Rule: what was measured last counts most. Lines are learned from all workers, as that of one would be lost in the noise
of its few measurements; a worker's own *pace* scales them once it clearly differs. A worker that has not been measured
for long is taken for any other again: a slow moment must not keep requests from it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diptych.generation.slo import NO_SLO, Slo
from diptych.router.choose.fits import MEMORY, MIN_POINTS, OUTLIER, Curve, CurveFit, Drift, Fit, Line, Pace, Ratio
from diptych.router.choose.stakes import urgency

PATIENCE: Final = 8 * MEMORY  # measurements of others that make those of a worker fade
PRIOR_PREFILL: Final = Curve(0.005, 1e-4)  # 10,000 tokens/s: only what is cached and queued counts until measured
PRIOR_DECODE: Final = Line(0.01, 1e-7)
PRIOR_TRANSFER: Final = Line(0.001, 1.0)  # nothing of it hidden behind computing
PRIOR_OUTPUT_LEN: Final = 100.0
QUIET: Final = 6.0  # times the usual gap between requests; a longer one counts as so long, and in the long run as less
MAX_BUSY: Final = 1 - 1 / math.sqrt(MEMORY)  # so many measurements can't tell more from always


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """What is known of one worker's speed."""

    prefill: Curve = PRIOR_PREFILL  # seconds to compute a prompt, by its tokens that are not cached
    decode: Line = PRIOR_DECODE  # seconds between two tokens of an output, by the tokens of all contexts there
    grant_wait_s: float = 0.0  # decode: for pages, where requests had to wait for them
    transfer: Line = PRIOR_TRANSFER  # prefill: seconds that KV delays, by those that the tested link takes for it
    links: Mapping[int, Line] = field(default_factory=dict)  # the same to peers whose link clearly differs

    def link(self, peer_id: int) -> Line:
        return self.links.get(peer_id, self.transfer)


UNKNOWN: Final = WorkerSpeed()


class RecentMeans(NamedTuple):
    """What requests and prefill workers are like lately, in the mean."""

    busy: float = 0.0  # share of the workers that have a prompt to compute, whenever a request comes
    prompt_s: float = 0.0  # that a prompt is computed; 0: not known
    link_s: float = 0.0  # that links take for its KV
    found: float = 1.0  # tokens of prompts that were cached, for each that was not
    urgency: float = 0.0  # see `stakes`; 0: nobody said an SLO
    rate: float = 0.0  # requests a second of this router; 0: not known

    @property
    def crowd(self) -> float:
        """Return how many prompts a second of work delays for each second that it lasts, until its worker is idle."""
        return self._delayed(self.busy)

    @property
    def link_crowd(self) -> float:
        """Return the same for a second of a link."""
        return self._delayed(self.busy * self.link_s / self.prompt_s if self.prompt_s else 0.0)

    def _delayed(self, busy: float) -> float:
        rate = self.busy / self.prompt_s if self.prompt_s else 0.0
        return rate / (1 - min(MAX_BUSY, busy))

    @property
    def reuse(self) -> float:
        """Return how often a cached token will be found: once at most, for those that are evicted next."""
        return min(1.0, self.found)


UNKNOWN_USUAL: Final = RecentMeans()


class _Lines(NamedTuple):
    """The fitted lines of all workers."""

    prefill: Curve
    decode: Line
    transfer: Line


class _Worker:
    """What was measured of one worker."""

    def __init__(self) -> None:
        self.prefill = Pace()
        self.decode = Pace()
        self.grant_wait = Ratio()
        self.links: dict[int, Pace] = {}
        self.odd_links: dict[int, Pace] = {}  # those that clearly differ from others: few, if any
        self.measured_at = 0  # which of all measurements was its last


class Estimates:
    """What is known of all workers. Tell it what was measured; ask it for values."""

    def __init__(self) -> None:
        self._prefill = CurveFit()
        self._decode = Fit()
        self._transfer = Fit()
        self._grant_wait = Ratio()
        self._workers: dict[int, _Worker] = {}
        self._number = 0  # of measurements
        self._lines: _Lines | None = None  # derived; cleared by news
        self._learned: dict[int, WorkerSpeed] = {}  # likewise
        self._output_len = Drift()
        self._busy = Ratio()
        self._found = Ratio()
        self._urgency: Ratio | None = None  # once somebody has said an SLO
        self._gap_s = Drift()  # from one request to the next
        self._came_s = math.nan  # the last one

    @property
    def output_len(self) -> float:
        """Tokens that an output has, as a rule."""
        return self._output_len.value(PRIOR_OUTPUT_LEN)

    @property
    def usual(self) -> RecentMeans:
        prompt_s = self._prefill.mean_y if self._prefill.weight else 0.0
        link_s = self._transfer.mean_x if self._transfer.weight else 0.0
        found, urgent = self._found.value(UNKNOWN_USUAL.found), self._urgency.value(0.0) if self._urgency else 0.0
        gap_s = self._gap_s.value(0.0)
        return RecentMeans(self._busy.value(0.0), prompt_s, link_s, found, urgent, 1 / gap_s if gap_s else 0.0)

    @property
    def are_measured(self) -> bool:
        """Whether the speed of any worker is known."""
        return self._prefill.weight > 0

    def of(self, instance_id: int) -> WorkerSpeed:
        if instance_id not in self._learned:
            self._learned[instance_id] = self._derive(self._workers.get(instance_id) or _Worker())
        return self._learned[instance_id]

    def forget(self, instance_id: int) -> None:
        """The worker is gone; what the fleet learned from it stays."""
        self._workers.pop(instance_id, None)
        self._learned.clear()
        for worker in self._workers.values():
            worker.links.pop(instance_id, None)
            worker.odd_links.pop(instance_id, None)

    # what was measured

    def came(self, now_s: float, busy_share: float, slo: Slo = NO_SLO) -> None:
        """A request came when such a share of the prefill workers had prompts to compute."""
        self._busy.learn(busy_share)
        if not math.isnan(self._came_s):
            usual_s = self._gap_s.value(math.inf) or math.inf
            gap_s = now_s - self._came_s  # a quiet night says nothing of the morning
            self._gap_s.learn(min(gap_s, QUIET * usual_s), min(gap_s, OUTLIER * usual_s))
        self._came_s = now_s
        if self._urgency is None and slo != NO_SLO:
            self._urgency = Ratio()
        if self._urgency is not None:
            self._urgency.learn(urgency(slo))

    def prefilled(self, instance_id: int, num_tokens: int, cached_tokens: int, duration_s: float) -> None:
        """A worker computed so many tokens of a prompt, behind those that it had cached."""
        expected_s = self._expected.prefill.at(num_tokens, cached_tokens)
        self._prefill.learn(num_tokens, cached_tokens, _credible(duration_s, expected_s, self._prefill))
        self._worker(instance_id).prefill.learn(expected_s, duration_s)
        self._found.learn(cached_tokens, num_tokens)

    def decoded(self, instance_id: int, context_tokens: int, gap_s: float) -> None:
        """A worker with contexts of so many tokens took so long from each token of an output to the next."""
        expected_s = self._expected.decode.at(context_tokens)
        self._decode.learn(context_tokens, _credible(gap_s, expected_s, self._decode))
        self._worker(instance_id).decode.learn(expected_s, gap_s)

    def granted(self, instance_id: int, wait_s: float) -> None:
        """A decode worker that was short of pages took so long to grant them."""
        self._grant_wait.learn(wait_s)
        self._worker(instance_id).grant_wait.learn(wait_s)

    def transferred(self, prefill_id: int, decode_id: int, tested_s: float, delay_s: float) -> None:
        """KV, for which the link took `tested_s` when it was tested, kept a request waiting for so long."""
        usual = self._expected.transfer
        expected_s = usual.at(tested_s)
        self._transfer.learn(tested_s, _credible(delay_s, expected_s, self._transfer))
        worker = self._worker(prefill_id)
        link = worker.links.setdefault(decode_id, Pace())
        link.learn(expected_s, delay_s)
        if link.scale(usual, 1.0) is usual:
            worker.odd_links.pop(decode_id, None)
        else:
            worker.odd_links[decode_id] = link

    def ended(self, output_len: int) -> None:
        """An output was complete."""
        self._output_len.learn(output_len, output_len)

    def _worker(self, instance_id: int) -> _Worker:
        """Return a worker that was measured."""
        self._lines = None
        self._learned.clear()
        self._number += 1
        worker = self._workers.get(instance_id)
        if worker is None:
            worker = self._workers[instance_id] = _Worker()
        worker.measured_at = self._number
        return worker

    def _derive(self, worker: _Worker) -> WorkerSpeed:
        kept = math.exp((worker.measured_at - self._number) / PATIENCE)
        lines = self._expected
        return WorkerSpeed(
            worker.prefill.scale(lines.prefill, kept),
            worker.decode.scale(lines.decode, kept),
            worker.grant_wait.value(self._grant_wait.value(0.0)),
            lines.transfer,
            {peer_id: pace.scale(lines.transfer, kept) for peer_id, pace in worker.odd_links.items()},
        )

    @property
    def _expected(self) -> _Lines:
        """What is expected of a worker of which nothing is known."""
        if self._lines is None:
            self._lines = _Lines(
                self._prefill.curve(PRIOR_PREFILL), self._decode.line(PRIOR_DECODE), _no_slower(self._transfer)
            )
        return self._lines


def _credible(measured_s: float, expected_s: float, fit: Fit | CurveFit) -> float:
    """One absurd time must not change what is expected of all workers. A change that lasts does so step by step.

    A time that is too short changes a mean by little anyway: a fleet that was slow when it started is soon believed.
    """
    is_known = fit.weight >= MIN_POINTS and expected_s > 0
    return min(measured_s, expected_s * OUTLIER) if is_known else measured_s


def _no_slower(transfer: Fit) -> Line:
    """Links are as fast as they were when tested: what KV delays beyond that is the same on each, and a fixed part."""
    line = transfer.line(PRIOR_TRANSFER)
    return Line(max(0.0, transfer.mean_y - transfer.mean_x), 1.0) if line.slope > 1 else line
