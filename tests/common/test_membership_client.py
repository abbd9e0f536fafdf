from __future__ import annotations

from diptych.common.membership_client import to_record
from diptych.v1.bootstrap_pb2 import INSTANCE_STATE_READY, Instance


def test_the_scheduler_groups_of_a_worker_share_its_address_without_evicting_each_other() -> None:
    groups = [Instance(instance_id=9, address="a:1", dp_rank=rank, state=INSTANCE_STATE_READY) for rank in range(3)]
    assert [to_record(group).address for group in groups] == ["a:1", "a:1#1", "a:1#2"]
