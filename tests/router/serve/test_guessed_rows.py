"""Which guesses count in an output that a stop string may cut off."""

from __future__ import annotations

import pytest

from diptych.common.members.roles import LegKind
from diptych.generation.output_text import OutputText
from diptych.generation.sampling_params import SamplingParams
from diptych.router.serve.attempt_legs import AttemptLegs, GuessedRows
from diptych.router.values.leg_results import Predicted
from diptych.tokens.tokenizer import Tokenizer
from diptych.v1.worker_pb2 import LegOutput


@pytest.mark.parametrize(
    ("num_tokens", "counted"),
    [(1, (0, 0)), (2, (1, 0)), (4, (3, 2)), (5, (3, 2)), (6, (3, 6)), (8, (3, 6))],
    ids=["before", "within", "all that came true", "with the next token", "in the next row", "whole"],
)
def test_a_row_counts_as_far_as_the_output_has_it(num_tokens: int, counted: tuple[int, int]) -> None:
    rows = GuessedRows()
    rows.add(1, num_drafts=5, num_accepted=3)
    rows.add(5, num_drafts=4, num_accepted=0)
    assert rows.within(num_tokens) == Predicted(*counted)


def test_rows_that_are_kept_count_in_full() -> None:
    rows = GuessedRows()
    rows.add(1, num_drafts=5, num_accepted=3)
    rows.add(5, num_drafts=4, num_accepted=3)
    rows.keep(5)
    assert rows.within(6) == Predicted(4, 2)


def test_no_more_are_accepted_than_tokens_are_shown(byte_tokenizer: Tokenizer) -> None:
    legs = AttemptLegs({LegKind.LOCAL}, lambda kind: None)
    ids = byte_tokenizer.encode("ab; never shown text")
    text = OutputText(byte_tokenizer, SamplingParams(max_tokens=100, stop=(";",)))
    legs.receive(LegKind.LOCAL, LegOutput(room=1, first_index=0, token_ids=ids[:1]))
    legs.receive(LegKind.LOCAL, LegOutput(room=1, first_index=1, token_ids=ids[1:17], drafts=15, accepted_drafts=15))
    shown = text.push(legs.pop()[0])
    assert len(shown.token_ids) == 3
    assert legs.guessed.within(3) == Predicted(2, 0)
