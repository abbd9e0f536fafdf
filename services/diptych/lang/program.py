"""Functions of a state as programs: run once, for many inputs at once, as a stream, or traced."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from diptych.common.errors import InvalidRequest
from diptych.generation.sampling_params import SamplingParams
from diptych.lang.backend import Backend
from diptych.lang.expressions import SAMPLING, Argument, Expression, UnknownValue, sampling
from diptych.lang.state import State
from diptych.lang.tracer import TracedState, fixed_beginning

NUM_THREADS: Final = 64  # runs of a batch at once


class _Default:
    """The backend of runs that name none."""

    backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """Let runs that name no backend use this one."""
    _Default.backend = backend


def function(work: Callable[..., Any]) -> Program:
    """Make a program of a function whose first argument is a state."""
    return Program(work)


class Program:
    """A function of a state and of arguments."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.__doc__, self.name = work.__doc__, work.__name__
        self._work = work
        self._names = list(inspect.signature(work).parameters)[1:]

    def __call__(self, state: Any, *args: Any, **arguments: Any) -> Any:
        """Run it as a part of another program."""
        return self._work(state, *args, **arguments)

    def run(self, *args: Any, backend: Backend | None = None, stream: bool = False, **given: Any) -> State:
        """Run it, and return its state: at its end, or with `stream` at once.

        Fields of `SamplingParams` that are no arguments of the function hold for all outputs that don't say otherwise.
        Raises `ProgramError`; one that is streamed raises where its text or its variables are read.
        """
        state, arguments = self._begun(backend, stream, given)
        if stream:
            threading.Thread(target=self._finish, args=(state, args, arguments), daemon=True, name=self.name).start()
            return state
        self._finish(state, args, arguments)
        if state.error is not None:
            raise state.error
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any]],
        *,
        backend: Backend | None = None,
        num_threads: int = NUM_THREADS,
        **defaults: Any,
    ) -> list[State]:
        """Run it for each set of arguments, many at once, and return the states in their order.

        One that fails has its `error`; the others go on.
        """

        def run(arguments: Mapping[str, Any]) -> State:
            state, own = self._begun(backend, False, {**defaults, **arguments})
            self._finish(state, (), own)
            return state

        with ThreadPoolExecutor(max(1, min(num_threads, len(batch))), thread_name_prefix=self.name) as pool:
            return list(pool.map(run, batch))

    def trace(self, **arguments: Any) -> list[Expression]:
        """Return what it appends, up to where it needs a value that is known only in a run.

        An argument that is not given stands there as an `Argument`.
        """
        state = TracedState()
        with suppress(UnknownValue):
            self._work(state, **{name: arguments.get(name, Argument(name)) for name in self._names})
        return state.parts

    def cache(self, backend: Backend | None = None, **arguments: Any) -> int:
        """Have the model read what all runs begin with, so that its KV is there; return its number of tokens.

        That is 0 where runs have nothing in common.
        """
        known = _known(backend)
        said = fixed_beginning(self.trace(**arguments))
        if not (said.messages or said.text):
            return 0
        prompt = known.encode_chat(said.messages) if said.messages else known.encode(said.text, is_first=True)
        known.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        return len(prompt)

    def _begun(self, backend: Backend | None, stream: bool, given: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
        defaults = sampling({name: given[name] for name in SAMPLING & given.keys() if name not in self._names})
        arguments = {name: value for name, value in given.items() if name not in defaults}
        SamplingParams(**defaults).validate()
        return State(_known(backend), defaults, streams=stream), arguments

    def _finish(self, state: State, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        state.written_here()
        try:
            state.ret_value = self._work(state, *args, **arguments)
        except Exception as error:
            state.fail(error)
        finally:
            state.end()


def _known(backend: Backend | None) -> Backend:
    chosen = backend or _Default.backend
    if chosen is None:
        raise InvalidRequest("no backend: give one to the run, or to set_default_backend", param="backend")
    return chosen
