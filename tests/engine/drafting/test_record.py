"""Who loses by drafts has none, and who would win has them again."""

from __future__ import annotations

from diptych.engine.drafting.record import ALLOWED, LEAST, MOST, Record


def test_who_has_lost_too_much_has_no_drafts_until_some_would_have_won() -> None:
    record = Record()
    record.learn(-ALLOWED)
    assert record.is_good
    record.learn(-0.1)
    assert not record.is_good
    record.learn(0.2)
    assert record.is_good


def test_what_was_won_or_lost_long_ago_counts_no_more_than_a_few_tokens() -> None:
    record = Record()
    for tokens, left in ((100.0, MOST), (-100.0, LEAST)):
        record.learn(tokens)
        record.learn(-left - ALLOWED + 0.1)
        assert record.is_good
        record.learn(-0.2)
        assert not record.is_good


def test_a_request_begins_with_what_others_have_lost_and_not_with_what_they_won() -> None:
    good, bad = Record(), Record()
    good.learn(2.0)
    bad.learn(-1.0)
    begun, beaten = good.of_another(), bad.of_another()
    begun.learn(-ALLOWED - 0.1)
    beaten.learn(-ALLOWED + 0.9)
    assert (begun.is_good, beaten.is_good) == (False, False)
