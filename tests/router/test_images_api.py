"""Images in chats of all APIs: what workers are sent, what clients are told, and that nobody else waits for them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from pictures import LIMITS, SPECIAL, VISION, data_url, file_of, picture

from diptych.generation.leg_prompt import contents_of
from diptych.router.http.exchange.parse import read_fields
from diptych.router.http.openai.chat_request import ChatRequest
from diptych.router.images import reader
from diptych.router.images.decode import open_image, read_image
from diptych.router.values.images import ImageInput
from diptych.v1 import inference_pb2, inference_pb2_grpc
from diptych.v1.worker_pb2 import ERROR_CODE_PEER_LOST, StartLeg

Cluster = Any
RED, GREEN = file_of(picture(32, 24, 1)), file_of(picture(64, 40, 2))
TOKENS = {RED: 4 * 3, GREEN: 8 * 5}


@pytest.fixture(scope="module")
def cluster(start_shared_cluster: Any) -> Cluster:
    return start_shared_cluster(special_tokens=SPECIAL, vision=VISION, max_images=3, max_image_bytes=LIMITS.file_bytes)


@pytest.fixture
def legs(cluster: Cluster) -> Callable[[], list[StartLeg]]:
    """Forget what was sent before; return the legs of now: prefill's, decode's."""
    for worker in cluster.workers:
        worker.started.clear()
    return lambda: [*cluster.prefill().started, *cluster.decode().started]


def content_of(file: bytes) -> Any:
    found = read_image(open_image(ImageInput("p"), file, VISION, LIMITS))
    return found.digest, found.image


def text_of(cluster: Cluster, leg: StartLeg) -> str:
    """Return the prompt as a text that shows where contents stand."""
    ids, parts, used, start = list(leg.prompt_token_ids), [], 0, 0
    for content in contents_of(leg):
        parts.append(cluster.tokenizer.decode(ids[used : used + content.start - start], skip_special_tokens=False))
        parts.append("IMAGE")
        used += content.start - start
        start = content.start + content.num_tokens
    return "".join([*parts, cluster.tokenizer.decode(ids[used:], skip_special_tokens=False)])


def text(words: str) -> Any:
    return {"type": "text", "text": words}


def image_url(file: bytes, **fields: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file), **fields}}


def anthropic(file: bytes) -> Any:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def chat(*parts: Any, **fields: Any) -> Any:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def input_text(words: str) -> Any:
    return {"type": "input_text", "text": words}


def input_image(file: bytes) -> Any:
    return {"type": "input_image", "image_url": data_url(file)}


REQUESTS = {
    "/v1/chat/completions": chat(text("a"), image_url(RED), text("b"), image_url(GREEN), text("c")),
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [input_text("a"), input_image(RED), input_text("b"), input_image(GREEN), input_text("c")],
            }
        ]
    },
    "/v1/messages": chat(text("a"), anthropic(RED), text("b"), anthropic(GREEN), text("c"), max_tokens=20),
}
SHOWN = "<user>a[IMAGE]b[IMAGE]c"
NUM_TOKENS = len("<user>a[]b[]c") + TOKENS[RED] + TOKENS[GREEN]


@pytest.mark.parametrize("path", REQUESTS)
def test_images_stand_where_the_chat_template_wants_them(cluster: Cluster, legs: Any, path: str) -> None:
    status, answer = cluster.post(path, REQUESTS[path])
    assert status == 200, answer
    prefill, decode = legs()
    assert text_of(cluster, prefill) == text_of(cluster, decode) == SHOWN
    assert [(each.digest, each.image) for each in contents_of(prefill)] == [content_of(RED), content_of(GREEN)]
    usage = answer["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    assert cached + usage.get("prompt_tokens", usage.get("input_tokens")) == NUM_TOKENS


def test_pixels_go_to_the_leg_that_computes_the_prompt_and_to_no_other(cluster: Cluster, legs: Any) -> None:
    cluster.post("/v1/chat/completions", REQUESTS["/v1/chat/completions"])
    prefill, decode = legs()
    bare = [(each.start, each.num_tokens, each.digest, each.image.height, each.image.width) for each in decode.contents]
    assert bare == [
        (each.start, each.num_tokens, each.digest, each.image.height, each.image.width) for each in prefill.contents
    ]
    assert all(each.image.rgb for each in prefill.contents)
    assert not any(each.image.rgb for each in decode.contents)


def test_usage_says_how_many_places_images_take(cluster: Cluster) -> None:
    usage = cluster.post("/v1/chat/completions", REQUESTS["/v1/chat/completions"])[1]["usage"]
    assert usage["prompt_tokens"] == NUM_TOKENS
    assert usage["prompt_tokens_details"]["image_tokens"] == TOKENS[RED] + TOKENS[GREEN]


def test_a_request_without_images_says_nothing_of_them(cluster: Cluster, legs: Any) -> None:
    usage = cluster.post("/v1/chat/completions", chat(text("a")))[1]["usage"]
    assert "image_tokens" not in usage["prompt_tokens_details"]
    assert not any(leg.contents for leg in legs())


def test_tokens_of_a_prompt_are_shown_as_the_models_processor_writes_them(cluster: Cluster) -> None:
    body = chat(text("a"), image_url(RED))
    _, answer = cluster.post("/v1/chat/completions", {**body, "return_token_ids": True})
    wanted = [*b"<user>a["] + [VISION.pad.token_id] * TOKENS[RED] + [*b"]"]
    ascii_ids = cluster.tokenizer.encode("".join(map(chr, range(128))))
    bytes_of = {token: byte for byte, token in enumerate(ascii_ids)}
    shown = [bytes_of.get(token, token) for token in answer["prompt_token_ids"]]
    assert shown == wanted
    assert cluster.post("/tokenize", body)[1]["tokens"] == answer["prompt_token_ids"]
    counted = cluster.post("/v1/messages/count_tokens", chat(text("a"), anthropic(RED)))[1]
    assert counted == {"input_tokens": len(wanted)}


def test_images_of_a_tools_result_are_shown(cluster: Cluster, legs: Any) -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("see"), anthropic(RED)]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    status, answer = cluster.post("/v1/messages", {"messages": messages, "max_tokens": 5})
    assert status == 200, answer
    assert "see[IMAGE]" in text_of(cluster, legs()[0])


def test_generate_takes_images_for_marks_in_its_text(cluster: Cluster, legs: Any) -> None:
    mark = VISION.pad.text
    both = [data_url(RED), base64.b64encode(GREEN).decode()]
    status, answer = cluster.post("/generate", {"text": f"a{mark}b{mark}c", "image_data": both})
    assert status == 200, answer
    assert text_of(cluster, legs()[0]) == "aIMAGEbIMAGEc"
    assert answer["meta_info"]["prompt_tokens"] == 3 + TOKENS[RED] + TOKENS[GREEN]


def test_each_prompt_of_generate_has_its_own_images(cluster: Cluster, legs: Any) -> None:
    mark = VISION.pad.text
    ids = [[1, VISION.pad.token_id], [2], [3, VISION.pad.token_id]]
    for prompts in ({"text": [f"a{mark}", "b", f"c{mark}"]}, {"input_ids": ids}):
        status, answer = cluster.post("/generate", {**prompts, "image_data": [data_url(RED), None, [data_url(GREEN)]]})
        assert status == 200, answer
        assert [each["meta_info"]["prompt_tokens"] for each in answer] == [1 + TOKENS[RED], 1, 1 + TOKENS[GREEN]]


def test_grpc_takes_files(cluster: Cluster, legs: Any) -> None:
    part = inference_pb2.ContentPart
    message = inference_pb2.ChatMessage(role="user", parts=[part(text="a"), part(image=RED), part(image=GREEN)])
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatMessages(messages=[message]))
        answer = stub.Generate(request)
        assert text_of(cluster, legs()[0]) == "<user>a[IMAGE][IMAGE]"
        assert answer.usage.image_tokens == TOKENS[RED] + TOKENS[GREEN]
        request.chat.messages[0].content = "b"
        with pytest.raises(grpc.RpcError, match="content and parts"):
            stub.Generate(request)


def test_choices_have_the_same_image(cluster: Cluster, legs: Any) -> None:
    status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED), n=2))
    assert status == 200, answer
    assert len(answer["choices"]) == 2
    assert {leg.contents[0].digest for leg in legs()} == {content_of(RED)[0]}
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == TOKENS[RED]


@pytest.mark.parametrize(("detail", "is_small"), [("low", True), ("high", False), ("auto", False), (None, False)])
def test_few_pixels_are_enough_for_little_detail(detail: str | None, is_small: bool) -> None:
    body = json.dumps(chat(image_url(RED, detail=detail))).encode()
    assert [image.is_small for image in read_fields(ChatRequest, body).prompt().images] == [is_small]


MARK = VISION.pad.text
HALVES = MARK[:5], MARK[5:]


@pytest.mark.parametrize(
    "body",
    [
        chat(text(f"a{MARK}"), image_url(RED)),
        chat(text(HALVES[0]), text(HALVES[1]), image_url(RED)),
        {"messages": [{"role": "system", "content": MARK}, *chat(image_url(RED))["messages"]]},
        {"messages": [{"role": "assistant", "content": f"{MARK} {MARK}"}, *chat(image_url(RED))["messages"]]},
    ],
)
def test_a_text_gets_no_image(cluster: Cluster, legs: Any, body: Any) -> None:
    status, answer = cluster.post("/v1/chat/completions", body)
    assert status == 400
    assert MARK in answer["error"]["message"]
    assert legs() == []


def test_without_images_what_stands_for_one_is_a_token_like_others(cluster: Cluster, legs: Any) -> None:
    status, answer = cluster.post("/v1/chat/completions", chat(text(f"a{MARK}")))
    assert status == 200, answer
    assert not any(leg.contents for leg in legs())


@pytest.mark.parametrize(
    ("marks", "images"), [("", [data_url(RED)]), (MARK, [data_url(RED)] * 2), (f"{MARK}b{MARK}", [data_url(RED)])]
)
def test_a_text_must_have_a_mark_for_each_image(cluster: Cluster, marks: str, images: list[str]) -> None:
    status, answer = cluster.post("/generate", {"text": f"a{marks}", "image_data": images})
    assert status == 400
    assert "give one for each" in answer["error"]["message"]


REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "no image": ("chat/completions", chat(image_url(b"hello")), "messages[0].content", "PNG, JPEG"),
    "no base64": (
        "chat/completions",
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}),
        "messages[0].content",
        "base64",
    ),
    "no data url of an image": (
        "chat/completions",
        chat({"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}}),
        "messages[0].content",
        "data:image/png;base64,",
    ),
    "a file of the server": (
        "chat/completions",
        chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        "messages[0].content",
        "http://",
    ),
    "a url where none is fetched": (
        "chat/completions",
        chat({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}),
        "messages[0].content",
        "fetches no images",
    ),
    "a detail that there is not": (
        "chat/completions",
        chat(image_url(RED, detail="most")),
        "messages[0].content",
        "low, high",
    ),
    "too many": ("chat/completions", chat(*[image_url(RED)] * 4), "messages[0].content", "3 images, not 4"),
    "of an assistant": (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": [image_url(RED)]}]},
        "messages[0].content",
        "role 'user' or 'tool'",
    ),
    "prompt_logprobs": (
        "chat/completions",
        chat(image_url(RED), prompt_logprobs=1),
        "prompt_logprobs",
        "leave out",
    ),
    "an uploaded file": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input",
        "uploaded files",
    ),
    "of an assistant in a response": (
        "responses",
        {"input": [{"role": "assistant", "content": [input_image(RED)]}]},
        "input",
        "role is user",
    ),
    "an uploaded file of a message": (
        "messages",
        chat({"type": "image", "source": {"type": "file", "file_id": "f"}}, max_tokens=1),
        "",
        "uploaded files",
    ),
}


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_is_said(cluster: Cluster, path: str, body: Any, param: str, words: str) -> None:
    status, answer = cluster.post(f"/v1/{path}", body)
    assert status == 400, answer
    assert words in answer["error"]["message"]
    assert not param or answer["error"]["param"] == param


def test_a_model_that_takes_no_images_is_named(start_cluster: Any) -> None:
    cluster = start_cluster()
    for path, body in REQUESTS.items():
        status, answer = cluster.post(path, body)
        assert status == 400
        assert "tiny takes no images" in answer["error"]["message"]
    status, answer = cluster.post("/generate", {"text": "a", "image_data": data_url(RED)})
    assert (status, answer["error"]["param"]) == (400, "image_data")


def test_an_image_makes_a_prompt_too_long(cluster: Cluster) -> None:
    status, answer = cluster.post("/v1/chat/completions", chat(text("a" * 2030), image_url(GREEN)))
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


def test_of_a_prompt_that_is_too_long_with_its_images_no_pixels_are_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "read_image", lambda opened: pytest.fail("pixels were made"))
    status, answer = cluster.post("/v1/chat/completions", chat(text("a" * 2030), image_url(GREEN)))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_an_image_is_made_as_small_as_the_operator_says(start_cluster: Any) -> None:
    """One step of a tower on a CPU can take so long that its worker counts as hung."""
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, max_image_scaled_pixels=8 * 8 * 12)
    assert cluster.post("/v1/chat/completions", chat(image_url(GREEN)))[0] == 200
    (content,) = contents_of(cluster.prefill().started[0])
    assert content.num_tokens <= 12 < TOKENS[GREEN]
    assert content.image is not None
    assert content.image.height * content.image.width == 64 * content.num_tokens


def test_images_that_can_not_be_read_in_time_end_their_request(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, image_threads=1, request_timeout_s=0.3)
    go_on = threading.Event()
    monkeypatch.setattr(reader, "open_image", lambda *given: go_on.wait(60) and open_image(*given))
    try:
        status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED)))
    finally:
        go_on.set()
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert cluster.router.preparer._images._places._taken.total() == 0


def test_a_replay_has_the_pixels_again(cluster: Cluster, legs: Any, fail: Any) -> None:
    cluster.script = "Hello, world!"
    cluster.decode().faults.append(fail(3, ERROR_CODE_PEER_LOST))
    status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED)))
    assert status == 200, answer
    again = [leg for leg in legs() if leg.contents[0].image.rgb]
    assert len(again) == 2
    assert again[0].contents == again[1].contents


def test_with_workers_that_tokenise_a_prompt_with_images_goes_as_tokens(start_cluster: Any) -> None:
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, tokenize_at="worker")
    assert cluster.post("/v1/chat/completions", chat(image_url(RED)))[0] == 200
    leg = cluster.prefill().started[0]
    assert leg.prompt_token_ids
    assert not leg.prompt_text


def test_a_request_with_a_cached_image_goes_to_who_has_it(start_cluster: Any) -> None:
    cluster = start_cluster(
        prefill=2, decode=1, special_tokens=SPECIAL, vision=VISION, policy="pair_cost", max_images=8
    )
    first, second = ([worker for worker in cluster.workers if worker.instance.role == 1][i] for i in (0, 1))
    for _ in range(4):
        assert cluster.post("/v1/chat/completions", chat(*[image_url(GREEN)] * 6))[0] == 200
    assert {len(first.started), len(second.started)} == {0, 4}


def test_what_images_take_of_the_memory_is_bounded_and_given_back(start_cluster: Any) -> None:
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, image_memory_bytes=4 * 3 * 24 * 32)
    assert cluster.post("/v1/chat/completions", chat(image_url(RED)))[0] == 200
    budget = cluster.router.preparer._pixels
    cluster.wait_until(lambda: budget.num_bytes == 0)
    status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED), n=2))
    assert status == 400
    assert "fewer outputs" in answer["error"]["message"]
    budget.charge("", 4 * 3 * 24 * 32)
    status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED)))
    assert status == 429
    assert "images and rows of all requests" in answer["error"]["message"]


def test_texts_do_not_wait_behind_images(start_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads for images are busy, and as many requests wait for them as may."""
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, max_concurrent=8, image_threads=1)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> Any:
        begun.release()
        go_on.wait(60)
        return open_image(*given)

    monkeypatch.setattr(reader, "open_image", slow)
    statuses: list[int] = []
    ask = lambda: statuses.append(cluster.post("/v1/chat/completions", chat(image_url(RED)))[0])  # noqa: E731
    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for thread in waiting:
        thread.start()
    try:
        assert begun.acquire(timeout=60)
        cluster.wait_until(lambda: cluster.router.preparer._images._places._taken.total() == 2)
        assert cluster.post("/v1/chat/completions", chat(text("a")))[0] == 200
        assert cluster.post("/v1/completions", {"prompt": "p"})[0] == 200
        status, answer = cluster.post("/v1/chat/completions", chat(image_url(RED)))
        assert (status, "too many requests" in answer["error"]["message"]) == (429, True)
    finally:
        go_on.set()
        for thread in waiting:
            thread.join()
    assert statuses == [200, 200]


