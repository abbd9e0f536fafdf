"""What is changed from the console: bodies, who may send them, and from where; and how one signs in.

A page of another origin can send no act: without a token for lack of one, and on a platform where nobody needs one
because browsers say where a request comes from. There the address must also be one that no stranger's name leads to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.common.logging import LogLevel
from diptych.common.members.roles import Role, WorkerRole
from diptych.router.console.acts import Actor, Acts
from diptych.router.console.one_time_code import OneTimeCode
from diptych.router.errors import PermissionDenied
from diptych.router.http.console.documents_routes import API
from diptych.router.http.console.guard import Guard, Handler, failure, json_answer
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.fields.strict_model import Body

B = TypeVar("B", bound=Body)

SIGN_IN: Final = f"{API}/sign-in"
JSON: Final = "application/json"
LOCALHOST: Final = "localhost"
SAME: Final = "same-origin"
MAX_DEADLINE_S: Final = 7 * 24 * 3600.0
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Instance = Annotated[str, Field(max_length=64)]


class CodeBody(Body):
    """The body of /console/api/sign-in."""

    code: Text


class SignedIn(TypedDict):
    """The answer of /console/api/sign-in."""

    token: str  # an operator's


class DrainBody(Body):
    """The body of /console/api/acts/drain."""

    instance: Instance  # 16 hex digits
    deadline_s: Annotated[float | None, Field(ge=0, le=MAX_DEADLINE_S)] = None  # null: the worker's --drain-s


class RoleBody(Body):
    """The body of /console/api/acts/role."""

    instance: Instance
    role: WorkerRole


class LoadAdapterBody(Body):
    """The body of /console/api/acts/load-adapter."""

    name: Text
    path: Text  # a PEFT folder, on each worker's machine


class UnloadAdapterBody(Body):
    """The body of /console/api/acts/unload-adapter."""

    name: Text


class LogLevelBody(Body):
    """The body of /console/api/acts/log-level."""

    instance: Instance
    level: LogLevel


class DrainBegun(TypedDict):
    """The answer of /console/api/acts/drain: the topic `fleet` tells how far it is."""

    instance: str


class RoleChanged(TypedDict):
    """The answer of /console/api/acts/role."""

    instance: str
    previous_role: str
    not_ready: str  # why it can't serve in the new role yet; empty: it does


class AdapterChanged(TypedDict):
    """The answer of /console/api/acts/load-adapter and unload-adapter."""

    name: str
    num_workers: int  # that it was loaded on, or that had it


class LogLevelChanged(TypedDict):
    """The answer of /console/api/acts/log-level."""

    instance: str
    previous_level: str


class Origins:
    """Decides whether a request may come from where its browser says that it does."""

    def __init__(self, own_hosts: Collection[str], *, is_open: bool) -> None:
        """`own_hosts` are names of this router; they count where it is open, so that nobody needs a token."""
        self._own_hosts = {LOCALHOST, *own_hosts}
        self._is_open = is_open

    def check(self, request: Request) -> None:
        """Raise `PermissionDenied`. Programs say nothing of where they are from, and may."""
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        site = request.headers.get("sec-fetch-site")  # of a page at https:, or on this machine
        if site is None and origin is not None:
            site = SAME if urlsplit(origin).netloc == host else "cross-site"
        if site not in (None, SAME, "none"):
            raise PermissionDenied("this is not for pages of other origins")
        if self._is_open and site == SAME and not self._is_own(urlsplit(f"//{host}").hostname or ""):
            words = f"without tokens, acts come from a page at this router's own address, and {host!r} may be another's"
            raise PermissionDenied(words)

    def _is_own(self, name: str) -> bool:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._own_hosts
        return True


class ActBodies:
    """Reads the bodies of acts, short ones."""

    def __init__(self, bodies: BodyReader, origins: Origins) -> None:
        self._bodies = bodies
        self._origins = origins

    async def read(self, fields: type[B], request: Request) -> B:
        """Raises `PermissionDenied`, `InvalidRequest`, and what reading raises."""
        self._origins.check(request)
        if request.headers.get("content-type", JSON).partition(";")[0].strip().lower() != JSON:
            raise InvalidRequest(f"send the body as {JSON}")  # a form can't
        held = self._bodies.hold("")
        try:
            return await self._bodies.read(request, held, partial(read_fields, fields))
        finally:
            held.release()


def sign_in_route(code: OneTimeCode, bodies: ActBodies) -> Route:
    """Return the path that takes the code. It is open: who has the code has no token yet."""

    async def answer(request: Request) -> Response:
        try:
            body = await bodies.read(CodeBody, request)
            return json_answer(SignedIn(token=code.exchange(body.code)))
        except DiptychError as error:
            return failure(error)

    return Route(SIGN_IN, answer, methods=["POST"])


def act_routes(guard: Guard, acts: Acts, bodies: ActBodies) -> Sequence[Route]:
    """Return the paths that change something."""

    async def drain(request: Request) -> Response:
        body = await bodies.read(DrainBody, request)
        await acts.drain(_actor(request), body.instance, body.deadline_s)
        return json_answer(DrainBegun(instance=body.instance))

    async def role(request: Request) -> Response:
        body = await bodies.read(RoleBody, request)
        change = await acts.set_role(_actor(request), body.instance, Role(body.role))
        return json_answer(
            RoleChanged(instance=body.instance, previous_role=change.previous, not_ready=change.not_ready)
        )

    async def load(request: Request) -> Response:
        body = await bodies.read(LoadAdapterBody, request)
        num_workers = await acts.load_adapter(_actor(request), body.name, body.path)
        return json_answer(AdapterChanged(name=body.name, num_workers=num_workers))

    async def unload(request: Request) -> Response:
        body = await bodies.read(UnloadAdapterBody, request)
        num_workers = await acts.unload_adapter(_actor(request), body.name)
        return json_answer(AdapterChanged(name=body.name, num_workers=num_workers))

    async def log_level(request: Request) -> Response:
        body = await bodies.read(LogLevelBody, request)
        previous = await acts.set_log_level(_actor(request), body.instance, body.level)
        return json_answer(LogLevelChanged(instance=body.instance, previous_level=previous))

    handlers: dict[str, Handler] = {
        "drain": drain,
        "role": role,
        "load-adapter": load,
        "unload-adapter": unload,
        "log-level": log_level,
    }
    return [guard.route(f"{API}/acts/{name}", "POST", handler) for name, handler in handlers.items()]


def _actor(request: Request) -> Actor:
    address = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
    return Actor(request.headers.get("authorization"), address)
