from __future__ import annotations

from starlette.datastructures import Headers

from diptych.router.http.exchange.exchange import _headers


def test_of_a_header_that_comes_twice_the_first_counts_as_in_starlette() -> None:
    scope = {"headers": [(b"x-tenant", b"a"), (b"x-session", b"\xe9"), (b"x-tenant", b"b")]}
    assert _headers(scope) == {"x-tenant": "a", "x-session": "é"}
    assert {name: Headers(scope=scope)[name] for name in _headers(scope)} == _headers(scope)
