"""Who loses by drafts has none, and who would win has them again."""

from __future__ import annotations

import numpy as np

from diptych.engine.drafting.record import ALLOWED, FORGIVEN, LEAST, MOST, Record, RequestRecords
from diptych.engine.values.request import Request, new_request
from diptych.generation.sampling_params import SamplingParams


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


def request_saying(token_ids: list[int]) -> Request:
    request = new_request(1, np.array([7]), SamplingParams(max_tokens=20))
    for token_id in token_ids:
        request.append(token_id)
    return request


def test_refused_drafts_are_compared_up_to_the_first_that_is_wrong_and_count_for_all_requests() -> None:
    common = [Record(), Record()]
    records, request = RequestRecords(common), request_saying([1, 2])
    records.refuse(1, (1, 2, 3, 4), at=1, price=1.0)
    records.refuse(1, (9, 9), at=1, price=100.0)  # another is still compared
    records.compare(request)
    found = [(records.of(1)._tokens, common[1]._tokens)]
    request.append(9)
    records.compare(request)
    request.append(4)
    records.compare(request)
    found.append((records.of(1)._tokens, common[1]._tokens))
    assert found == [(1.0, 1.0)] * 2
    assert records.of(0)._tokens == common[0]._tokens == 0
    records.refuse(1, (5,), at=5, price=0.5)
    assert records.of(1)._tokens == 0.5


def test_what_is_forgiven_opens_the_worst_record_after_so_many_times() -> None:
    records = RequestRecords([Record(LEAST)])
    num_times = round((-LEAST - ALLOWED) / FORGIVEN)
    for _ in range(num_times - 1):
        records.forgive(0)
    assert not records.of(0).is_good
    records.forgive(0)
    assert records.of(0).is_good
    assert num_times == 384
