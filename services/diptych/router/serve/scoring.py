"""Embeddings, and how well pairs of texts fit, by whatever the served model is.

A classifier scores each pair, an embedding model the two texts by themselves: the score is their cosine. A model that
makes text is asked for yes or no in the words that Qwen3-Reranker was trained with: the score is the share of yes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from diptych.common.errors import InvalidRequest
from diptych.common.event_loop import in_turns
from diptych.router.serve.pipeline import Pipeline
from diptych.router.values.request import ClientRequest, FramedPrompt, PairPrompt, Prompt, ServedModel, TextPrompt
from diptych.router.values.vectors import Pooled, check_dimensions, embedding, likeness, probabilities, softmax

JUDGE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
MARK: Final = "<|im_start|>"  # a special token of the models that know these words

NewRequest = Callable[[Sequence[Prompt], tuple[int, ...]], ClientRequest]  # of prompts, and labels
Pairs = Sequence[tuple[str, str]]


class Scored(NamedTuple):
    """The scores of pairs, and the vectors of which they were made."""

    scores: list[float]
    pooled: list[Pooled]


async def embed(client: ClientRequest, dimensions: int | None, pipeline: Pipeline) -> list[Pooled]:
    """Return an embedding of each prompt, with so many dimensions; None: all. Raises the caller's `DiptychError`."""
    model = pipeline.model
    if model.pooling is None:
        return await pipeline.vectors(client)  # which says why not
    if model.pooling.purpose != "embed":
        text = f"{model.model_id} is a classifier and makes no embeddings: ask for /classify"
        raise InvalidRequest(text, param="model")
    check_dimensions(dimensions, model.vector_size)
    make = partial(embedding, normalize=model.pooling.normalize, dimensions=dimensions)
    pooled = await pipeline.vectors(client)
    return [each._replace(vector=make(each.vector)) async for each in in_turns(pooled)]


async def score(pairs: Pairs, instruction: str | None, new_request: NewRequest, pipeline: Pipeline) -> Scored:
    """Raises the caller's `DiptychError`."""
    pooling = pipeline.model.pooling
    if pooling is None:
        return await _by_words(pairs, instruction or INSTRUCTION, new_request, pipeline)
    if instruction is not None:
        raise InvalidRequest("this model takes no instruction: leave it out", param="instruction")
    if pooling.purpose == "embed":
        return await _by_likeness(pairs, new_request, pipeline)
    if len(pooling.labels) != 1:
        text = f"this model tells {len(pooling.labels)} labels apart, and a score is of one: ask for /classify"
        raise InvalidRequest(text, param="model")
    pipeline.check_count(len(pairs))
    pooled = await pipeline.vectors(new_request([PairPrompt(*pair) for pair in pairs], ()))
    return Scored([float(probabilities(each.vector, pooling)[0]) for each in pooled], pooled)


async def _by_likeness(pairs: Pairs, new_request: NewRequest, pipeline: Pipeline) -> Scored:
    """Each text is computed once, however many pairs it is in."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    pooled = await pipeline.vectors(new_request([TextPrompt(text) for text in texts], ()))
    vectors = {text: each.vector for text, each in zip(texts, pooled, strict=True)}
    scores = [likeness(vectors[first], vectors[second]) async for first, second in in_turns(pairs)]
    return Scored(scores, pooled)


async def _by_words(pairs: Pairs, instruction: str, new_request: NewRequest, pipeline: Pipeline) -> Scored:
    labels = answer_ids(pipeline.model)
    pipeline.check_count(len(pairs))
    prompts = [FramedPrompt(JUDGE, judged(instruction, *pair), ANSWER) for pair in pairs]
    pooled = await pipeline.vectors(new_request(prompts, labels))
    return Scored([float(softmax(np.asarray(each.vector))[1]) for each in pooled], pooled)


def judged(instruction: str, query: str, document: str) -> tuple[str, ...]:
    """Return the parts of what is asked: joined they would be a copy of a long query for each document."""
    return "<Instruct>: ", instruction, "\n<Query>: ", query, "\n<Document>: ", document


def answer_ids(model: ServedModel) -> tuple[int, int]:
    """Return the tokens of "no" and "yes". Raises `InvalidRequest` for a model that can't be asked so."""
    found = [model.tokenizer.encode(word) for word in ("no", "yes")]
    if MARK not in model.tokenizer.special_tokens or any(len(ids) != 1 for ids in found):
        text = f"{model.model_id} makes text, and not in the form in which it could judge pairs: serve a reranker"
        raise InvalidRequest(text, param="model")
    return found[0][0], found[1][0]
