"""How the answers look, in the words of OpenAI, vLLM and Jina."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NotRequired

import numpy as np
import orjson
from pydantic import WithJsonSchema
from typing_extensions import TypedDict

from diptych.common.arrays import F32
from diptych.common.event_loop import in_turns
from diptych.router.values.request import new_answer_id
from diptych.router.values.vectors import Pooled

_SCHEMA: Final[dict[str, Any]] = {"anyOf": [{"items": {"type": "number"}, "type": "array"}, {"type": "string"}]}
JsonVector = Annotated[Any, WithJsonSchema(_SCHEMA)]  # an `orjson.Fragment`: numbers, or a string of base64


class VectorUsage(TypedDict):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """What is said of one input."""

    object: Literal["embedding"]
    index: int
    embedding: JsonVector


class EmbeddingList(TypedDict):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class Head(TypedDict):
    """What vLLM's answers begin with."""

    id: str
    object: Literal["list"]
    created: int
    model: str


class PooledVector(TypedDict):
    """What is said of one input, as the model made it."""

    object: Literal["pooling"]
    index: int
    data: JsonVector


class PooledList(Head):
    """The answer of /pooling."""

    data: list[PooledVector]
    usage: VectorUsage


class Classified(TypedDict):
    """What is said of one input."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifiedList(Head):
    """The answer of /classify."""

    data: list[Classified]
    usage: VectorUsage


class Score(TypedDict):
    """What is said of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Head):
    """The answer of /v1/score."""

    data: list[Score]
    usage: VectorUsage


class RankedText(TypedDict):
    """A document."""

    text: str


class Ranked(TypedDict):
    """A document's place in the list is its rank."""

    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class RankedList(TypedDict):
    """The answer of /v1/rerank."""

    id: str
    model: str
    usage: VectorUsage
    results: list[Ranked]


def head(prefix: str, model: str) -> Head:
    return {"id": new_answer_id(f"{prefix}-"), "object": "list", "created": int(time.time()), "model": model}


def usage_of(pooled: Sequence[Pooled]) -> VectorUsage:
    total = sum(each.prompt_tokens for each in pooled)
    return {"prompt_tokens": total, "total_tokens": total}


async def encoded(pooled: Sequence[Pooled], encoding_format: str | None) -> list[JsonVector]:
    """Return the vectors as JSON. They may be millions of numbers: others have their turn between two vectors."""
    return [_encoded(each.vector, encoding_format) async for each in in_turns(pooled)]


def _encoded(vector: F32, encoding_format: str | None) -> orjson.Fragment:
    """Return numbers, as short as float32 allows, or in base64 the bytes of little-endian float32."""
    if encoding_format == "base64":
        return orjson.Fragment(b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes()))
    numbers = np.ascontiguousarray(vector, np.float32)
    return orjson.Fragment(orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY))
