"""Formats what `diptych fit` has found: a model's terms, what they rest on, and how well they fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from diptych.cli.reports.status_report import text_table
from diptych.engine.values.step_model import TERMS, StepModel

MEANINGS: Final[Mapping[str, str]] = {
    "step": "a step without prompts; any takes so long",
    "row": "each request that gets a token",
    "context": "each token of their contexts",
    "prompt_step": "a step with prompts, in place of that",
    "prompt_token": "each token of a prompt",
    "prompt_pair": "each pair of such a token and one before it",
    "prompt": "each chunk of a prompt",
    "launch": "a step with prompts at least",
}


def as_text(model: StepModel) -> str:
    """Return a table of the terms, and what needs words."""
    evidence = model.evidence
    whose = f"{model.model} on {model.device}, KV in {model.kv_dtype}" + (f", tp {model.tp}" if model.tp > 1 else "")
    whose += f", pp {model.pp}" if model.pp > 1 else ""
    error = f"error of a step: median {evidence.median_error:.1%}, p90 {evidence.p90_error:.1%}"
    largest = (*evidence.largest, *(0.0,) * len(TERMS))[: len(TERMS)]
    rows = [
        (name, f"{seconds * 1e6:.4g}" + ("?" if name in evidence.unidentified else ""), MEANINGS[name], f"{most:,.0f}")
        for name, seconds, most in zip(TERMS, model.terms, largest, strict=True)
    ]
    lines = [whose, *text_table(("term", "us", "for", "seen up to"), rows)]
    lines.append(f"{evidence.num_steps} steps; {error}; all of them took {evidence.time_ratio:.3f} of what is expected")
    if evidence.unidentified:
        names = ", ".join(evidence.unidentified)
        lines.append(f"not identified by what was seen: {names}. Other loads may cost what this model does not know")
    return "\n".join(lines)
