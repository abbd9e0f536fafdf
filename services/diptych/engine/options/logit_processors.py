"""What `--logit-processors` says: names for requests, and where the operator's code is."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping

from diptych.common.errors import ConfigError
from diptych.engine.values.logit_processor import LogitProcessor

FLAG = "--logit-processors"


def parse_processors(texts: Iterable[str]) -> Mapping[str, tuple[str, str]]:
    """Return the module and the attribute by each name. Raises `ConfigError`."""
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        name, _, place = text.partition("=")
        module, _, attribute = place.partition(":")
        if not (name and module and attribute):
            raise ConfigError(f"{FLAG} takes NAME=MODULE:FUNCTION, not {text!r}")
        if name in found:
            raise ConfigError(f"{FLAG} has two of the name {name!r}")
        found[name] = module, attribute
    return found


def load_processors(texts: Iterable[str]) -> Mapping[str, LogitProcessor]:
    """Import them. Raises `ConfigError` for what is not there, or can't be called."""
    return {name: _load(name, *place) for name, place in parse_processors(texts).items()}


def _load(name: str, module: str, attribute: str) -> LogitProcessor:
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{FLAG} {name}={module}:{attribute} is not to be had: {error}") from error
    if not callable(found):
        raise ConfigError(f"{FLAG} {name}={module}:{attribute} can't be called")
    processor: LogitProcessor = found
    return processor
