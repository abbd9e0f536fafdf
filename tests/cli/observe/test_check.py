"""What `diptych check` makes of what a router says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from diptych.cli.main import main
from diptych.cli.observe.check import CheckFailed, check_moved, moved_words
from diptych.cli.reports.link_report import link_words
from diptych.v1.worker_pb2 import LinkStatus

MOVED = {
    "prefill_instance": "00000000000000aa",
    "decode_instance": "00000000000000bb",
    "whole": True,
    "pages_moved": 3,
    "bytes_moved": 3 << 20,
    "prefill_added_ttft_us": 2500,
    "prefill_kv_digest": "0000000000000007",
    "decode_kv_digest": "0000000000000007",
}


def test_pages_that_came_as_they_were_sent_are_well() -> None:
    check_moved(MOVED)
    unverified = {name: value for name, value in MOVED.items() if "digest" not in name}  # --kv-integrity sampled
    check_moved(unverified)
    assert moved_words(MOVED) == (
        "3 pages, 3 MiB, from prefill 00000000000000aa to decode 00000000000000bb; "
        "that took 2.5 ms beyond the prompt's computation"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_instance": "00000000000000aa"}, "served alone"),
        ({"pages_moved": 0}, "no page was moved"),
        ({"whole": False}, "its report is not whole"),
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
    assert capsys.readouterr().err == "diptych check: http://127.0.0.1:1/v1/models: [Errno 111] Connection refused\n"


class ShortModel(BaseHTTPRequestHandler):
    """A router whose model takes ten tokens, and that refuses every prompt by its length."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m", "max_model_len": 10}]})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        self._answer(400, f"{len(prompt)} tokens came")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def short_router() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), ShortModel) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("wanted", "sent"), [("512", 8), ("5", 5)])
def test_the_prompt_that_is_handed_over_fits_into_the_context(
    capsys: pytest.CaptureFixture[str], short_router: str, wanted: str, sent: int
) -> None:
    options = ["--router", short_router, "--bootstrap", "127.0.0.1:1", "--insecure", "--prompt-tokens", wanted]
    assert main(["check", "kv", *options]) == 1
    assert f'answers 400: "{sent} tokens came"' in capsys.readouterr().err
