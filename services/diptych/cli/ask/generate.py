"""Continue one prompt: `diptych generate "Once upon a time"`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from diptych.cli.requests.inference_client import RequestOptions, addressed, read_text, stream_text
from diptych.common.config import argument
from diptych.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class GenerateConfig(RequestOptions):
    """Continue a prompt and print the output as it comes."""

    prompt: str = argument("-", help="text to continue, without a chat template; - or none: standard input")


def main(config: GenerateConfig) -> int:
    config = addressed(config)
    prompt = read_text(sys.stdin.read) if config.prompt == "-" else config.prompt
    request = inference_pb2.GenerateRequest(model=config.model, text=prompt, sampling=config.sampling)
    for text in stream_text(config, request):
        print(text, end="", flush=True)
    print()
    return 0
