"""What was achieved beside what could have been: with hindsight, and as a fluid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diptych.simulator.fluid import Fluid
from diptych.simulator.hindsight import Hindsight, Trial
from diptych.simulator.report.summary import Summary
from diptych.simulator.setup import Action, Drain, Flip, Start


def oracle_words(results: Mapping[str, Summary], bound: Fluid, searched: Hindsight | None) -> Iterator[str]:
    """Yield lines: the bound, what hindsight finds, and what part of both each result is."""
    offered = next(iter(results.values())).offered
    yield (
        f"fluid      at most {_share(bound.most_good, offered)} of the calls can keep their SLO, and all of them take "
        f"{bound.least_gpu_hours:.3g} GPU-hours at least"
    )
    if searched is not None:
        yield f"hindsight  {_trial_words(searched.static)}; {searched.num_runs} runs"
        if searched.divided is not searched.static:
            yield f"  changing {_trial_words(searched.divided)}"
    for name, each in results.items():
        parts = [f"{_share(each.good, bound.most_good)} of the fluid bound"]
        if searched is not None:
            best = max(searched.static, searched.divided, key=lambda trial: trial.good)
            parts.append(
                f"{_share(each.good, best.good)} of what hindsight serves well, for "
                f"{_share(each.gpu_hours, best.gpu_hours)} of its GPU-hours"
            )
        yield f"  of it    {name}: {', '.join(parts)}"


def oracle_fields(bound: Fluid, searched: Hindsight | None) -> dict[str, Any]:
    """Return the same as plain values."""
    found: dict[str, Any] = {"fluid": bound._asdict()}
    if searched is not None:
        trials = {"static": searched.static, "divided": searched.divided}
        found["hindsight"] = {name: _trial_fields(each) for name, each in trials.items()}
        found["hindsight"]["runs"] = searched.num_runs
    return found


def _trial_words(trial: Trial) -> str:
    changes = "".join(f", {_action_words(each)}" for each in trial.actions)
    return f"{trial.policy}, {trial.sizes}{changes}: {trial.good} good for {trial.gpu_hours:.3g} GPU-hours"


def _trial_fields(trial: Trial) -> dict[str, Any]:
    return {
        "policy": trial.policy,
        "workers": trial.sizes._asdict(),
        "actions": [_action_words(each) for each in trial.actions],
        "good": trial.good,
        "gpu_hours": trial.gpu_hours,
    }


def _action_words(action: Action) -> str:
    match action:
        case Start(at_s, worker):
            return f"one {worker.role.value} more at {at_s:.0f} s"
        case Drain(at_s, worker_id):
            return f"worker {worker_id} leaves at {at_s:.0f} s"
        case Flip(at_s, worker_id, role):
            return f"worker {worker_id} serves {role.value} from {at_s:.0f} s on"
        case _:
            return f"worker {action.worker_id} dies at {action.at_s:.0f} s"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
