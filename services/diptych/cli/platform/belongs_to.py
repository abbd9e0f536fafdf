"""Advises what to do with an option that `diptych up` does not have, but its workers or its router do."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.common.config import described, env_name, flag_name


def advice(unknown: Sequence[str]) -> str:
    """Return how to give the first of these words, or nothing where no component knows it."""
    word = unknown[0].partition("=")[0]
    if not word.startswith("-"):
        return "; a model is named by --model"
    from diptych.engine.frontend.config import WorkerConfig  # heavy; for mistakes only
    from diptych.router.config import RouterConfig

    if word in (workers := _variables(WorkerConfig)):
        one_role = "or give it to those of one role by --prefill-options, --decode-options or --unified-options"
        return f"; {word} is an option of workers: set {workers[word]} for all of them, {one_role}"
    if word in (router := _variables(RouterConfig)):
        return f"; {word} is an option of the router: set {router[word]} for it"
    return ""


def _variables(config_class: type) -> dict[str, str]:
    """Return the variable of each flag."""
    return {flag_name(name): env_name(name) for name, _, _ in described(config_class)}
