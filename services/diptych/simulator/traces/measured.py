"""How calls of a trace were served in truth, for those who want to compare."""

from __future__ import annotations

from typing import NamedTuple

from diptych.common.arrays import F64, I64


class Measured(NamedTuple):
    """Arrays with one entry a call, in the order of arrival; nan where a call has no such time."""

    ttft_s: F64
    tpot_s: F64
    e2e_s: F64
    prompt_len: I64
    cached_len: I64
