from __future__ import annotations

import pytest

from diptych.cli.observe.profile import ProfileConfig, words
from diptych.common.errors import ConfigError
from diptych.v1.admin_pb2 import StopProfileResponse


def test_a_trace_is_named_with_the_machine_that_has_it() -> None:
    found = StopProfileResponse(path="/tmp/x.json.gz", bytes=2_500_000, num_steps=20, duration_s=0.25)
    assert words(found, "10.0.0.7") == "20 steps in 0.25 s, 2500 kB, on 10.0.0.7:\n  /tmp/x.json.gz"


@pytest.mark.parametrize("fields", [{"steps": 0}, {"steps": 1001}, {"skip": -1}, {"max_s": 0.0}, {"max_s": 61.0}])
def test_a_trace_beyond_its_bounds_is_refused_before_anybody_is_asked(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ProfileConfig(worker="w", **fields).validate()  # type: ignore[arg-type]
