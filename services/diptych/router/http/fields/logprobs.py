"""How log-probabilities look in the answers of both APIs, and in vLLM's extension for prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from diptych.router.values.output import Scores
from diptych.tokens.token_bytes import TokenBytes

Json = dict[str, Any]
Entry = tuple[int, float, list[tuple[int, float]]]  # a token, its log-probability, and its alternatives'

Name = Callable[[int], str]  # how a token is written

LEAST: Final = -9999.0  # stands for less than that: JSON has no infinity


def chat_entries(scores: Scores, token_bytes: TokenBytes, name: Name) -> list[Json]:
    """Return what chats and responses say of each token."""
    content = []
    for token_id, logprob, top in entries(scores):
        alternatives = [_chat_entry(other, value, token_bytes, name) for other, value in top]
        content.append({**_chat_entry(token_id, logprob, token_bytes, name), "top_logprobs": alternatives})
    return content


def completion_logprobs(parts: Sequence[Scores], name: Name) -> Json:
    """Return the `logprobs` object of a completion choice: of the prompt, if it is echoed, and of the output."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for part in parts:
        unscored = part.token_ids[: len(part.token_ids) - len(part.logprobs)]
        tokens += map(name, part.token_ids)
        values += [None] * len(unscored)
        tops += [None] * len(unscored)
        for token_id, logprob, top in entries(part):
            values.append(logprob)
            tops.append({name(other): value for other, value in [(token_id, logprob), *top]})
    offsets = [offset for part in parts for offset in part.offsets]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(scores: Scores, token_bytes: TokenBytes) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt, it and its alternatives by token id."""
    listed: list[Json | None] = [None]
    for token_id, logprob, top in entries(scores):
        listed.append(
            {
                str(other): {"logprob": value, "decoded_token": text_of(other, token_bytes)}
                for other, value in [(token_id, logprob), *top]
            }
        )
    return listed


def text_of(token_id: int, token_bytes: TokenBytes) -> str:
    """Return the token as text; bytes that are no whole characters are written out, as OpenAI does."""
    return token_bytes[token_id].decode("utf-8", "backslashreplace")


def id_of(token_id: int) -> str:
    """Return the token as vLLM writes its id: texts of different tokens may be the same."""
    return f"token_id:{token_id}"


def _chat_entry(token_id: int, logprob: float, token_bytes: TokenBytes, name: Name) -> Json:
    return {"token": name(token_id), "logprob": logprob, "bytes": list(token_bytes[token_id])}


def asked_entries(scores: Scores) -> Iterator[list[tuple[int, float]]]:
    """Yield for each scored token the tokens that were asked for by name, with their log-probabilities."""
    asked, width = scores.logprobs, len(scores.logprobs.asked_ids)
    for first in range(0, width * len(asked), width):
        values = [max(value, LEAST) for value in asked.asked_logprobs[first : first + width]]
        yield list(zip(asked.asked_ids, values, strict=True))


def entries(scores: Scores) -> Iterator[Entry]:
    """Yield each scored token with its log-probability and its alternatives."""
    logprobs = scores.logprobs
    token_ids = scores.token_ids[len(scores.token_ids) - len(logprobs) :]
    for index, (token_id, value) in enumerate(zip(token_ids, logprobs.logprobs, strict=True)):
        span = slice(index * logprobs.num_top, (index + 1) * logprobs.num_top)
        values = [max(other, LEAST) for other in logprobs.top_logprobs[span]]
        yield token_id, max(value, LEAST), list(zip(logprobs.top_ids[span], values, strict=True))
