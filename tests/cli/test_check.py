"""What `diptych check` makes of what a router says."""

from __future__ import annotations

import pytest

from diptych.cli.check import CheckFailed, check_moved, moved_words
from diptych.cli.link_report import link_words
from diptych.cli.main import main
from diptych.v1.worker_pb2 import LinkStatus

MOVED = {
    "prefill_instance": "00000000000000aa",
    "decode_instance": "00000000000000bb",
    "pages_moved": 3,
    "bytes_moved": 3 << 20,
    "prefill_added_ttft_us": 2500,
    "prefill_kv_digest": "0000000000000007",
    "decode_kv_digest": "0000000000000007",
}


def test_pages_that_came_as_they_were_sent_are_well() -> None:
    check_moved(MOVED)
    check_moved(MOVED | {"decode_kv_digest": "0000000000000000"})  # not verified: --kv-integrity sampled
    assert moved_words(MOVED) == (
        "3 pages, 3 MiB, from prefill 00000000000000aa to decode 00000000000000bb; "
        "that took 2.5 ms beyond the prompt's computation"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_instance": "00000000000000aa"}, "served alone"),
        ({"pages_moved": 0}, "no page was moved"),
        ({"decode_kv_digest": "0000000000000008"}, "the digest 0000000000000007 was sent, and 0000000000000008 found"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        check_moved(MOVED | change)


def test_a_link_is_a_line() -> None:
    link = LinkStatus(lanes="rc_mlx5/mlx5_0:1", path="put", bytes_per_s=23.456e9)
    assert link_words(link) == "lanes: rc_mlx5/mlx5_0:1; path: put, 23.46 GB/s when it was tested"
    assert link_words(LinkStatus()) == "lanes: none; path: none"


def test_a_router_that_is_not_there_is_an_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "answers", "--router", "http://127.0.0.1:1", "--timeout-s", "2"]) == 1
    assert (
        capsys.readouterr().err == "diptych check: http://127.0.0.1:1/v1/completions: [Errno 111] Connection refused\n"
    )
