"""What becomes of a chat before it is tokenised: the template's words for tools and for effort."""

from __future__ import annotations

import asyncio
import json
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
from diptych.tokens.tokenizer import Tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "now"}}]


def rendered(byte_tokenizer: Tokenizer, source: str, prompt: ChatPrompt) -> str:
    return render(Tokenizer(byte_tokenizer._backend, eos_ids=[0], chat_template=source), prompt)


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


BUDGET = "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}"


@pytest.mark.parametrize(
    ("effort", "kwargs", "wanted"),
    [
        ("none", {}, "0"),
        ("low", {}, "-1"),
        (None, {"enable_thinking": False}, "0"),
        (None, {"thinking": True}, "-1"),
        ("none", {"thinking_budget": 512}, "512"),
        (None, {"enable_thinking": False, "thinking_budget": 512}, "512"),
    ],
)
def test_a_template_with_a_budget_thinks_not_at_all_within_none(
    byte_tokenizer: Tokenizer, effort: Any, kwargs: dict[str, Any], wanted: str
) -> None:
    prompt = ChatPrompt(MESSAGES, template_kwargs=kwargs, reasoning_effort=effort)
    assert rendered(byte_tokenizer, BUDGET, prompt) == wanted


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


def a_call(call_id: str, name: str = "now") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def calling(call_id: str, **fields: Any) -> list[Any]:
    return [
        {"role": "assistant", "content": "", "tool_calls": [a_call(call_id)], **fields},
        {"role": "tool", "content": "9", "tool_call_id": call_id},
    ]


IDS = (
    "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or () %}({{ c.id }}){% endfor %}"
    "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
)
KIMI_IDS, MISTRAL_IDS = IDS + "{# <|tool_call_begin|> #}", IDS + "{# [TOOL_CALLS] #}"


@pytest.mark.parametrize(
    ("source", "ids", "wanted"),
    [
        (IDS, ["a", "b"], "(a)[a](b)[b]"),
        (KIMI_IDS, ["a", "a"], "(functions.now:0)[functions.now:0](functions.now:1)[functions.now:1]"),
        (KIMI_IDS, ["functions.now:7"], "(functions.now:7)[functions.now:7]"),
        (MISTRAL_IDS, ["call_1", "Ab3456789"], "(000000000)[000000000](000000001)[000000001]"),
        (MISTRAL_IDS, ["Ab3456789"], "(Ab3456789)[Ab3456789]"),
    ],
)
def test_ids_of_calls_are_as_the_template_needs_them(
    byte_tokenizer: Tokenizer, source: str, ids: list[str], wanted: str
) -> None:
    turns = [*MESSAGES, *[turn for call_id in ids for turn in calling(call_id)]]
    before = json.dumps(turns)
    assert rendered(byte_tokenizer, source, ChatPrompt(turns)).removeprefix("None") == wanted
    assert json.dumps(turns) == before, "the caller's messages stay as they are"


RESPONSES = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or () %}{{ c.function.name }}{% endfor %}"
    "{% for r in m.tool_responses or () %}{{ r.name }}={{ r.response }};{% endfor %}{{ m.content }}{% endfor %}"
)


def test_results_stand_in_the_turn_of_their_calls_where_the_template_looks_for_them(byte_tokenizer: Tokenizer) -> None:
    both = {"role": "assistant", "content": "", "tool_calls": [a_call("a"), a_call("b", "then")]}
    results = [{"role": "tool", "content": text, "tool_call_id": call} for call, text in (("b", "1"), ("a", "2"))]
    turns = [*MESSAGES, both, *results, {"role": "assistant", "content": "Done."}]
    wanted = "None<user>hi<assistant>nowthenthen=1;now=2;<assistant>Done."
    assert rendered(byte_tokenizer, RESPONSES, ChatPrompt(turns)) == wanted
    knowing = RESPONSES + "{{ '' if messages[0].role == 'tool' }}"
    assert rendered(byte_tokenizer, knowing, ChatPrompt(turns)).count("<tool>") == 2
    alone = [*MESSAGES, {"role": "tool", "content": "9", "tool_call_id": "x"}]
    assert rendered(byte_tokenizer, RESPONSES, ChatPrompt(alone)) == "None<user>hi<tool>9"


THINKING = "{{ tools }}{% for m in messages %}{{ m.thinking }}|{{ m.content }}{% endfor %}"
EITHER = (
    "{{ tools }}{% for m in messages %}{% if m.thinking and m.content and m.tool_calls %}"
    "{{ raise_exception('not both') }}{% endif %}{{ m['thinking'] }}|{{ m.content }};{% endfor %}"
)


def test_reasoning_stands_where_the_template_looks_for_it(byte_tokenizer: Tokenizer) -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert rendered(byte_tokenizer, THINKING, ChatPrompt([thought])) == "NoneHm.|Yes."
    turns = [thought, *calling("a", reasoning_content="Ah."), *calling("b", content="I look.", reasoning_content="Oh.")]
    assert rendered(byte_tokenizer, EITHER, ChatPrompt(turns)) == "NoneHm.|Yes.;Ah.|;|9;|I look.;|9;"
    refusing = EITHER.replace("m.tool_calls", "true")
    with pytest.raises(InvalidRequest, match="not both"):
        rendered(byte_tokenizer, refusing, ChatPrompt([thought]))


def test_an_answer_of_a_given_shape_comes_after_what_the_prompt_opens(byte_tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}<think>\n"
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
