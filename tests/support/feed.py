"""The console's page over a fleet that does not exist: for whoever works on the page, and for its tests.

    python tests/support/feed.py --prefill 4 --decode 4 --port 8123
    http://127.0.0.1:8123/console/      `--sign-in`: tokens `operator` and `viewer`, code `let-me-in`

It answers as the router does: same paths, same documents, same headers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from feed_api import TOKEN_S, chunks, refusal
from feed_documents import TICK_S, Platform, merge_patch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from diptych.router.console.state import Steps

STATIC: Final = Path(__file__).parents[2] / "services/diptych/router/http/console/static"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".txt": "text/plain"}
TOKENS: Final = {"operator": True, "viewer": False}
CODE: Final = "let-me-in"
HOSTILE: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

MAX_STEPS: Final = 60_000  # that are kept
Json = dict[str, Any]


class Feed:
    """A platform that moves, and those who watch it."""

    def __init__(self, platform: Platform, *, needs_token: bool = False, history_s: float = 300.0) -> None:
        self.platform = platform
        self.needs_token = needs_token
        self.is_paused = False
        self.is_cut = False  # streams end at once
        self.acts: list[Json] = []
        self.log: deque[Steps] = deque([platform.history(history_s)])
        self.num_batches = 1
        self.documents: dict[str, Callable[[], Any]] = {
            "fleet": platform.fleet,
            "requests": platform.requests,
            "cache": platform.cache,
            "charts": platform.charts,
        }

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self.is_paused:
                self.tick()

    def tick(self) -> None:
        self.platform.tick()
        self.log.append(self.platform.steps())
        self.num_batches += 1
        while len(self.log) > 1 and sum(map(_num_steps, self.log)) > MAX_STEPS:
            self.log.popleft()

    def is_operator(self, request: Request) -> bool | None:
        """None: nobody that is known."""
        if not self.needs_token:
            return True
        return TOKENS.get(request.headers.get("authorization", "").removeprefix("Bearer "))

    async def events(self, topics: list[str]) -> AsyncIterator[str]:
        told: dict[str, Any] = {}
        batch = self.num_batches
        for topic in topics:
            if topic in self.documents:
                told[topic] = self.documents[topic]()
                yield _event("snapshot", {"topic": topic, "state": told[topic]})
        yield _event("ping", {})
        while not self.is_cut:
            await asyncio.sleep(TICK_S)
            for topic, old in told.items():
                new = self.documents[topic]()
                if patch := merge_patch(old, new):
                    told[topic] = new
                    yield _event("patch", {"topic": topic, "patch": patch})
            if "steps" in topics:
                for steps in list(self.log)[max(0, len(self.log) - (self.num_batches - batch)) :]:
                    yield _event("steps", steps)
                batch = self.num_batches

    # What tests do to it: POST /feed/DEED

    def deeds(self) -> Mapping[str, Callable[..., Any]]:
        platform = self.platform
        return {
            "pause": lambda: setattr(self, "is_paused", True),
            "cut": lambda: setattr(self, "is_cut", True),
            "mend": lambda: setattr(self, "is_cut", False),
            "tick": self.tick,
            "kill": platform.kill,
            "drain": platform.drain,
            "flip": platform.flip,
            "freeze": platform.freeze,
            "silence": platform.silence,
            "hold_back": platform.hold_back,
            "poison": self.poison,
            "problem": lambda words: setattr(platform, "problem", words),
        }

    def poison(self) -> None:
        """Everything that others name has markup in it."""
        self.platform.model = self.platform.problem = HOSTILE
        self.platform.tenants = (HOSTILE,)
        for card in self.platform.workers.values():
            card["pod"] = card["not_ready"] = card["breaker"] = card["version"] = HOSTILE
            card["adapters"] = [HOSTILE]
            for link in card["links"].values():
                link["reason"] = link["path"] = link["lanes"] = HOSTILE
        for row in self.platform.rows.values():
            row["tenant"] = row["model"] = row["adapter"] = row["outcome"] = HOSTILE


def _num_steps(steps: Steps) -> int:
    return sum(map(len, steps["workers"].values()))


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _json(data: Any, status: int = 200) -> Response:
    return JSONResponse(data, status, headers={"Cache-Control": "no-store"})


def _error(status: int, words: str) -> Response:
    return _json({"error": {"message": words, "type": "error", "code": None}}, status)


def create_app(feed: Feed) -> Starlette:
    """Return the application. Its platform moves while it runs."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ticking = asyncio.create_task(feed.run())
        yield
        ticking.cancel()

    async def sign_in(request: Request) -> Response:
        right = (await request.json()).get("code") == CODE
        return _json({"token": "operator"}) if right else _error(401, "This code is wrong, or was used.")

    async def me(request: Request) -> Response:
        is_operator = feed.is_operator(request)
        if is_operator is None:
            return _error(401, "Sign in first.")
        return _json({"is_operator": is_operator, "text_allowed": False, "is_open": not feed.needs_token})

    async def stream(request: Request) -> Response:
        if feed.is_operator(request) is None:
            return _error(401, "Sign in first.")
        if feed.is_cut:
            return _error(503, "Cut.")
        return StreamingResponse(
            feed.events(request.query_params["topics"].split(",")), media_type="text/event-stream", headers=_NO_STORE
        )

    async def document(request: Request) -> Response:
        return _document(feed, request)

    async def act(request: Request) -> Response:
        return await _act(feed, request)

    async def chat(request: Request) -> Response:
        return await _chat(feed, request)

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [{"id": name} for name in (feed.platform.model, "sql")]})

    async def deed(request: Request) -> Response:
        feed.deeds()[request.path_params["deed"]](**dict(request.query_params))
        return _json({})

    api = "/console/api"
    routes = [
        Route("/", lambda _: RedirectResponse("/console/", 303)),
        Route("/console", lambda _: RedirectResponse("/console/", 303)),
        Route(f"{api}/sign-in", sign_in, methods=["POST"]),
        Route(f"{api}/me", me),
        Route(f"{api}/stream", stream),
        Route(f"{api}/acts/{{act}}", act, methods=["POST"]),
        Route(f"{api}/{{topic}}", document),
        Route(f"{api}/requests/{{id}}", document),
        Route("/console/{path:path}", _file),
        Route("/feed/{deed}", deed, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


_NO_STORE: Final = {"Cache-Control": "no-store"}


def _document(feed: Feed, request: Request) -> Response:
    if feed.is_operator(request) is None:
        return _error(401, "Sign in first.")
    name = request.path_params.get("id")
    topic = request.path_params.get("topic", "")
    if name is not None:
        story = feed.platform.story(name)
        return _json(story) if story else _error(404, "Nothing is known of this request any more.")
    if topic == "steps":
        return _json(_steps_since(feed, float(request.query_params.get("since_ms", 0))))
    return _json(feed.documents[topic]()) if topic in feed.documents else _error(404, "There is no such document.")


def _steps_since(feed: Feed, since_ms: float) -> Steps:
    found: Steps = {"workers": {}}
    for steps in feed.log:
        for instance, rows in steps["workers"].items():
            found["workers"].setdefault(instance, []).extend(row for row in rows if row[0] > since_ms)
    return found


async def _act(feed: Feed, request: Request) -> Response:
    if not feed.is_operator(request):
        return _error(403, "Only an operator may do this.")
    name, body = request.path_params["act"], await request.json()
    instance = body.get("instance", "")
    if "instance" in body and instance not in feed.platform.workers:
        return _error(404, f"There is no worker {instance}.")
    feed.acts.append({"act": name, **body})
    if name.endswith("-adapter"):
        if not body.get("path", "/").startswith("/"):
            return _error(400, f"{body['path']} is not an absolute path.")
        return _json({"name": body["name"], "num_workers": len(feed.platform.workers)})
    if name == "log-level":
        return _json({"instance": instance, "previous_level": "info"})
    previous = feed.platform.workers[instance]["role"]
    if name == "role":
        feed.platform.flip(instance, body["role"])
        return _json({"instance": instance, "previous_role": previous, "not_ready": ""})
    feed.platform.drain(instance, body["deadline_s"] or 120.0)
    return _json({"instance": instance})


async def _file(request: Request) -> Response:
    path = (STATIC / (request.path_params["path"] or "index.html")).resolve()
    if not path.is_relative_to(STATIC) or not path.is_file():
        return _error(404, "There is no such file.")
    return FileResponse(path, media_type=TYPES.get(path.suffix), headers={**HEADERS, "Cache-Control": "no-cache"})


async def _chat(feed: Feed, request: Request) -> Response:
    body = await request.json()
    if refused := refusal(body, request.headers.get("authorization", "")):
        return _json(refused[1], refused[0])
    name = feed.platform.serve_chat()
    return StreamingResponse(_tokens(body), media_type="text/event-stream", headers={**_NO_STORE, "X-Request-Id": name})


async def _tokens(body: Json) -> AsyncIterator[str]:
    await asyncio.sleep(0.1)
    for chunk in chunks(body):
        yield f"data: {json.dumps(chunk)}\n\n"
        await asyncio.sleep(TOKEN_S)
    yield "data: [DONE]\n\n"


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prefill", 4), ("decode", 4), ("unified", 0), ("port", 8123), ("seed", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sign-in", action="store_true", help="ask for a token")
    args = parser.parse_args()
    platform = Platform(args.prefill, args.decode, args.unified, seed=args.seed, now_s=time.time())
    history_s = min(300.0, 6000 / max(1, len(platform.workers)))
    app = create_app(Feed(platform, needs_token=args.sign_in, history_s=history_s))
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
