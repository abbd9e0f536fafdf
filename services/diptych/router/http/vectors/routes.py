"""What is done at each path of the APIs that want no text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.common.event_loop import in_turns
from diptych.generation.sampling_params import SamplingParams
from diptych.router.errors import DISCONNECTED, OK, outcome_of
from diptych.router.http.exchange.answers import json_response, refusal, request_id_of
from diptych.router.http.exchange.body import BodyReader
from diptych.router.http.exchange.disconnect import until_disconnect
from diptych.router.http.exchange.key_gate import caller_of
from diptych.router.http.exchange.parse import Origin, read_fields
from diptych.router.http.exchange.traced import trace_of
from diptych.router.http.vectors.vector_answers import (
    Classified,
    ClassifiedList,
    EmbeddingList,
    PooledList,
    Ranked,
    RankedList,
    ScoreList,
    encoded,
    head,
    usage_of,
)
from diptych.router.http.vectors.vector_paths import EMBEDDINGS, RERANK
from diptych.router.http.vectors.vector_requests import (
    ClassifyRequest,
    EmbeddingsRequest,
    InputFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorFields,
)
from diptych.router.serve.models import Models
from diptych.router.serve.pipeline import Pipeline
from diptych.router.serve.scoring import Scored, embed, score
from diptych.router.tracing.record import Trace
from diptych.router.values.request import ClientRequest, Prompt
from diptych.router.values.vectors import Pooled, probabilities


@dataclass(frozen=True, slots=True)
class Sender:
    """Where a request came from, and who serves it."""

    origin: Origin
    pipeline: Pipeline

    def request(self, fields: VectorFields, prompts: Sequence[Prompt], labels: tuple[int, ...] = ()) -> ClientRequest:
        pooling, params = fields.pooling_params(labels), SamplingParams()
        return self.origin.request(fields, prompts, params, user=fields.user, max_tokens=1, vectors=pooling)

    async def vectors(self, fields: InputFields) -> list[Pooled]:
        return await self.pipeline.vectors(self.request(fields, fields.prompts()))

    def name(self, fields: VectorFields) -> str:
        """Return what the answer calls the model."""
        return fields.model or self.pipeline.model.model_id


Work = Callable[[Any, Sender], Awaitable[Mapping[str, object]]]


async def embeddings(fields: EmbeddingsRequest, sender: Sender) -> EmbeddingList:
    pooled = await embed(sender.request(fields, fields.prompts()), fields.dimensions, sender.pipeline)
    made = await encoded(pooled, fields.encoding_format)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(made)],
        "model": sender.name(fields),
        "usage": usage_of(pooled),
    }


async def pool(fields: PoolingRequest, sender: Sender) -> PooledList:
    """Give vectors as the model made them: embeddings that are not normalised, scores that are no probabilities."""
    pooled = await sender.vectors(fields)
    made = await encoded(pooled, fields.encoding_format)
    return {
        **head("pool", sender.name(fields)),
        "data": [{"object": "pooling", "index": index, "data": each} for index, each in enumerate(made)],
        "usage": usage_of(pooled),
    }


async def classify(fields: ClassifyRequest, sender: Sender) -> ClassifiedList:
    pooling, model = sender.pipeline.model.pooling, sender.pipeline.model
    if pooling is None or pooling.purpose != "classify":
        raise InvalidRequest(f"{model.model_id} is no classifier: serve one, or ask for what it makes", param="model")
    pooled = await sender.vectors(fields)
    data: list[Classified] = []
    async for index, each in in_turns(enumerate(pooled)):
        shares = probabilities(each.vector, pooling)
        label, probs = pooling.labels[int(shares.argmax())], shares.astype(float).tolist()
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    return {**head("classify", sender.name(fields)), "data": data, "usage": usage_of(pooled)}


async def score_pairs(fields: ScoreRequest, sender: Sender) -> ScoreList:
    found = await _score(fields, fields.pairs(), fields.instruction, sender)
    return {
        **head("score", sender.name(fields)),
        "data": [{"index": index, "object": "score", "score": each} for index, each in enumerate(found.scores)],
        "usage": usage_of(found.pooled),
    }


async def rerank(fields: RerankRequest, sender: Sender) -> RankedList:
    texts = fields.texts
    found = await _score(fields, [(fields.query, text) for text in texts], fields.instruction, sender)
    order = sorted(range(len(texts)), key=lambda index: (-found.scores[index], index))[: fields.top_n]
    results: list[Ranked] = [{"index": index, "relevance_score": found.scores[index]} for index in order]
    if fields.return_documents is not False:
        results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
    name = sender.name(fields)
    return {"id": head("rerank", name)["id"], "model": name, "usage": usage_of(found.pooled), "results": results}


async def _score(
    fields: VectorFields, pairs: Sequence[tuple[str, str]], instruction: str | None, sender: Sender
) -> Scored:
    return await score(pairs, instruction, partial(sender.request, fields), sender.pipeline)


VECTOR_APIS: Final[Mapping[str, tuple[type[VectorFields], Work]]] = {  # by path: the body, and what is made of it
    EMBEDDINGS: (EmbeddingsRequest, embeddings),
    "/pooling": (PoolingRequest, pool),
    "/classify": (ClassifyRequest, classify),
    "/v1/score": (ScoreRequest, score_pairs),
    "/score": (ScoreRequest, score_pairs),
    **dict.fromkeys(RERANK, (RerankRequest, rerank)),
}


async def answer_vectors(path: str, request: Request, models: Models, bodies: BodyReader) -> Response:
    """Return the answer to a request of a path of `VECTOR_APIS`."""
    body, work = VECTOR_APIS[path]
    caller, trace = caller_of(request), trace_of(request.scope)
    origin = Origin(request_id_of(request.headers), request.headers, caller, trace)
    trace.note_origin(origin.request_id, caller.name)
    held = bodies.hold(caller.name)
    try:
        fields = await bodies.read(request, held, partial(_parsed, body, trace))
        sender = Sender(origin, models.named(fields.model or ""))
        found = await until_disconnect(request.receive, work(fields, sender))
    except DiptychError as error:
        _end(models, trace, outcome_of(error))
        return refusal(error, request)
    finally:
        held.release()
    _end(models, trace, OK if found else DISCONNECTED)
    return json_response(found, request)


def _end(models: Models, trace: Trace, outcome: str) -> None:
    models.metrics.requests.labels("vectors", outcome).inc()
    trace.note_outcome(outcome)


def _parsed(body: type[VectorFields], trace: Trace, text: bytes) -> VectorFields:
    trace.mark("read")
    fields = read_fields(body, text)
    trace.note_parsed(is_stream=False)
    return fields
