"""The step that is run to see what it takes."""

from __future__ import annotations

import pytest

from diptych.engine.runner.gpu.inputs import StepLimits
from diptych.engine.runner.gpu.measuring import largest_step, longest_extend


@pytest.mark.parametrize(
    ("max_step_tokens", "max_requests", "max_pages"), [(8192, 64, 512), (512, 1, 512), (100, 7, 3), (5, 64, 2)]
)
def test_it_has_all_tokens_and_as_many_requests_as_share_them(
    max_step_tokens: int, max_requests: int, max_pages: int
) -> None:
    limits = StepLimits(max_step_tokens, max_requests, max_pages)
    batch, sampling = largest_step(limits, 16)
    assert len(batch.input_ids) == batch.extend_lens.sum() == max_step_tokens
    assert batch.prompt_rows is not None
    assert len(batch.prompt_rows.token_rows) == len(batch.prompt_rows.target_ids) == max_step_tokens
    assert batch.extend_lens.min() >= 1
    assert batch.batch_size == len(sampling.temperature) <= max_requests
    assert batch.batch_size >= min(max_requests, max_step_tokens) * 0.8
    assert batch.seq_lens.max() == longest_extend(limits, 16) <= max_pages * 16
    assert batch.out_slots.max() < batch.page_table.shape[1] * 16
