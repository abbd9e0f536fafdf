"""A language for programs around a model: text, chats, outputs, choices and branches, in the order of plain Python.

    from diptych import lang

    @lang.function
    def ask(s, question):
        s += lang.system("You are brief.")
        s += lang.user(question)
        s += lang.assistant(lang.gen("answer", max_tokens=32))

    print(ask.run("What is the capital of France?", backend=lang.RuntimeEndpoint("http://localhost:8000"))["answer"])

It is a client: `RuntimeEndpoint` asks a router over HTTP, `Runtime` an engine inside the program. Expressions are
values (`expressions`), what has been said so far is one (`transcript`), and so are the rules that choose (`choices`);
`state` runs them. The names are those of SGLang's frontend language, and what they do but for the differences that
`docs/concepts/language.md` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diptych.lang.backend import Backend, BackendError
from diptych.lang.choices import GREEDY_TOKENS, TOKEN_LENGTH_NORMALIZED, UNCONDITIONAL_NORMALIZED
from diptych.lang.expressions import (
    Argument,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from diptych.lang.program import Program, function, set_default_backend
from diptych.lang.state import Forks, ProgramError, State

if TYPE_CHECKING:
    from diptych.lang.http_backend import RuntimeEndpoint
    from diptych.lang.runtime import Runtime

__all__ = [
    "GREEDY_TOKENS",
    "TOKEN_LENGTH_NORMALIZED",
    "UNCONDITIONAL_NORMALIZED",
    "Argument",
    "Backend",
    "BackendError",
    "Forks",
    "Program",
    "ProgramError",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "image",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
]

_HOMES = {"Runtime": "diptych.lang.runtime", "RuntimeEndpoint": "diptych.lang.http_backend"}


def __getattr__(name: str) -> Any:
    """Import a backend on first use: one needs an HTTP client, the other the engine."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
