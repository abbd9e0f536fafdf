from __future__ import annotations

import pytest

from diptych.router.tracing.record import MAX_PARENT_LEN, parent_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("fields", "parent"),
    [
        (
            {"traceparent": PARENT, "tracestate": "a=b", "authorization": "x"},
            {"traceparent": PARENT, "tracestate": "a=b"},
        ),
        ({"traceparent": PARENT, "tracestate": ""}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a" * (MAX_PARENT_LEN + 1)}, {"traceparent": PARENT}),
        ({}, {}),
    ],
)
def test_a_parent_is_what_the_two_fields_say_unless_they_are_long(
    fields: dict[str, str], parent: dict[str, str]
) -> None:
    assert parent_of(fields) == parent
