"""Say which workers a load needs before any GPU is bought: `diptych plan --trace chat --rate 4 --ttft-slo-ms 1000`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from diptych.cli.plans.purchase import Proposal, Search, busiest, cached_at_best, proposals
from diptych.cli.plans.simulation import trace_words
from diptych.cli.sizing.simulate import H200, SimulateConfig, calls_of, setup_of, worker_of
from diptych.common.config import option
from diptych.common.errors import ConfigError
from diptych.planner.demand import Demand, demand
from diptych.planner.placing import Nodes
from diptych.planner.predict import predict
from diptych.planner.reach import reachable
from diptych.planner.sizing import Sizing
from diptych.planner.values import PLANNED_ROLES, Capacity, Goal, Sizes
from diptych.simulator.control import capacity_of
from diptych.simulator.outcome import Outcome
from diptych.simulator.run import simulate
from diptych.simulator.setup import WorkerSetup
from diptych.simulator.traces.call import Call
from diptych.simulator.traces.generators.named import GENERATORS

WINDOW_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Say how many workers of which role serve a load within an SLO, with the fewest GPUs, and why.

    Needs no GPU: what a step takes is a model. Proposals are predicted, and then tried in virtual time.
    """

    trace: str = option("chat", help=f"file of calls, or what to generate: {', '.join(GENERATORS)}", group="load")
    calls: int = option(0, help="calls to generate, or to read; 0: 1000, or all of a file", group="load")
    rate: float = option(0.0, help="calls a second; 0: 4, or as the file has them", group="load")
    seed: int = option(0, help="of the generated trace", group="load")
    ttft_slo_ms: float = option(1000.0, help="time to the first token; 0: any", group="slo")
    tpot_slo_ms: float = option(50.0, help="time for each token after it, in a request's mean; 0: any", group="slo")
    share: float = option(0.9, help="of the calls that are offered, that are to keep both", group="slo")
    gpus: int = option(16, help="GPUs that there may be", group="platform")
    tp: int = option(
        1, help="GPUs of a worker, or of each of its stages; the step model is of all together", group="platform"
    )
    pp: int = option(1, help="stages of a worker, each with --tp GPUs", group="platform")
    gpus_per_node: int = option(
        0, help="GPUs of a machine: workers fit one, or take several whole; 0: not said", group="platform"
    )
    step_model: str = option(H200, help=f"file of `diptych fit`, or {H200}: Llama-3-8B on an H200", group="platform")
    kv_tokens: int = option(800_000, help="tokens that a worker's KV pool holds", group="platform")
    kv_token_bytes: int = option(131_072, help="KV of one token", group="platform")
    link_gb_per_s: float = option(300.0, help="that a worker moves KV at, 10^9 bytes a second", group="platform")
    trials: int = option(6, help="divisions to try in the simulator; 0: only predict", group="results")
    json: bool = option(False, help="print JSON, for programs", group="results")

    def validate(self) -> None:
        """Raise `ConfigError` for values that cannot be."""
        if not 0 < self.share < 1:
            raise ConfigError(f"--share must be above 0 and below 1, not {self.share:g}")
        if min(self.tp, self.pp) < 1:
            raise ConfigError("--tp and --pp must be at least 1")
        self.nodes.validate()
        if self.trials < 0:
            raise ConfigError(f"--trials must not be negative, as {self.trials} is")
        self.simulation.validate()

    @property
    def simulation(self) -> SimulateConfig:
        """Return the same as a simulation."""
        names = ("trace", "calls", "rate", "seed", "ttft_slo_ms", "tpot_slo_ms", "step_model")
        sizes = ("kv_tokens", "kv_token_bytes", "link_gb_per_s")
        same = {name: getattr(self, name) for name in (*names, *sizes)}
        return SimulateConfig(tp=self.nodes.gpus_per_worker, **same)

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.gpus, self.gpus_per_node, self.tp, self.pp)

    @property
    def goal(self) -> Goal:
        return Goal(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000, self.share)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found."""

    load: Demand  # of the busiest time
    sizing: Sizing
    predicted: Sequence[Proposal]
    tried: dict[Sizes, float]  # and the share of the calls that kept the goal
    fewest: Sizes | None
    remarks: Sequence[str]


def main(config: PlanConfig) -> int:
    """Print the plan; return the exit code: 1 if no number of workers that was tried is enough."""
    calls, worker = calls_of(config.simulation), worker_of(config.simulation)
    answer = _answer(config, calls, worker)
    print(json.dumps(_as_json(answer, config), indent=2) if config.json else _as_text(answer, config, calls))
    return 0 if answer.fewest else 1


def _answer(config: PlanConfig, calls: Sequence[Call], worker: WorkerSetup) -> Answer:
    capacity, most = capacity_of(worker), config.nodes.most_workers
    load, sizing, remarks = _predicted(config, calls, capacity, cached_at_best(calls))
    if not config.trials:
        predicted = proposals(load, sizing, most)
        kept = [each.sizes for each in predicted if each.sizes]
        return Answer(load, sizing, predicted, {}, min(kept, key=lambda each: each.total, default=None), remarks)
    first = _first(load, sizing, most)
    outcome = _simulated(config, calls, worker, first, sizing.goal)  # what is really found cached, with such a fleet
    load, sizing, remarks = _predicted(config, calls, capacity, outcome.cached_len.tolist())
    goal = sizing.goal
    tried = {first: _kept(outcome, goal)}

    def try_out(sizes: Sizes) -> float:
        return _kept(_simulated(config, calls, worker, sizes, goal), goal)

    search = Search(load, sizing, most, try_out, config.trials, tried)
    fewest = search.fewest()
    return Answer(load, sizing, proposals(load, sizing, most), search.tried, fewest, remarks)


def _predicted(
    config: PlanConfig, calls: Sequence[Call], capacity: Capacity, cached_lens: Sequence[int]
) -> tuple[Demand, Sizing, Sequence[str]]:
    """Return the load of the busiest time, and the part of the goal that can be kept."""
    load = demand(busiest(calls, cached_lens, Sizing(capacity, config.goal), WINDOW_S), capacity)
    reached = reachable(config.goal, load, capacity)
    return load, Sizing(capacity, reached.goal), [each.words for each in reached.reasons]


def _first(load: Demand, sizing: Sizing, most: int) -> Sizes:
    """Return what to try first: the fewest that are predicted to do."""
    found = [each.sizes for each in proposals(load, sizing, most) if each.sizes]
    return min(found, key=lambda each: each.total, default=Sizes(both=most))


def _simulated(config: PlanConfig, calls: Sequence[Call], worker: WorkerSetup, sizes: Sizes, goal: Goal) -> Outcome:
    workers = [replace(worker, role=role) for role in PLANNED_ROLES for _ in range(sizes.of(role))]
    begun_s = time.monotonic()
    outcome = simulate(setup_of(config.simulation, "pair_cost", workers, calls), calls)
    kept = _kept(outcome, goal)
    print(f"tried {sizes}: {kept:.1%} keep the goal ({time.monotonic() - begun_s:.1f} s)", file=sys.stderr)
    return outcome


def _kept(outcome: Outcome, goal: Goal) -> float:
    """Return the share of the offered calls that kept the goal; who was not served did not."""
    in_time = outcome.is_served
    if goal.ttft_s:
        in_time = in_time & (outcome.ttft_s <= goal.ttft_s)
    if goal.tpot_s:
        in_time = in_time & (outcome.tpot_s <= goal.tpot_s)
    return float(np.mean(in_time))


# what is printed


def _as_text(answer: Answer, config: PlanConfig, calls: Sequence[Call]) -> str:
    goal, share = answer.sizing.goal, f"{answer.sizing.goal.share:.0%} of the calls"
    lines = [
        f"load       {config.trace}: {trace_words(calls)}",
        f"busiest    {answer.load.requests_per_s:.2f} calls a second, {answer.load.work:.2f} workers' time at least",
        f"goal       {share}: {_limit(goal.ttft_s)} to the first token, {_limit(goal.tpot_s)} a token",
        *(f"note       {each}" for each in answer.remarks),
        *(f"predicted  {each.family}: {_gpus(each.sizes, config)}" for each in answer.predicted),
        *(f"tried      {sizes}: {kept:.1%} keep it" for sizes, kept in answer.tried.items()),
        f"plan       {_fewest(answer, config)}",
        *_as_groups(answer, config.nodes),
    ]
    return "\n".join([*lines, *_why(answer)])


def _limit(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds else "any time"


def _fewest(answer: Answer, config: PlanConfig) -> str:
    if answer.fewest is None and answer.tried:
        return f"none of the {len(answer.tried)} that were tried keeps it: --trials tries more, --gpus allows more"
    return _gpus(answer.fewest, config)


def _gpus(sizes: Sizes | None, config: PlanConfig) -> str:
    if not sizes:
        return f"more than {config.gpus} GPUs{_on(config.nodes, config.nodes.most_workers)}"
    return f"{sizes.total * config.nodes.gpus_per_worker} GPUs{_on(config.nodes, sizes.total)}: {sizes}"


def _on(nodes: Nodes, workers: int) -> str:
    """Say which nodes so many workers take, and in groups of how many; nothing where nobody said what a node has."""
    if not nodes.gpus_per_node:
        return ""
    taken = nodes.taken(workers)
    words = f" on {taken} nodes" if taken > 1 else " on one node"
    groups = f"{workers} groups" if workers > 1 else "one group"
    return f"{words}, {groups} of {nodes.per_worker}" if nodes.per_worker > 1 else words


def _as_groups(answer: Answer, nodes: Nodes) -> list[str]:
    """Say how to start workers that take several nodes, or have stages."""
    if answer.fewest is None or (nodes.pp == 1 and nodes.per_worker == 1):
        return []
    options = f"--tp {nodes.tp}" + (f" --pp {nodes.pp}" if nodes.pp > 1 else "")
    if nodes.per_worker == 1:
        return [f"groups     each worker: {options}, on one node"]
    return [f"groups     each worker: {options} --nnodes {nodes.per_worker}, {nodes.gpus_per_node} GPUs a node"]


def _why(answer: Answer) -> list[str]:
    if answer.fewest is None:
        return []
    found = predict(answer.sizing.capacity, answer.fewest, answer.load, answer.sizing.goal)
    held = answer.sizing.held(answer.fewest, answer.load)
    ttft_s = found.ttft_s(answer.load, answer.sizing.goal.share)
    return [
        f"why        at the busiest time prompts keep those who compute them {found.busy:.0%} busy, "
        f"{answer.sizing.goal.share:.0%} of the first tokens come within {ttft_s:.2f} s,",
        f"           a token takes {found.step_s * 1000:.1f} ms, and {held:.2f} times the load would still be held",
    ]


def _as_json(answer: Answer, config: PlanConfig) -> dict[str, object]:
    return {
        "plan": answer.fewest and answer.fewest._asdict(),
        "gpus": answer.fewest and answer.fewest.total * config.nodes.gpus_per_worker,
        **_nodes_json(answer.fewest, config.nodes),
        "goal": answer.sizing.goal._asdict(),
        "predicted": {each.family: each.sizes and each.sizes._asdict() for each in answer.predicted},
        "tried": [{**sizes._asdict(), "kept": kept} for sizes, kept in answer.tried.items()],
        "busiest": {"calls_per_s": answer.load.requests_per_s, "work": answer.load.work},
        "notes": list(answer.remarks),
    }


def _nodes_json(sizes: Sizes | None, nodes: Nodes) -> dict[str, object]:
    if not nodes.gpus_per_node:
        return {}
    return {"nodes": sizes and nodes.taken(sizes.total), "nodes_per_worker": nodes.per_worker}
