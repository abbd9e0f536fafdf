"""A backend over HTTP: a router's native API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import httpx2

from diptych.generation.sampling_params import SamplingParams
from diptych.lang.backend import BackendError, Made, Message

TIMEOUT_S: Final = 600.0
MAX_TRIES: Final = 8  # of a request that was refused because there was too much to do
MAX_PAUSE_S: Final = 10.0
BUSY: Final = (429, 503)
MAX_PROMPTS: Final = 128  # in a request
MAX_CALLS: Final = 256  # at once
PLAIN: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
)


class RuntimeEndpoint:
    """A router, by its address and perhaps an API key. `model` picks one of its models or adapters."""

    def __init__(self, base_url: str, api_key: str | None = None, *, model: str = "") -> None:
        """Nothing is asked yet. `base_url` is `http://HOST:PORT`, with or without `/v1`."""
        root = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=MAX_CALLS)
        self._client = httpx2.Client(base_url=root, headers=headers, timeout=TIMEOUT_S, limits=limits)
        self._model = {"model": model} if model else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """See `Backend`."""
        return self._tokens({"prompt": text, "add_special_tokens": is_first})

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """See `Backend`."""
        return self._tokens({"messages": [message.for_chat() for message in messages]})

    def generate(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Made:
        """See `Backend`."""
        answer = self._ask("/generate", _body(prompt, params, images))
        return _made(answer["text"], answer["output_ids"], answer["meta_info"])

    def stream(self, prompt: Sequence[int], params: SamplingParams, images: Sequence[str] = ()) -> Iterator[Made]:
        """See `Backend`."""
        body = _body(prompt, params, images)
        body |= {"stream": True, "incremental_streaming_output": True, **self._model}
        try:
            for tries in range(1, MAX_TRIES + 1):
                with self._client.stream("POST", "/generate", json=body) as response:
                    if not response.is_error:
                        yield from map(_event, _data(response.iter_lines()))
                        return
                    response.read()
                if response.status_code not in BUSY or tries == MAX_TRIES:
                    raise _refused(response)
                time.sleep(_pause_s(response, tries))
        except httpx2.HTTPError as error:
            raise BackendError(f"POST /generate: {error or type(error).__name__}") from error

    def score(
        self, prompt: Sequence[int], choices: Sequence[Sequence[int]], images: Sequence[str] = ()
    ) -> list[tuple[float, ...]]:
        """See `Backend`."""
        scored = []
        for first in range(0, len(choices), MAX_PROMPTS):
            ids = [[*prompt, *choice] for choice in choices[first : first + MAX_PROMPTS]]
            body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
            body |= {"image_data": [list(images)] * len(ids)} if images else {}
            asked = {"return_logprob": True, "logprob_start_len": max(0, len(prompt) - 1)}
            scored += self._ask("/generate", {**body, **asked, "return_text_in_logprobs": False})
        return [tuple(one[0] for one in each["meta_info"]["input_token_logprobs"][1:]) for each in scored]

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", body)["tokens"]
        return tokens

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        for tries in range(1, MAX_TRIES + 1):
            try:
                response = self._client.post(path, json={**body, **self._model})
            except httpx2.HTTPError as error:
                raise BackendError(f"POST {path}: {error or type(error).__name__}") from error
            if response.status_code not in BUSY or tries == MAX_TRIES:
                break
            time.sleep(_pause_s(response, tries))
        if response.is_error:
            raise _refused(response)
        return response.json()


def _body(prompt: Sequence[int], params: SamplingParams, images: Sequence[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": _sampling(params)}
    return {**body, "image_data": list(images)} if images else body


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return SGLang's words for what is said."""
    unsaid = SamplingParams()
    said = {name: getattr(params, name) for name in PLAIN if getattr(params, name) != getattr(unsaid, name)}
    said |= {"max_new_tokens": params.max_tokens, "min_new_tokens": params.min_tokens}
    said |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    said |= {"stop_regex": list(params.stop_regex)} if params.stop_regex else {}
    said |= {"sampling_seed": params.seed}
    said |= {"logit_bias": {str(token): bias for token, bias in params.logit_bias.items()}} if params.logit_bias else {}
    if params.grammar is not None:
        text = params.grammar.text
        said[params.grammar.kind.value] = text
    return said


def _made(text: str, token_ids: Sequence[int], meta: Mapping[str, Any]) -> Made:
    """Only an output that a stop string or expression ended has text that is not all of its tokens."""
    finish = meta.get("finish_reason") or {}
    matched, ids = finish.get("matched"), tuple(token_ids)
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    return Made(text, ids, meta, is_exact=finish.get("type") != "stop" or isinstance(matched, int))


def _event(event: Mapping[str, Any]) -> Made:
    if "error" in event:
        raise BackendError(str(event["error"].get("message", event["error"])))
    return _made(event["text"], event["output_ids"], event["meta_info"])


def _data(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a stream."""
    for line in lines:
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


def _refused(response: httpx2.Response) -> BackendError:
    try:
        said = response.json()
        words = said["error"]["message"] if isinstance(said["error"], dict) else said["error"]
    except (ValueError, KeyError, TypeError):
        words = response.text[:300]
    return BackendError(f"{response.request.method} {response.request.url.path}: {response.status_code}: {words}")


def _pause_s(response: httpx2.Response, tries: int) -> float:
    """Return how long to wait: what the server says, and something like it where it says nothing."""
    try:
        return min(MAX_PAUSE_S, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return min(MAX_PAUSE_S, 0.25 * float(2**tries))
