"""Chats about images with the clients that people use: through one worker, and through a pair, in real processes."""

from __future__ import annotations

import itertools
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import tokenizers
from pictures import anthropic_image, data_url, file_of, picture, scaled_by_transformers
from tiny_vision import VisionModel

from diptych import lang
from diptych.architectures.vision import VisionInput
from diptych.checkpoints.source import open_model
from diptych.common.members.roles import WORKER_ROLES
from diptych.v1.bootstrap_pb2 import ROLE_ENCODE, ROLE_PREFILL

NUM_TOKENS = 6
PHOTO, DRAWING = picture(100, 70, 1), picture(20, 37, 2)  # scaled down, and to multiples
COUNTED = [
    (ROLE_ENCODE, "images_encoded_total"),
    (ROLE_PREFILL, "images_encoded_total"),
    (ROLE_PREFILL, "images_pulled_total"),
]
HOW: dict[str, Any] = {"model": "", "temperature": 0, "max_tokens": NUM_TOKENS}
EXTRA = {"ignore_eos": True, "return_token_ids": True}
SHAPES = {"a pair, and who encodes": (1, 1, ("--encode", "1"))}
if os.environ.get("DIPTYCH_DEEP_CHECKS"):  # tests/pd/test_processes.py asks one scheduler alone
    SHAPES["one worker"] = (0, 0, ("--unified", "1"))


@pytest.fixture(scope="module")
def vision(vision_model: VisionModel) -> VisionInput:
    found = open_model(str(vision_model.folder)).config.vision
    assert found is not None
    return found


@pytest.fixture(scope="module", params=SHAPES)
def platform(request: pytest.FixtureRequest, start_shared: Any, vision_model: VisionModel) -> Any:
    prefill, decode, options = SHAPES[request.param]
    model = ("--model", str(vision_model.folder))
    return start_shared(prefill=prefill, decode=decode, options=(*model, *options), DIPTYCH_DTYPE="float32")


@pytest.fixture
def client(platform: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def shown(image: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file_of(image))}}


def text(words: str) -> Any:
    return {"type": "text", "text": words}


def ask(client: openai.OpenAI, *parts: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(messages=messages, extra_body=EXTRA, **HOW)


def wanted(model: VisionModel, vision: VisionInput, *parts: Any) -> list[int]:
    """Return the tokens of transformers for the same user's message; `parts` are texts and images."""
    backend = tokenizers.Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    prompt: list[Any] = []
    for part in ("<|im_start|>user\n", *parts, "<|im_end|>\n<|im_start|>assistant\n"):
        if isinstance(part, str):
            prompt += backend.encode(part).ids
        else:
            frame = [vision.start.token_id, scaled_by_transformers(part, vision), vision.end.token_id]
            prompt += frame
    return model.greedy(prompt, NUM_TOKENS)


def num_encoded(platform: Any) -> int:
    """Return how many images all workers have encoded."""
    return sum(counted(platform, role, "images_encoded") for role in WORKER_ROLES)


def counted(platform: Any, role: int, what: str) -> int:
    """Return what all workers of a role have counted."""
    total = 0
    for worker in (each for each in platform.instances() if each.role == role):
        with urllib.request.urlopen(f"http://{worker.metrics_address}/metrics", timeout=200) as answer:
            lines = answer.read().decode().splitlines()
        total += sum(int(float(line.split()[-1])) for line in lines if what in line and line[0] != "#")
    return total


def test_answers_are_those_of_transformers(
    client: openai.OpenAI, vision_model: VisionModel, vision: VisionInput
) -> None:
    answer = ask(client, text("See "), shown(PHOTO), text(" and "), shown(DRAWING))
    assert answer.choices[0].token_ids == wanted(vision_model, vision, "See ", PHOTO, " and ", DRAWING)
    places = sum(vision.tokens_of(*vision.scaled(image.height, image.width)) for image in (PHOTO, DRAWING))
    assert answer.usage.prompt_tokens_details.image_tokens == places


def test_where_there_is_an_encode_worker_it_encodes_and_its_rows_cross_to_who_computes_the_prompt(
    platform: Any, client: openai.OpenAI, vision_model: VisionModel, vision: VisionInput, wait_until: Any
) -> None:
    if not any(each.role == ROLE_ENCODE for each in platform.instances()):
        pytest.skip("there is none")
    seeds = itertools.count(100)

    def is_asked() -> bool:
        """A pair serves before it has a link to who encodes: until then it encodes itself."""
        ask(client, shown(picture(40, 50, next(seeds))))
        return counted(platform, ROLE_ENCODE, "images_encoded") > 0

    wait_until(is_asked, 60.0, "an image is encoded by the encode worker")
    before = [counted(platform, *what) for what in COUNTED]
    image = picture(70, 90, 11)
    answer = ask(client, shown(image), text("And?"))
    assert answer.choices[0].token_ids == wanted(vision_model, vision, image, "And?")
    after = [counted(platform, *what) for what in COUNTED]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0, 1]


