from __future__ import annotations

from tiny_config import tiny_config

from diptych.architectures.config import Moe
from diptych.checkpoints.shard import Shard
from diptych.engine.lora.rank_part import adapted_placement

MODEL = tiny_config(moe=Moe(num_experts=5, experts_per_token=2, ffn_size=8, normalize=True))


def test_of_experts_that_other_ranks_have_whole_a_rank_adapts_nothing() -> None:
    whole = {name for name, _ in adapted_placement(MODEL, Shard(0, 1))}
    parts = [{name for name, _ in adapted_placement(MODEL, Shard(rank, 2, whole_experts=True))} for rank in range(2)]
    experts = [{name for name in part if ".experts." in name} for part in parts]
    assert all(experts)
    assert not experts[0] & experts[1]
    assert parts[0] | parts[1] == whole
