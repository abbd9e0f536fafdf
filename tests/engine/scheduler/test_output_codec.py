from __future__ import annotations

from diptych.engine.scheduler.codec import output_to_wire
from diptych.generation.finish import Finish
from diptych.generation.output import Output, Stats


def test_a_digest_that_is_not_known_is_not_on_the_wire_and_zero_is_one() -> None:
    first = output_to_wire(Output(1, 0, (5,), stats=Stats()))
    last = output_to_wire(Output(1, 1, finish=Finish.STOP, stats=Stats(kv_digest=0)))
    assert [each.stats.HasField("kv_digest") for each in (first, last)] == [False, True]
