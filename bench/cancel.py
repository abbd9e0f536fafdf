"""How soon a client that leaves sets both workers free, in the middle of a prompt of 128k tokens.

The platform as `diptych up` starts it, with a model of random weights whose steps take about a second here. A request
begins, its client closes the connection, and the clock runs until the router knows that both legs have ended: then the
workers compute nothing for it any more.

    python bench/cancel.py [--quick] [--json]
"""

from __future__ import annotations

import http.client
import json
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import report
import tokenizers

from diptych.cli.platform.runtime import Runtime

BENCH: Final = "cancel"
CONTEXT_LEN: Final = 131_072
PROMPT_LEN: Final = 128_000
VOCAB: Final = 1000
WANTED_MS: Final = 200.0
TIMEOUT_S: Final = 60.0
MODEL: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
ENVIRONMENT: Final = {
    "DIPTYCH_OPEN_METRICS": "1",  # the router's, asked at the one port that is known here
    "DIPTYCH_LOAD_FORMAT": "dummy",
    "DIPTYCH_KV_CACHE_DTYPE": "bfloat16",
    "DIPTYCH_KV_CACHE_MIB": "300",
    "DIPTYCH_NUM_THREADS": "1",
}


SHORT_LEN: Final = 500  # tokens: one step, that the KV follows to decode


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


class Client:
    """One that leaves."""

    def __init__(self, runtime: Runtime) -> None:
        self._address = runtime.url.removeprefix("http://")
        self._metrics = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)

    def leave_after(self, seconds: float, prompt_len: int, seed: int) -> float:
        """Begin a request, leave, and return how long its legs lived on."""
        ids = random.Random(seed).choices(range(VOCAB), k=prompt_len)
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": ids, "max_tokens": 8, "stream": True}))
        self._wait_for_legs(2)
        time.sleep(seconds)
        connection.close()
        begin_s = time.monotonic()
        self._wait_for_legs(0)
        return time.monotonic() - begin_s

    def _wait_for_legs(self, count: int) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._num_legs() != count:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"there were never {count} legs open")
            time.sleep(0.002)

    def _num_legs(self) -> float:
        self._metrics.request("GET", "/metrics")
        text = self._metrics.getresponse().read().decode()
        return sum(float(value) for value in re.findall(r"^diptych_router_legs_open\{.*\} (\S+)$", text, re.MULTILINE))


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    times_s = (0.5, 2.0, 4.0) if options.quick else (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    with tempfile.TemporaryDirectory() as folder, report.Report(as_json=options.json) as out:
        write_model(Path(folder))
        with Runtime(folder, environment=ENVIRONMENT) as runtime:
            client = Client(runtime)
            for seed, (seconds, prompt_len) in enumerate([(0.1, SHORT_LEN), *((s, PROMPT_LEN) for s in times_s)]):
                freed_ms = 1e3 * client.leave_after(seconds, prompt_len, seed)
                words = f"{prompt_len} tokens, left after {seconds:g} s"
                out.row(BENCH, words, freed_ms, "ms", WANTED_MS, "wanted", WANTED_MS / freed_ms)


if __name__ == "__main__":
    main()
