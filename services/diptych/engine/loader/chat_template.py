"""Renders a chat template: the model's own Jinja program, which is code that came with a file and is not trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.common.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
# what the program in a template can run into with messages it does not expect
TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """A compiled template. The environment has what Hugging Face's has, so that published templates work unchanged."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... as the template names them
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the prompt. Raises `InvalidRequest` with the template's words when it rejects the messages."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except SecurityError as error:
            raise ConfigError(f"the model's chat template tries to leave its sandbox: {error}") from None
        except TEMPLATE_FAILURES as error:
            message = f"the model's chat template rejects these messages: {error}"
            raise InvalidRequest(message, param="messages") from None


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike Jinja's own filter: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
