"""Follows calls from their first byte to their last word, and hands them on: to be exported, and to the console.

OpenTelemetry's own environment variables say whether traces are exported. Without them nothing of it is imported, and
calls are followed only while somebody looks at the console.
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from diptych.common.errors import ConfigError
from diptych.router.tracing.record import CallTrace, EntryPoint, parent_of
from diptych.router.values.request import ChatPrompt, ClientRequest

WINDOW_S: Final = 0.2  # for each process of the router: all of them together follow as many calls as one alone
MAX_IN_WINDOW: Final = 6  # calls that are followed for the console: 30 a second, which take 0.2 % of a core
LINGER_S: Final = 1.0  # after a call's end, for the last words of its prefill legs
PAUSE_S: Final = 0.005  # at least, between two times that calls are handed on: a timer a call costs more than it does
MAX_INT: Final = (1 << 63) - 1  # in a trace; a client may ask for more
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # the first that is set counts


class Taker(Protocol):
    """Who wants to have the calls that were followed. It neither blocks nor fails."""

    def add(self, call: CallTrace) -> None: ...


class Export(Taker, Protocol):
    """Where traces go, whatever becomes of them."""

    async def close(self) -> None:
        """Send what is left, if it can be done soon."""
        ...


OpenExport = Callable[[Mapping[str, str]], Export]  # of the attributes of this process


class Tracer:
    """Follows calls while somebody wants to have them, and hands on what was noted of them."""

    def __init__(self, export: Export | None = None, num_processes: int = 1) -> None:
        """With an `export` all calls are followed; else only as long as somebody says, and some of them where there are
        many. `num_processes`: that serve calls of this router, and follow as many each.
        """
        self.is_on = export is not None  # to be asked before `follow`: all that a call costs that nobody follows
        self._export = export
        self._until_s = -math.inf if export is None else math.inf
        self._lasts_s = WINDOW_S * num_processes
        self._window_s = -math.inf  # when the calls that are counted began to be
        self._num_in_window = 0
        self._takers: list[Taker] = [] if export is None else [export]  # the export first: it gives calls their ids
        self._running: dict[CallTrace, None] = {}  # the oldest first
        self._ended: deque[CallTrace] = deque()  # and not handed on yet; the oldest first
        self._timer: asyncio.TimerHandle | None = None  # for those

    def hand_to(self, taker: Taker) -> None:
        """Give `taker` each call from now on, soon after its end."""
        self._takers.append(taker)

    def follow_until(self, at_s: float) -> None:
        """Follow calls that come up to then, on the monotonic clock."""
        self._until_s = max(self._until_s, at_s)
        self.is_on = True

    def calls(self) -> list[CallTrace]:
        """Return the calls that run, and those that have ended and wait for their last words."""
        return [*self._ended, *self._running]

    @contextmanager
    def follow(
        self, entry_point: EntryPoint, fields: Callable[[], Mapping[str, str]]
    ) -> Generator[CallTrace, None, None]:
        """Follow a call that has come in, until it is answered or given up. `fields` are its headers, or metadata."""
        is_exported = self._export is not None
        parent = parent_of(fields()) if is_exported else {}
        call = CallTrace(entry_point, time.monotonic(), time.time_ns(), parent, time.monotonic, is_exported=is_exported)
        self.is_on = call.begun_s < self._until_s  # this one is the last, if it is over
        if not is_exported:
            self._count(call.begun_s)
        self._running[call] = None
        try:
            yield call
        finally:
            call.ended_s = time.monotonic()
            del self._running[call]
            if is_exported:
                self._linger(call)
            else:
                self._finish(call)

    def _count(self, now_s: float) -> None:
        """Follow no more calls for a moment once many were: the console may cost a busy router only so much."""
        if now_s - self._window_s >= self._lasts_s:
            self._window_s, self._num_in_window = now_s, 0
        self._num_in_window += 1
        if self._num_in_window >= MAX_IN_WINDOW and self.is_on:
            self.is_on = False
            asyncio.get_running_loop().call_later(self._window_s + self._lasts_s - now_s, self._go_on)

    def _go_on(self) -> None:
        self.is_on = time.monotonic() < self._until_s

    def _linger(self, call: CallTrace) -> None:
        self._ended.append(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._finish_due)

    def _finish_due(self) -> None:
        """Hand on those whose time has come."""
        due_s = time.monotonic() - LINGER_S
        while self._ended and self._ended[0].end_s <= due_s:
            self._finish(self._ended.popleft())
        self._timer = None
        if self._ended:
            wait_s = max(PAUSE_S, self._ended[0].end_s - due_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._finish_due)

    def _finish(self, call: CallTrace) -> None:
        for taker in self._takers:
            taker.add(call)

    async def close(self) -> None:
        """Hand on what has ended. No call is running any more."""
        if self._timer is not None:
            self._timer.cancel()
        while self._ended:
            self._finish(self._ended.popleft())
        if self._export is not None:
            await self._export.close()


def export_of(environ: Mapping[str, str]) -> OpenExport | None:
    """Return how to open the export that `environ` asks for. Raises `ConfigError` if it can't be had."""
    if not _is_wanted(environ):
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"traces go out by OTLP over grpc, not {protocol!r}: see {PROTOCOLS[1]}")
    try:
        from diptych.router.tracing.otlp import OtlpExport
    except ModuleNotFoundError as error:
        words = "is set, but OpenTelemetry is not installed: pip install 'diptych[otel]', or unset it"
        raise ConfigError(f"{_endpoint(environ)} {words} ({error})") from None
    return OtlpExport


def _is_wanted(environ: Mapping[str, str]) -> bool:
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and _endpoint(environ) is not None


def _endpoint(environ: Mapping[str, str]) -> str | None:
    return next((name for name in ENDPOINTS if environ.get(name)), None)


def note_request(call: CallTrace, client: ClientRequest, model_id: str, adapter: str) -> None:
    """Note who asks for what, of a checked request. `adapter` is empty, or the client's own word for the model."""
    model = model_id if adapter else client.model or model_id
    call.note_asked(tenant=client.account.tenant, model=model, adapter=adapter, num_made=client.num_made)
    if call.is_exported:
        _note_attributes(call, client, model_id)


def _operation(client: ClientRequest) -> str:
    if client.vectors is not None:
        return "embeddings"
    return "chat" if isinstance(client.prompts[0], ChatPrompt) else "text_completion"


def _note_attributes(call: CallTrace, client: ClientRequest, model_id: str) -> None:
    """Describe a checked request in OpenTelemetry's words for generative AI: how much is asked, never what is said."""
    call.note(
        {
            "gen_ai.operation.name": _operation(client),
            "gen_ai.provider.name": "diptych",
            "gen_ai.request.model": client.model or model_id,
            "gen_ai.request.max_tokens": None if client.max_tokens is None else min(client.max_tokens, MAX_INT),
            "gen_ai.request.temperature": client.params.temperature,
            "gen_ai.request.top_p": client.params.top_p,
            "gen_ai.request.choice.count": client.num_choices if client.num_choices > 1 else None,
        }
    )
