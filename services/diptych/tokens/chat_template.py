"""Renders a chat template: the model's own Jinja program, which is code that came with a file and is not trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context

from diptych.common.errors import ConfigError, InvalidRequest
from diptych.tokens.bounded_templates import BoundedEnvironment
from diptych.tokens.template_meter import METER, Meter, TooMuchWork
from diptych.tokens.template_metering import text_of

Message = Mapping[str, Any]
MAX_TEMPLATE_BYTES: Final = 1 << 20  # of a file; the longest known take a hundredth of it
MAX_LAYOUT: Final = 1000  # characters, of a time
_MARKS: Final = ("{{", "{%")  # of a template, and of no file's name
# what every template has, beside its own parameters
_GIVEN: Final = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
_ABSENT: Final[Mapping[str, Any]] = {"documents": None}  # which Hugging Face has in any case
# settings of thinking, which a client may make for models of all kinds: a template without them has nothing to switch
_FOR_ALL: Final = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
NOT_COMPILED = (TemplateError, MemoryError, RecursionError, SyntaxError)  # the last three: nested too deep
# what the program in a template can run into with messages it does not expect
TEMPLATE_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_template(given: str) -> str:
    """Return a template that was given as such, or as the file that holds it. Raises `ConfigError`."""
    if any(mark in given for mark in _MARKS):
        return given
    path = Path(given).expanduser()
    try:
        if path.stat().st_size <= MAX_TEMPLATE_BYTES:
            return path.read_text(encoding="utf-8")
        problem = f"it has more than {MAX_TEMPLATE_BYTES} bytes"
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text"
    raise ConfigError(f"--chat-template {given[:200]}: {problem}; give a file with a Jinja template, or the template")


class ChatTemplate:
    """A compiled template. The environment has what Hugging Face's has, so that published templates work unchanged."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Said])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... as the template names them
        self._known = {**environment.globals, **_ABSENT, **special_tokens}  # whatever is given
        self.source = source
        try:
            self._template = environment.from_string(source)
            self._reads = frozenset(find_undeclared_variables(environment.parse(source)))
        except NOT_COMPILED as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt. Raises `InvalidRequest` with the template's words when it rejects the messages."""
        if parameters:
            self._check(parameters)
        given = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        try:
            meter = Meter()
            context = self._template.new_context({**self._known, **parameters, **given, METER: meter}, shared=True)
            return "".join(self._template.root_render_func(context))  # all of it was counted
        except SecurityError as error:
            raise ConfigError(f"the model's chat template tries to leave its sandbox: {error}") from None
        except TooMuchWork as error:
            message = f"the model's chat template does {error} with these messages: send fewer or shorter ones"
            raise InvalidRequest(message, param="messages") from None
        except TEMPLATE_FAILURES as error:
            message = f"the model's chat template rejects these messages: {error}"
            raise InvalidRequest(message, param="messages") from None

    def reads(self, name: str) -> bool:
        """Tell whether the template looks at a variable of that name."""
        return name in self._reads

    def _check(self, parameters: Mapping[str, Any]) -> None:
        own = self._reads - self._special_tokens.keys() - _GIVEN
        unknown = next((name for name in parameters if name not in own | _FOR_ALL), None)
        if unknown is not None:
            words = f"the model's chat template has no parameter {unknown!r}; it has {', '.join(sorted(own)) or 'none'}"
            raise InvalidRequest(words, param="chat_template_kwargs")


class _Said(Extension):
    """`{% generation %}`: what the model says, told apart for training. Here it is a block like any other."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


@jinja2.pass_context
def _raise_exception(context: Context, message: object) -> NoReturn:
    raise jinja2.TemplateError(text_of(context.parent[METER], message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_LAYOUT:
        raise TooMuchWork(f"more than {MAX_LAYOUT:,} characters")
    return datetime.now().strftime(layout)
