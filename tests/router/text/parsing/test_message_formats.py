"""Which parser an output gets: by the flags, the chat template, the request, and how its prompt ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from diptych.common.config import described
from diptych.generation.grammar import Preamble
from diptych.router.config import RouterConfig
from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.formats.deepseek import CALL
from diptych.router.text.parsing.message_formats import DEFAULT_FORMATS, REASONING_FORMATS, MessageFormats
from diptych.router.text.parsing.parts import Content, message_of
from diptych.router.text.parsing.tool_use import NO_TOOLS, Function, ToolUse

Read = Callable[..., Any]
PARIS = '{"city": "Paris"}'
BUDGET_END = "</seed:cot_budget_reflect>"


@pytest.mark.parametrize(
    ("prompt", "text", "wanted"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.\n", ("Yes.\n", "Hm.", [])),
        ("", "\n<think>Hm.", ("", "Hm.", [])),
        ("", " Yes. <think>", (" Yes. <think>", "", [])),
        ("<think>\n", "Hm.\n</think>Yes.", ("Yes.", "Hm.", [])),
        ("<think>", "<think>Hm.</think>Yes.", ("Yes.", "Hm.", [])),
        ("<think>\n", "Hm.", ("", "Hm.", [])),
        ("<think>\n\n</think>\n\n", "Yes.", ("Yes.", "", [])),
        (
            "",
            '<think>a <tool_call></think><tool_call>{"name": "now"}</tool_call>',
            ("", "a <tool_call>", [("now", "{}")]),
        ),
    ],
)
def test_reasoning_comes_before_the_answer(read: Read, prompt: str, text: str, wanted: Any) -> None:
    assert read(text, tools="hermes", reasoning="think", prompt=prompt) == wanted
    assert read(text, tuple(range(len(text))), tools="hermes", reasoning="think", prompt=prompt) == wanted


THOUGHT = "<|channel>thought\nHm.\n<channel|>"
BUDGET = "<seed:think><seed:cot_budget_reflect>"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "wanted"),
    [
        ("gemma4", "<|turn>model\n", f"{THOUGHT}Yes.", ("Yes.", "Hm.", [])),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", ("Yes.", "", [])),
        ("gemma4", "<|channel>thought\n", "Hm.<channel|>Yes.", ("Yes.", "Hm.", [])),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", ("Yes.", "Hm.", [])),
        ("seed_oss", BUDGET, "None.</seed:cot_budget_reflect></seed:think>7", ("7", f"None.{BUDGET_END}", [])),
        ("mistral", "", "[THINK]Hm.[/THINK]Yes.", ("Yes.", "Hm.", [])),
    ],
)
def test_families_have_marks_of_their_own(read: Read, reasoning: str, prompt: str, text: str, wanted: Any) -> None:
    assert read(text, tools="hermes", reasoning=reasoning, prompt=prompt) == wanted
    assert read(text, tuple(range(len(text))), tools="hermes", reasoning=reasoning, prompt=prompt) == wanted


KIMI_CALL = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_CALLS = f"<|tool_calls_section_begin|>{KIMI_CALL}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    "text", [f"<think>Hm.{KIMI_CALLS}", f"<think>Hm. {KIMI_CALL}", f"<think>Hm.</think>{KIMI_CALLS}"]
)
def test_a_call_that_is_a_special_token_ends_reasoning(read: Read, text: str) -> None:
    assert read(text, tools="kimi", reasoning="think") == ("", "Hm.", [("now", "{}")])
    assert read(text, tuple(range(len(text))), tools="kimi", reasoning="think") == ("", "Hm.", [("now", "{}")])


def test_an_answer_between_tags_comes_after_reasoning_with_tools_and_without(read: Read) -> None:
    text = "<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n"
    fields: Any = {"tools": "granite", "reasoning": "think"}
    for functions in ((), (Function("now"),)):
        assert read(text, **fields, functions=functions) == ("Yes.", "Hm.", [])
    assert read(text[len("<think>") :], **fields, prompt="<think>\n") == ("Yes.", "Hm.", [])


def test_harmony_has_channels_for_both(read: Read) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert read(text, tools="harmony", reasoning="think") == ("Yes.", "Hm.", [])
    assert read(text, tools="harmony", functions=()) == ("Yes.", "Hm.", [])


@pytest.mark.parametrize("text", [PARIS, PARIS[:4]])
def test_an_output_of_a_named_call_is_its_arguments(read: Read, text: str) -> None:
    fields: Any = {"tools": "hermes", "choice": "named", "functions": (Function("weather"),)}
    assert read(text, **fields) == ("", "", [("weather", text)])
    fields |= {"reasoning": "think"}
    assert read(text, **fields) == ("", "", [("weather", text)])
    assert read(f"<think>Hm.</think>\n{text}", **fields) == ("", "Hm.", [("weather", text)])
    assert read(f"Hm.</think>{text}", prompt="<think>\n", **fields) == ("", "Hm.", [("weather", text)])
    assert read("Hm.", prompt="<think>\n", **fields) == ("", "Hm.", [])


def test_an_output_of_required_calls_is_a_list_of_them(read: Read) -> None:
    text = f'[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]'
    wanted = ("", "", [("weather", PARIS), ("now", "{}")])
    assert read(text, tools="glm", choice="required") == wanted
    assert read(text, tuple(range(len(text))), tools="glm", choice="required") == wanted
    assert read(text[:20], tools="glm", choice="required") == (text[:20], "", [])


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("", Preamble("<think>", "</think>")),
        ("<think>\n", Preamble("", "</think>")),
        ("<think>\n\n</think>\n\n", None),
    ],
)
def test_an_answer_of_a_given_shape_may_come_after_reasoning(prompt: str, wanted: Preamble | None) -> None:
    formats = MessageFormats(None, REASONING_FORMATS["think"])
    assert formats.preamble(prompt) == wanted
    assert DEFAULT_FORMATS.preamble(prompt) is None
    make = formats.parser_of_shape(NO_TOOLS, wanted)
    said = "Hm.</think>\n7" if wanted == Preamble("", "</think>") else "7"
    parser = make() if make else None
    parts = [*parser.push(said), *parser.finish()] if parser else [Content(said)]  # nobody looks: all is content
    assert message_of(parts).content == "7"


def test_where_nothing_can_be_found_nobody_looks() -> None:
    assert DEFAULT_FORMATS.parser(NO_TOOLS, "") is None
    assert MessageFormats(None, None).parser(ToolUse((Function("now"),)), "") is None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("", "hermes", None),
        ("{{ '<tool_call>' }} <function=", "qwen3_coder", None),
        ("<tool_call> <think> </think>", "hermes", "think"),
        ("<tool_call> <arg_key> </think>", "glm", "think"),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "mistral"),
        (f"{CALL} </think>", "deepseek", "think"),
        ("<|python_tag|>", "llama3", None),
        ("<|python_start|> <|python_tag|>", "pythonic", None),
        ("<|channel|>", "harmony", None),
        ("<|tool|>", "phi4", None),
        ("<|tool_call_begin|>", "kimi", None),
        ("<|tool_call>call: <tool_call|> <|channel>thought <channel|>", "gemma4", "gemma4"),
        ("<seed:tool_call> <function= <seed:think> </seed:think>", "seed_oss", "seed_oss"),
        ("<minimax:tool_call> <invoke name= <response> <think> </think>", "minimax", "think"),
        ("<{{ '\uff5cDSML\uff5c' }}function_calls> </think>", "dsml", "think"),
        ("<|tool_call_start|>", "lfm2", None),
        ("# \u53ef\u7528\u5de5\u5177 <think>", "glm4", "think"),
        ("<function_calls> assistant\n<think>", "olmo3", "think"),
        ("<|tool_list_start|>", "lfm2", None),
        ("<TOOLCALL>[ </think>", "nemotron", "think"),
        ("<function_calls>", "olmo3", None),
        ("<|tool_call|> <think></think> <response></response>", "granite", "think"),
    ],
)
def test_a_template_gives_the_formats_away(template: str, tools: str, reasoning: str | None) -> None:
    wanted = MessageFormats(TOOL_FORMATS[tools], REASONING_FORMATS[reasoning] if reasoning else None)
    assert MessageFormats.named("auto", "auto", template) == wanted


def test_parsers_see_the_tokens_that_marks_are_made_of() -> None:
    gemma = MessageFormats(TOOL_FORMATS["gemma4"], REASONING_FORMATS["gemma4"])
    assert gemma.tokens >= {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    assert gemma.reasoning_marks == ("<|channel>", "<channel|>")


def test_flags_go_before_the_template() -> None:
    assert MessageFormats.named("glm", "none", "</think>") == MessageFormats(TOOL_FORMATS["glm"], None)
    assert MessageFormats.named("none", "think", "[TOOL_CALLS]") == MessageFormats(None, REASONING_FORMATS["think"])


def test_flags_name_every_format() -> None:
    takes = {name: set(get_args(kind)) for name, kind, _ in described(RouterConfig)}
    assert takes["tool_parser"] == {"auto", "none", *TOOL_FORMATS}
    assert takes["reasoning_parser"] == {"auto", "none", *REASONING_FORMATS}