def test_the_request_log_has_no_pixels(start_cluster: Any, tmp_path: Any) -> None:
    log = tmp_path / "log"
    cluster = start_cluster(special_tokens=SPECIAL, vision=VISION, request_log=log)
    cluster.post("/v1/chat/completions", chat(image_url(GREEN)))
    cluster.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n"))
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["prompt_len"] == len("<user>[]") + TOKENS[GREEN]
    assert len(line) < 400


def test_what_a_template_writes_for_an_image_becomes_what_the_model_sees_around_it(start_shared_cluster: Any) -> None:
    """As Gemma 3's does, which writes a token that stands before an image; in texts of `/generate`, too."""
    frame = f"({VISION.pad.text}{VISION.start.text})"
    framing = replace(VISION, start=VISION.pad, pad=VISION.start, frame=frame)
    cluster = start_shared_cluster(special_tokens=SPECIAL, vision=framing)
    assert cluster.post("/v1/chat/completions", chat(text("a"), image_url(RED), text("b")))[0] == 200
    assert cluster.post("/generate", {"text": f"a{VISION.pad.text}b", "image_data": [data_url(RED)]})[0] == 200
    assert cluster.post("/generate", {"text": f"a{VISION.start.text}b", "image_data": [data_url(RED)]})[0] == 200
    first, second, third = (text_of(cluster, leg) for leg in cluster.prefill().started)
    assert first.startswith(f"<user>a[({VISION.pad.text}IMAGE)]b")
    assert second == f"a({VISION.pad.text}IMAGE)b"
    assert third == "aIMAGEb"
    status, answer = cluster.post("/v1/chat/completions", chat(text(f"a{VISION.pad.text}"), image_url(RED)))
    assert status == 400
    assert "write it otherwise" in answer["error"]["message"]
