"""Asks vLLM in a process of its own: see `vllm_peer.py`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Final

DECODE_STEPS: Final = 32


class VllmClient:
    """vLLM on one model folder. Its times include its scheduler: it offers no bare forward step."""

    def __init__(self, python: str, folder: Path, num_threads: int) -> None:
        command = [python, str(Path(__file__).with_name("vllm_peer.py")), str(folder), str(num_threads)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._answer()

    def prefill_s(self, num_tokens: int, rounds: int) -> float:
        """Return the shortest time from a prompt to its first token."""
        return min(self._ask(1, num_tokens, 1) for _ in range(rounds))

    def decode_step_s(self, batch_size: int, context: int, rounds: int) -> float:
        """Return the shortest time of a step around `context` tokens: what more steps cost more."""
        prompt_len = context - DECODE_STEPS // 2
        few = min(self._ask(batch_size, prompt_len, 2) for _ in range(rounds))
        many = min(self._ask(batch_size, prompt_len, 2 + DECODE_STEPS) for _ in range(rounds))
        return (many - few) / DECODE_STEPS

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, num_prompts: int, prompt_len: int, num_tokens: int) -> float:
        assert self._process.stdin is not None
        case = {"num_prompts": num_prompts, "prompt_len": prompt_len, "num_tokens": num_tokens}
        print(json.dumps(case), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended; its words are above")
        return line
