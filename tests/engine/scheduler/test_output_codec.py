from __future__ import annotations

from diptych.engine.scheduler.codec import add_tokens_to_wire, output_to_wire
from diptych.engine.scheduler.messages import outputs_said
from diptych.engine.values.events import EmitTokens
from diptych.generation.finish import Finish
from diptych.generation.output import Output, Stats
from diptych.v1 import engine_pb2


def test_a_digest_that_is_not_known_is_not_on_the_wire_and_zero_is_one() -> None:
    first = output_to_wire(Output(1, 0, (5,), stats=Stats()))
    last = output_to_wire(Output(1, 1, finish=Finish.STOP, stats=Stats(kv_digest=0)))
    assert [each.stats.HasField("kv_digest") for each in (first, last)] == [False, True]


def test_tokens_of_rooms_that_go_on_are_no_messages_of_their_own() -> None:
    events = engine_pb2.SchedulerEvents()
    add_tokens_to_wire(EmitTokens([1, 2**63], [4, 5], [(40,), (50,)]), events)
    add_tokens_to_wire(EmitTokens([1], [5], [(41,)]), events)
    assert not events.outputs
    assert list(outputs_said(events)) == [
        output_to_wire(Output(room, index, (token_id,)))
        for room, index, token_id in ((1, 4, 40), (2**63, 5, 50), (1, 5, 41))
    ]


def test_tokens_come_behind_what_was_said_of_their_rooms_before() -> None:
    """A room's second token may be in one message with its first, which says more than a token does."""
    events, first = engine_pb2.SchedulerEvents(), output_to_wire(Output(1, 0, (40,), stats=Stats()))
    add_tokens_to_wire(EmitTokens([2], [7], [(70,)]), events)
    events.outputs.append(first)
    add_tokens_to_wire(EmitTokens([1, 2], [1, 8], [(41,), (80,)]), events)
    assert list(outputs_said(events)) == [
        output_to_wire(Output(2, 7, (70,))),
        first,
        output_to_wire(Output(1, 1, (41,))),
        output_to_wire(Output(2, 8, (80,))),
    ]


def test_tokens_of_a_step_with_drafts_are_outputs_that_say_how_many_there_were() -> None:
    events = engine_pb2.SchedulerEvents()
    add_tokens_to_wire(EmitTokens([1, 2], [4, 5], [(40, 41), (50,)], [3, 0]), events)
    assert list(outputs_said(events)) == [
        output_to_wire(Output(1, 4, (40, 41), num_drafts=3, num_accepted=1)),
        output_to_wire(Output(2, 5, (50,))),
    ]
