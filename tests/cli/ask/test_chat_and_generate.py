from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from diptych.cli.main import main
from diptych.v1 import inference_pb2_grpc
from diptych.v1.inference_pb2 import (
    ChatMessage,
    GenerateChunk,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    SamplingParams,
)


class Parrot(inference_pb2_grpc.InferenceServicer):
    """Answers each request with two chunks; remembers what it was asked. Refuses the word "bad"."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        if dict(context.invocation_metadata()).get("authorization") == "Bearer wrong":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
        return ListModelsResponse()

    def GenerateStream(self, request: GenerateRequest, context: Any) -> Iterator[GenerateChunk]:
        self.requests.append(request)
        last = request.chat.messages[-1].content if request.HasField("chat") else request.text
        if "bad" in last:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "that is a bad word")
        yield GenerateChunk(text="you said ")
        yield GenerateChunk(text=last)


@pytest.fixture
def parrot() -> Iterator[tuple[Parrot, str]]:
    """The servicer and its address."""
    with ThreadPoolExecutor(2) as pool:
        server, servicer = grpc.server(pool), Parrot()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(grace=None).wait()


def test_generate_sends_prompt_and_sampling_and_prints_the_answer(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, target = parrot
    options = "--model m --max-tokens 9 --temperature 0.5 --top-p 0.25 --top-k 7 --seed 3 --stop END"
    assert main(["generate", "Once upon", "--target", target, *options.split()]) == 0
    assert capsys.readouterr().out == "you said Once upon\n"
    sampling = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.25, top_k=7, seed=3, stop=["END"])
    assert servicer.requests == [GenerateRequest(model="m", text="Once upon", sampling=sampling)]


def test_what_is_not_asked_for_is_left_to_the_router(parrot: tuple[Parrot, str]) -> None:
    servicer, target = parrot
    assert main(["generate", "x", "--target", target]) == 0
    assert servicer.requests == [GenerateRequest(text="x", sampling=SamplingParams(max_tokens=256))]


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize("option", ["--max-tokens=-1", "--top-k=-1", "--top-k=4294967296", "--seed=-3"])
def test_a_number_that_the_api_cant_take_is_refused_by_name(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, _, value = option.partition("=")
    with pytest.raises(SystemExit, match="2"):
        main([command, option, "--target", "127.0.0.1:1"])
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"diptych {command}: {flag} must be from 0 to ")
    assert f"not {value}\n" in refusal


def test_generate_reads_a_prompt_from_standard_input(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "--target", parrot[1]]) == 0
    assert capsys.readouterr().out == "you said from a pipe\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_is_no_utf_8_is_refused_in_words(
    command: str,
    errors: str,
    parrot: tuple[Parrot, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert main([command, "--target", parrot[1]]) == 1
    words = "standard input is no UTF-8: convert it first, as with `iconv -t utf-8`"
    assert capsys.readouterr().err == f"diptych {command}: {words}\n"


def test_a_refused_request_is_an_error_with_the_routers_words(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "bad", "--target", parrot[1]]) == 1
    assert capsys.readouterr().err == "diptych generate: that is a bad word (INVALID_ARGUMENT)\n"


def test_chat_sends_the_whole_conversation_each_time(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, target = parrot
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\n\nthree\n/quit\nfour\n"))
    assert main(["chat", "--target", target, "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\nyou said three\n"
    system = ChatMessage(role="system", content="be brief")
    said = [[(each.role, each.content) for each in request.chat.messages] for request in servicer.requests]
    start = (system.role, system.content)
    assert said == [
        [start, ("user", "one")],
        [start, ("user", "one"), ("assistant", "you said one"), ("user", "two")],
        [start, ("user", "three")],
    ]


@pytest.mark.parametrize(("options", "temperature"), [([], 0.7), (["--temperature", "0"], 0.0)])
def test_chat_draws_likelier_words_than_the_api_unless_told(
    parrot: tuple[Parrot, str], monkeypatch: pytest.MonkeyPatch, options: list[str], temperature: float
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", "--target", parrot[1], *options]) == 0
    assert parrot[0].requests[0].sampling.temperature == pytest.approx(temperature)


def test_a_piped_chat_ends_at_the_first_error(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\nnever asked\n"))
    assert main(["chat", "--target", parrot[1]]) == 1
    assert "that is a bad word" in capsys.readouterr().err
    assert len(parrot[0].requests) == 1


@pytest.mark.parametrize("typed", ["", "hello\n", "/quit\n"])
def test_chat_without_a_platform_says_so_whatever_is_typed(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", "--target", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("diptych chat: nobody answers at 127.0.0.1:1: start Diptych with")


def test_chat_with_a_key_that_is_not_known_says_so_before_anything_is_typed(
    parrot: tuple[Parrot, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--target", parrot[1], "--api-key", "wrong"]) == 1
    assert "set DIPTYCH_API_KEY" in capsys.readouterr().err


def test_chat_that_ends_at_once_is_well(parrot: tuple[Parrot, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--target", parrot[1]]) == 0
