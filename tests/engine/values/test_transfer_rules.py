from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.engine.values.transfer_rules import MIN_PIECE_NBYTES, TransferRules, Window, layer_windows


@pytest.mark.parametrize(
    ("num_layers", "num_windows", "page_nbytes", "windows"),
    [
        (30, 4, 1 << 20, ((0, 7), (7, 15), (15, 22), (22, 30))),
        (2, 4, 1 << 20, ((0, 1), (1, 2))),
        (30, 1, 1 << 20, ((0, 30),)),
        (30, 4, 2 * MIN_PIECE_NBYTES, ((0, 15), (15, 30))),
        (30, 4, 100, ((0, 30),)),
    ],
)
def test_windows_cover_all_layers_in_pieces_worth_a_write(
    num_layers: int, num_windows: int, page_nbytes: int, windows: tuple[Window, ...]
) -> None:
    assert layer_windows(num_layers, num_windows, page_nbytes) == windows


@pytest.mark.parametrize(
    ("rules", "flag"),
    [
        (TransferRules(timeout_s=0.0), "--kv-transfer-timeout-s"),
        (TransferRules(timeout_s=float("inf")), "--kv-transfer-timeout-s"),
        (TransferRules(num_windows=0), "--kv-layer-windows"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_name_of_its_option(rules: TransferRules, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        rules.validate()


def test_one_room_in_sixteen_is_verified_by_its_id() -> None:
    rules = TransferRules("sampled")
    assert [room for room in range(64) if rules.is_verified(room)] == [0, 16, 32, 48]
