"""A router whose members have tokens, and a client that is nobody, or one of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from diptych.common.trust.tokens import Tokens
from diptych.common.trust.trust import Trust
from diptych.common.verdicts.permissions import Party

TOKENS: Mapping[str, str] = {party.value: f"{party.value}-secret-of-tests" for party in Party}
LINES = [f"router:{TOKENS['router']}", *(f"{name}:{secret}" for name, secret in TOKENS.items() if name != "router")]
TRUST = Trust(Tokens.of_variable("\n".join(LINES)), None)  # the router sends its own


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]  # names in small letters
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks one router over HTTP."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("http://")

    def ask(
        self, method: str, path: str, party: str = "", body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """`party` is whose token is sent; empty: nobody's."""
        with self._asked(method, path, party, body, headers) as answer:
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, fields, answer.read())

    @contextmanager
    def follow(self, topics: str, party: str = "") -> Iterator[Events]:
        """Yield the events of a live stream, as a browser reads them."""
        with self._asked("GET", f"/console/api/stream?topics={topics}", party, None, None) as answer:
            yield Events(answer)

    @contextmanager
    def _asked(
        self, method: str, path: str, party: str, body: Any, headers: Mapping[str, str] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        fields = {**({"authorization": f"Bearer {TOKENS.get(party, party)}"} if party else {}), **(headers or {})}
        if body is not None:
            fields = {"content-type": "application/json", **fields}
        connection.request(method, path, None if body is None else json.dumps(body), fields)
        try:
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()


class Events:
    """A stream as it is read: events come by `next`."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self

    def __next__(self) -> tuple[str, Any]:
        lines: list[str] = []
        while (line := self.answer.readline().decode().rstrip("\n")) or not lines:
            if not line:
                raise StopIteration
            lines.append(line)
        kind, data = (line.partition(": ")[2] for line in lines)
        return kind, json.loads(data)

    def until(self, kind: str, topic: str = "") -> Any:
        """Return the next event of a kind, of this topic if one is given."""
        return next(data for name, data in self if name == kind and topic in ("", data.get("topic")))


@pytest.fixture(scope="session")
def client_of() -> Callable[[Any], Client]:
    """`client_of(cluster)`"""
    return lambda cluster: Client(cluster.url)


@pytest.fixture(scope="session")
def trust() -> Trust:
    return TRUST