def test_the_order_of_images_matters(client: openai.OpenAI, vision_model: VisionModel, vision: VisionInput) -> None:
    answer = ask(client, shown(DRAWING), shown(PHOTO))
    assert answer.choices[0].token_ids == wanted(vision_model, vision, DRAWING, PHOTO)


def test_an_image_that_was_seen_is_not_encoded_again(platform: Any, client: openai.OpenAI) -> None:
    image = shown(picture(64, 64, 7))
    first = ask(client, image, text(" What is it?"))
    encoded = num_encoded(platform)
    assert encoded > 0
    again = ask(client, image, text(" What is it?"))
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert num_encoded(platform) == encoded
    platform.assert_clean()


def test_anthropics_client_gets_the_same_answer(platform: Any, client: openai.OpenAI) -> None:
    with anthropic.Anthropic(base_url=platform.url, api_key="none", max_retries=0) as other:
        content: Any = [text("See "), anthropic_image(file_of(PHOTO))]
        said: Any = [{"role": "user", "content": content}]
        greedy = {"temperature": 0}
        theirs = other.messages.create(model="", max_tokens=NUM_TOKENS, messages=said, extra_body=greedy)
    messages: Any = [{"role": "user", "content": [text("See "), shown(PHOTO)]}]
    ours = client.chat.completions.create(messages=messages, **HOW)
    assert "".join(getattr(block, "text", "") for block in theirs.content) == (ours.choices[0].message.content or "")


def test_a_program_about_an_image_says_what_a_chat_says(platform: Any, client: openai.OpenAI) -> None:
    @lang.function
    def program(s: Any) -> None:
        s += lang.user("See " + lang.image(file_of(PHOTO)))
        s += lang.assistant(lang.gen("answer", max_tokens=NUM_TOKENS) + lang.select("choice", ["w1", "w2 w3"]))

    with lang.RuntimeEndpoint(platform.url) as endpoint:
        state = program.run(backend=endpoint, temperature=0.0)
    messages: Any = [{"role": "user", "content": [text("See "), shown(PHOTO)]}]
    assert state["answer"] == client.chat.completions.create(messages=messages, **HOW).choices[0].message.content
    assert state["choice"] in ("w1", "w2 w3")
    assert all(len(each) >= 1 for each in state.get_meta_info("choice")["input_token_logprobs"])


def test_what_is_no_image_is_refused(client: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(b"no image")}}
    with pytest.raises(openai.BadRequestError, match="PNG, JPEG, WebP or GIF"):
        ask(client, part)


def test_an_image_is_seen_when_the_worker_that_encodes_is_killed(
    platform: Any, client: openai.OpenAI, vision_model: VisionModel, vision: VisionInput
) -> None:
    """At once, when routers think that it is there, and until another one is."""
    if not platform.components("encode"):
        pytest.skip("there is none")
    platform.kill("encode")
    for seed in (21, 22):
        image = picture(70, 90, seed)
        answer = ask(client, shown(image), text("And?"))
        assert answer.choices[0].token_ids == wanted(vision_model, vision, image, "And?")
