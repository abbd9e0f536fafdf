"""The official client's structured output, completions, models and errors against the real platform."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

Platform = Any
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


class Answer(BaseModel):
    """A shape of answers."""

    city: Literal["Paris", "Rome"]
    sure: bool


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    common = {"model": "", "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**{**common, **fields})


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    common = {"model": "", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    return client.completions.create(**{**common, **fields})


def test_an_answer_of_a_class_is_read_back_into_it(openai_client: openai.OpenAI, openai_model: str) -> None:
    completion = openai_client.chat.completions.parse(
        model=openai_model, messages=QUESTION, response_format=Answer, temperature=0, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, Answer)


def test_a_streamed_answer_of_a_class(openai_client: openai.OpenAI, openai_model: str) -> None:
    fields: Any = {"response_format": Answer, "temperature": 0, "max_tokens": 60}
    with openai_client.chat.completions.stream(model=openai_model, messages=QUESTION, **fields) as stream:
        parsed: Any = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Answer)


def test_any_json_object(openai_client: openai.OpenAI) -> None:
    choice = chat(openai_client, response_format={"type": "json_object"}, max_tokens=80).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


def test_text_is_a_format_too(openai_client: openai.OpenAI) -> None:
    answer = chat(openai_client, response_format={"type": "text"})
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_one_of_several_texts(openai_client: openai.OpenAI) -> None:
    answer = chat(openai_client, extra_body={"guided_choice": ["Berlin", "Rome"]})
    assert answer.choices[0].message.content in ("Berlin", "Rome")


def test_a_schema_that_can_not_be_kept_is_refused(openai_client: openai.OpenAI) -> None:
    schema = {"name": "x", "schema": {"not": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError):
        chat(openai_client, response_format={"type": "json_schema", "json_schema": schema})


def test_a_completion_says_what_it_is(openai_client: openai.OpenAI, openai_model: str) -> None:
    answer = complete(openai_client, model=openai_model)
    assert (answer.object, answer.model, answer.id.startswith("cmpl-")) == ("text_completion", openai_model, True)
    assert (answer.choices[0].text.startswith(" Paris"), answer.choices[0].finish_reason) == (True, "length")


def test_each_prompt_has_a_choice(openai_client: openai.OpenAI) -> None:
    answer = complete(openai_client, prompt=[PROMPT, "1, 2, 3, 4,"], max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    assert "5" in answer.choices[1].text


def test_a_streamed_completion_is_the_same(openai_client: openai.OpenAI) -> None:
    chunks = list(complete(openai_client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(openai_client).choices[0].text


def test_an_echo_stands_in_front(openai_client: openai.OpenAI) -> None:
    assert complete(openai_client, echo=True, max_tokens=1).choices[0].text.startswith(f"{PROMPT} Paris")


def test_scores_of_an_echo(openai_client: openai.OpenAI) -> None:
    scores = complete(openai_client, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert "".join(scores.tokens) == f"{PROMPT} Paris"
    assert scores.token_logprobs[0] is None
    assert scores.text_offset[:2] == [0, 3]
    assert len(scores.tokens) == len(scores.top_logprobs) == len(scores.token_logprobs)


def test_the_best_of_several(openai_client: openai.OpenAI) -> None:
    answer = complete(openai_client, best_of=3, n=1, temperature=1.0, seed=1)
    assert (len(answer.choices), answer.usage.completion_tokens) == (1, 12)


def test_models_are_listed_and_found(openai_client: openai.OpenAI, openai_model: str) -> None:
    models = [model.id for model in openai_client.models.list()]
    assert models[0] == openai_model
    assert openai_client.models.retrieve(openai_model).object == "model"
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 3.5e38}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_what_is_wrong_is_named(openai_client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, **fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_a_model_that_is_not_served_is_not_found(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(openai_client, model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_prompt_longer_than_the_context_is_refused(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(openai_client, prompt=[1] * 9000)
    assert caught.value.code == "context_length_exceeded"


def test_a_failed_stream_request_is_an_error_with_a_status(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(openai_client, stream=True, top_p=2)


def test_a_client_that_gives_up_leaves_nothing_behind(openai_client: openai.OpenAI, platform: Platform) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(openai_client, max_tokens=2000, extra_body={"ignore_eos": True}, timeout=0.3)
    platform.assert_clean()
