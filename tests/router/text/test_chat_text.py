"""What becomes of a chat before it is tokenised: the template's words for tools and for effort."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diptych.common.errors import InvalidRequest
from diptych.generation.grammar import Grammar, Preamble
from diptych.generation.sampling_params import SamplingParams
from diptych.router.text.chat_text import render
from diptych.router.text.parsing.message_formats import MessageFormats
from diptych.router.text.parsing.parts import Content, Reasoning
from diptych.router.text.tokenization import Tokenization
from diptych.router.values.request import ChatPrompt, ClientRequest, ServedModel
from diptych.tokens.chat_template import ChatTemplate
from diptych.tokens.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now"}}]


def rendered(byte_tokenizer: Tokenizer, source: str, prompt: ChatPrompt) -> str:
    template = ChatTemplate(source, {})
    return render(Tokenizer(byte_tokenizer._backend, eos_ids=[0], chat_template=template), prompt)


@pytest.mark.parametrize(
    ("source", "effort", "wanted"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", "low", "low"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ thinking }}", "none", "False"),
        ("{{ messages | length }}", "none", "1"),
        ("{{ messages | length }}", "high", "1"),
        ("{{ enable_thinking }}", None, ""),
    ],
)
def test_effort_is_said_in_the_templates_words(
    byte_tokenizer: Tokenizer, source: str, effort: Any, wanted: str
) -> None:
    assert rendered(byte_tokenizer, source, ChatPrompt(MESSAGES, reasoning_effort=effort)) == wanted


@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "reasoning_effort"])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages | length }}", {"enable_thinking": "1", "thinking": "1", "reasoning_effort": "1"}),
        ("{{ thinking }}", {"enable_thinking": "off", "thinking": "off", "reasoning_effort": ""}),
        ("{{ enable_thinking }}", {"enable_thinking": "off", "thinking": "off", "reasoning_effort": ""}),
        ("{{ reasoning_effort }}", {"enable_thinking": "", "thinking": "", "reasoning_effort": "off"}),
        ("{{ thinking }}{{ enable_thinking }}", {"enable_thinking": "off", "thinking": "off", "reasoning_effort": ""}),
    ],
)
def test_one_setting_of_thinking_is_taken_by_templates_of_every_kind(
    byte_tokenizer: Tokenizer, source: str, wanted: dict[str, str], name: str
) -> None:
    assert rendered(byte_tokenizer, source, ChatPrompt(MESSAGES, template_kwargs={name: "off"})) == wanted[name]


def test_the_templates_own_parameters_go_before_effort(byte_tokenizer: Tokenizer) -> None:
    prompt = ChatPrompt(MESSAGES, template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert rendered(byte_tokenizer, "{{ enable_thinking }}", prompt) == "True"


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
STRIPPING = PLAIN.replace("m.content", "m.content.strip()")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "beginning", "wanted"),
    [
        (PLAIN, "so (", "<user>hi</><assistant>so ("),
        (PLAIN, "hi", "<user>hi</><assistant>hi"),
        (PLAIN, "so \n", "<user>hi</><assistant>so \n"),
        (STRIPPING, "so \n", "<user>hi</><assistant>so"),
        (STRIPPING + "so", "so ", "<user>hi</><assistant>so"),
        *[
            (CHATML, said, f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{said}")
            for said in ("<", "e", "|im_end|>", "<\n")
        ],
    ],
)
def test_an_answer_that_is_begun_goes_on_where_it_stopped(
    byte_tokenizer: Tokenizer, source: str, beginning: str, wanted: str
) -> None:
    prompt = ChatPrompt([*MESSAGES, {"role": "assistant", "content": beginning}], is_begun=True)
    assert rendered(byte_tokenizer, source, prompt) == wanted


@pytest.mark.parametrize("source", ["{{ messages[-1].content | upper }}", "nothing", "so {{ messages[0].content }}"])
def test_a_beginning_that_the_template_does_not_show_is_refused(byte_tokenizer: Tokenizer, source: str) -> None:
    prompt = ChatPrompt([*MESSAGES, {"role": "assistant", "content": "so"}], is_begun=True)
    with pytest.raises(InvalidRequest, match="can't be continued"):
        rendered(byte_tokenizer, source, prompt)


def test_a_template_that_knows_tools_gets_them_as_they_are(byte_tokenizer: Tokenizer) -> None:
    source = "{% for t in tools or () %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert rendered(byte_tokenizer, source, ChatPrompt(MESSAGES, TOOLS)) == "nowhi"
    assert rendered(byte_tokenizer, source, ChatPrompt(MESSAGES)) == "hi"


@pytest.mark.parametrize("role", ["system", "user"])
def test_another_is_told_of_them_in_the_first_turn(byte_tokenizer: Tokenizer, role: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = rendered(byte_tokenizer, source, ChatPrompt([{"role": role, "content": "hi"}], TOOLS))
    assert '{"type": "function", "function": {"name": "now"}}' in text
    if role == "system":
        assert text.startswith("<system>hi\n\nYou may call functions")
    else:
        assert text.startswith("<user>You may call functions")
        assert text.endswith("</tool_call>\n\nhi")


def test_results_of_calls_are_one_turn(byte_tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        *[{"role": "tool", "content": text, "tool_call_id": "c"} for text in ("1", "2")],
    ]
    assert rendered(byte_tokenizer, source, ChatPrompt(turns)) == (
        '<user>hi<assistant>I look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        "<user><tool_response>\n1\n</tool_response>\n\n<tool_response>\n2\n</tool_response>"
    )


def test_an_answer_of_a_given_shape_comes_after_what_the_prompt_opens(byte_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}<think>\n", {})
    tokenizer = Tokenizer(byte_tokenizer._backend, eos_ids=[256], chat_template=template)
    model = ServedModel("m", tokenizer, 257, 99, MessageFormats.named("auto", "think", ""))
    tokenization = Tokenization(model, at="router", num_threads=1, cache_bytes=0)
    shape = SamplingParams(grammar=Grammar.from_choices(["yes"]))
    (shaped,) = asyncio.run(tokenization.tokenize(ClientRequest("", [ChatPrompt(MESSAGES)], shape, None, None), 99))
    (free,) = asyncio.run(
        tokenization.tokenize(ClientRequest("", [ChatPrompt(MESSAGES)], SamplingParams(), None, None), 99)
    )
    tokenization.close()
    assert (shaped.preamble, free.preamble) == (Preamble("", "</think>"), None)
    for tokenized in (shaped, free):
        assert tokenized.new_parser is not None
        parser = tokenized.new_parser()
        parts = [*parser.push("Hm.</think>yes"), *parser.finish()]
        assert parts == [Reasoning("Hm."), Content("yes")]
