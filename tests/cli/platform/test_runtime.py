"""The platform started by a program."""

from __future__ import annotations

import json
import os
import urllib.request

import psutil
import pytest

from diptych.cli.platform.runtime import Runtime, RuntimeFailed
from diptych.common.trust.tokens import TOKEN_VARIABLE

pytestmark = pytest.mark.integration


def test_a_program_starts_the_platform_asks_it_and_leaves_nothing_behind() -> None:
    before = {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)}
    with Runtime("sim", environment={"DIPTYCH_DEVICE": "sim", "DIPTYCH_KV_CACHE_MIB": "4"}) as runtime:
        body = {"model": "sim", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{runtime.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        ours = psutil.Process(os.getpid()).children(recursive=True)
        environments = [process.environ() for process in ours if process.pid not in before]
        assert len(environments) == 7, "`up`, its components, and a scheduler of each worker"
        assert not [each for each in environments if os.environ[TOKEN_VARIABLE] in str(each)]
        assert runtime.grpc_target.startswith("127.0.0.1:")
    assert {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)} == before


def test_a_platform_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeFailed, match="no-such-folder"):
        Runtime("no-such-folder")
