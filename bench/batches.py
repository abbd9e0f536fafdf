"""What a batch costs those who wait: first tokens and times per token of interactive requests, without and with one.

One platform, one prefill and one decode worker that compute nothing (`--device sim`, steps as long as those of an 8B
model on an H200). Interactive requests arrive by a Poisson process, the same ones three times: alone, beside a batch,
and alone again, which says how far two equal runs differ. *Lines a second* is what the batch got of the idle time.

    python bench/batches.py [--quick] [--json] [--rate REQUESTS_PER_S]
"""

from __future__ import annotations

import http.client
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import serve
from report import Report, arguments

BENCH: Final = "batches"
VOCABULARY: Final = range(1, 250)
PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 64
NUM_LINES: Final = 20_000  # more than can end
BOUNDARY: Final = "diptych-batch"
PERCENTILES: Final = (50, 99)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=4.0, help="interactive requests a second")
    options = parser.parse_args()
    seconds = 8.0 if options.quick else 20.0
    with tempfile.TemporaryDirectory() as store, Report(as_json=options.json) as report:
        os.environ |= {"DIPTYCH_BATCH_STORE": store, "DIPTYCH_SIM_TIMING": "h200", "DIPTYCH_CONSOLE": "off"}
        workers = ("--model", "sim", "--device", "sim", "--bootstrap-port", "0", "--prefill", "1", "--decode", "1")
        with serve.platform_with(workers) as (port, model):
            alone = interactive(port, model, options.rate, seconds)
            batch = begin_batch(port, model)
            wait_for_lines(port, batch, 1)
            done, began_s = lines_done(port, batch), time.monotonic()
            beside = interactive(port, model, options.rate, seconds)
            lines_per_s = (lines_done(port, batch) - done) / (time.monotonic() - began_s)
            call(port, "POST", f"/v1/batches/{batch}/cancel")
            wait_for_end(port, batch)
            again = interactive(port, model, options.rate, seconds)
        tell(report, "first token", *(np.array([run.ttft_s for run in runs]) for runs in (alone, beside, again)))
        tell(report, "a token", *(np.array([np.mean(run.gaps_s) for run in runs]) for runs in (alone, beside, again)))
        report.row(BENCH, "lines of the batch", lines_per_s, "1/s")


def tell(report: Report, what: str, alone: Any, beside: Any, again: Any) -> None:
    for percent in PERCENTILES:
        without, took, later = (float(np.percentile(each, percent)) * 1e3 for each in (alone, beside, again))
        case = f"{what}, p{percent}, beside a batch"
        report.row(BENCH, case, took, "ms", without, "alone", took / without, {"alone again": later})


def interactive(port: int, model: str, rate: float, seconds: float) -> Sequence[serve.Run]:
    """Ask at times of a Poisson process, whatever is still open then."""
    rng = random.Random(1)
    count = max(2, round(rate * seconds))
    due_s = np.cumsum([rng.expovariate(rate) for _ in range(count)])
    prompts = [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(count)]
    began_s = time.monotonic()

    def ask(number: int) -> serve.Run:
        time.sleep(max(0.0, began_s + float(due_s[number]) - time.monotonic()))
        return serve.run_platform(port, model, prompts[number], OUTPUT_TOKENS)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def begin_batch(port: int, model: str) -> str:
    rng = random.Random(2)
    limits = {"model": model, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = []
    for number in range(NUM_LINES):
        body = limits | {"prompt": rng.choices(VOCABULARY, k=PROMPT_TOKENS)}
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
    form = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    form += 'content-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    data = form.encode() + "\n".join(lines).encode() + f"\r\n--{BOUNDARY}--\r\n".encode()
    file = call(port, "POST", "/v1/files", data, f"multipart/form-data; boundary={BOUNDARY}")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(call(port, "POST", "/v1/batches", json.dumps(asked).encode())["id"])


def lines_done(port: int, batch: str) -> int:
    return int(call(port, "GET", f"/v1/batches/{batch}")["request_counts"]["completed"])


def wait_for_lines(port: int, batch: str, count: int) -> None:
    while lines_done(port, batch) < count:
        time.sleep(0.1)


def wait_for_end(port: int, batch: str) -> None:
    while call(port, "GET", f"/v1/batches/{batch}")["status"] != "cancelled":
        time.sleep(0.1)


def call(port: int, method: str, path: str, data: bytes = b"", kind: str = "application/json") -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, data, {"content-type": kind})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert answer.status == 200, said
    found: dict[str, Any] = json.loads(said)
    return found


if __name__ == "__main__":
    main()
