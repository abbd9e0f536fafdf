"""What each family writes is read as it was meant, and what is broken is content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.formats.deepseek import BEGIN, CALL, CALL_END, END, SEPARATOR
from diptych.router.text.parsing.message_formats import REASONING_FORMATS

Read = Callable[..., Any]

PARIS = '{"city": "Paris"}'
CALL_OF_PARIS = ("weather", PARIS)
JSON_CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
D = "\uff5cDSML\uff5c"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

# format: {what it shows: (text, content, calls)}
WRITTEN: dict[str, dict[str, tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": {
        "a call after text": (
            f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
            "I look.",
            [CALL_OF_PARIS],
        ),
        "two calls": (
            f'<tool_call>{JSON_CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
            "",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "a list": (
            f'<tool_call>[{{"name": "now", "arguments": null}},{{"arguments": {PARIS},"name": "weather"}}]</tool_call>',
            "",
            [("now", "{}"), CALL_OF_PARIS],
        ),
        "arguments as text": (
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            "",
            [CALL_OF_PARIS],
        ),
        "arguments as text that is empty": (
            '<tool_call>{"name": "now", "arguments": ""}</tool_call>',
            "",
            [("now", "")],
        ),
        "arguments as text that is broken": (
            '<tool_call>{"name": "weather", "arguments": "bad \\x"}</tool_call> ok',
            "ok",
            [("weather", '"bad \\x"')],
        ),
        "arguments as text that is cut off": (
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1',
            "",
            [("weather", '"{\\"city\\": 1')],
        ),
        "marks in strings": (
            '<tool_call>{"name": "weather", "arguments": {"city": "\\"}</tool_call>"}}</tool_call> ok',
            "ok",
            [("weather", '{"city": "\\"}</tool_call>"}')],
        ),
        "no end": (
            f'<tool_call>{{"id": 7, "name": "weather", "arguments": {PARIS}, "type": "x"',
            "",
            [CALL_OF_PARIS],
        ),
        "a brace too few": (
            f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call>bye',
            "bye",
            [CALL_OF_PARIS],
        ),
        "cut off": ('<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        "an unknown function": (
            '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
            [],
        ),
        "no JSON": ("<tool_call>weather</tool_call> x", "<tool_call>weather</tool_call> x", []),
        "no name": ('<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', []),
        "a beginning of a mark": ("a <tool", "a <tool", []),
        "text alone": ("\n a <b> \n", "\n a <b> \n", []),
    },
    "qwen3_coder": {
        "types": (
            'Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\n New\n"York"\n</parameter>\n<parameter=days>\n3\n'
            '</parameter>\n<parameter=exact>True</parameter><parameter=places>\n["a"]\n</parameter>\n'
            "<parameter=code>\n7\n</parameter>\n</function>\n</tool_call>",
            "Hm.",
            [
                (
                    "weather",
                    '{"city": " New\\n\\"York\\"", "days": 3, "exact": true, "places": ["a"], "code": "7"}',
                )
            ],
        ),
        "no parameters": ("<tool_call><function=now></function></tool_call>", "", [("now", "{}")]),
        "odd values": (
            "<function=weather><parameter=days>1e999</parameter><parameter=places>NaN</parameter>"
            '<parameter=exact>"\\ud800"</parameter></function>',
            "",
            [("weather", '{"days": "1e999", "places": "NaN", "exact": "\ufffd"}')],
        ),
        "cut off": ("<function=weather><parameter=city>Par", "", [("weather", '{"city": "Par')]),
        "two calls": (
            "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        "two calls between one pair of tags": (
            "<tool_call><function=now></function>\n<function=now></function></tool_call> ok",
            "ok",
            [("now", "{}"), ("now", "{}")],
        ),
        "a tag that is forgotten": ("<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
        "text about the tags": (
            "Use the <tool_call> tag like </tool_call> so.",
            "Use the <tool_call> tag like </tool_call> so.",
            [],
        ),
        "an unknown function between tags": (
            "<tool_call>\n<function=fly></function></tool_call>",
            "<tool_call>\n<function=fly></function></tool_call>",
            [],
        ),
        "an unknown function": ("<function=fly></function>", "<function=fly></function>", []),
    },
    "glm": {
        "types": (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>"
            "<arg_value>3</arg_value>\n</tool_call>",
            "",
            [("weather", '{"city": "Paris", "days": 3}')],
        ),
        "on one line": (
            "<tool_call>weather<arg_key>city</arg_key><arg_value>New\nYork</arg_value><arg_key>days</arg_key>"
            "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
            "",
            [("weather", '{"city": "New\\nYork", "days": 3}'), ("now", "{}")],
        ),
        "no arguments": ("a\n<tool_call>now</tool_call>\nb", "ab", [("now", "{}")]),
    },
    "glm4": {
        "two": (f"weather\n{PARIS}<|assistant|>now\n{{}}", "", [CALL_OF_PARIS, ("now", "{}")]),
        "a call after text": (f"\nI look.<|assistant|>weather\n{PARIS}\n", "\nI look.", [CALL_OF_PARIS]),
        "text": ("Weather\n{a}, now\n{b}", "Weather\n{a}, now\n{b}", []),
        "a name alone": (" weather\n ", " weather\n ", []),
        "an unknown function": ("fly\n{}", "fly\n{}", []),
        "cut off": ('weather\n{"ci', "", [("weather", '{"ci')]),
    },
    "minimax": {
        "types": (
            'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">New\n"York"</parameter>\n'
            '<parameter name="days">3</parameter>\n<parameter name="places">["a", "b"]</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
            "I look.",
            [("weather", '{"city": "New\\n\\"York\\"", "days": 3, "places": ["a", "b"]}')],
        ),
        "two calls between one pair of tags": (
            '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="weather">\n<parameter name="city">\n'
            "Paris\n</parameter>\n</invoke>\n</minimax:tool_call>",
            "",
            [("now", "{}"), CALL_OF_PARIS],
        ),
        "a name without quotes": ("<invoke name=now></invoke>", "", [("now", "{}")]),
        "a tag in a value": (
            '<minimax:tool_call><invoke name="weather"><parameter name="city"><b>Paris</b></parameter></invoke>',
            "",
            [("weather", '{"city": "<b>Paris</b>"}')],
        ),
        "cut off": (
            '<minimax:tool_call><invoke name="weather"><parameter name="city">Par',
            "",
            [("weather", '{"city": "Par')],
        ),
        "cut off in a tag": (
            '<minimax:tool_call><invoke name="weather"><parameter na',
            "<parameter na",
            [("weather", "{}")],
        ),
        "an unknown function": (
            '<minimax:tool_call>\n<invoke name="fly"></invoke></minimax:tool_call>',
            '<minimax:tool_call>\n<invoke name="fly"></invoke></minimax:tool_call>',
            [],
        ),
        "text about the tags": ("From <minimax:tool_call> on.", "From <minimax:tool_call> on.", []),
    },
    "seed_oss": {
        "types": (
            "Hm.\n<seed:tool_call>\n<function=weather>\n<parameter=city>New\nYork</parameter>\n<parameter=days>3"
            "</parameter>\n<parameter=code>None</parameter></function>\n</seed:tool_call>",
            "Hm.",
            [("weather", '{"city": "New\\nYork", "days": 3, "code": null}')],
        ),
        "two": (
            "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n"
            "</function>\n</seed:tool_call>",
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        "an unknown function": (
            "<seed:tool_call>\n<function=fly></function></seed:tool_call>",
            "<seed:tool_call>\n<function=fly></function></seed:tool_call>",
            [],
        ),
    },
    "dsml": {
        "types": (
            f'Ok.\n\n<{D}function_calls>\n<{D}invoke name="weather">\n<{D}parameter name="city" string="true">\n3'
            f'</{D}parameter>\n<{D}parameter name="days" string="false">3</{D}parameter>\n<{D}parameter name="code" '
            f'string="false">{{"a": [null]}}</{D}parameter>\n</{D}invoke>\n</{D}function_calls>',
            "Ok.",
            [("weather", '{"city": "\\n3", "days": 3, "code": {"a": [null]}}')],
        ),
        "the tag goes before the schema": (
            f'<{D}function_calls><{D}invoke name="weather"><{D}parameter name="days" string="true">3</{D}parameter>'
            f"</{D}invoke></{D}function_calls>",
            "",
            [("weather", '{"days": "3"}')],
        ),
        "no such attribute": (
            f'<{D}function_calls><{D}invoke name="weather"><{D}parameter name="days">3</{D}parameter></{D}invoke>',
            "",
            [("weather", '{"days": 3}')],
        ),
        "two": (
            f'<{D}function_calls>\n<{D}invoke name="now">\n</{D}invoke>\n<{D}invoke name="now">\n</{D}invoke>\n'
            f"</{D}function_calls> ok",
            "ok",
            [("now", "{}"), ("now", "{}")],
        ),
        "an unknown function": (f'<{D}invoke name="fly"></{D}invoke>', f'<{D}invoke name="fly"></{D}invoke>', []),
    },
    "gemma4": {
        "types": (
            'I look.<|tool_call>call:weather{city:<|"|>New "York"\n{<|"|>,code:{b:[1,<|"|>x<|"|>],<|"|>c<|"|>:None},'
            "days:-3,exact:true}<tool_call|>",
            "I look.",
            [
                (
                    "weather",
                    '{"city": "New \\"York\\"\\n{", "code": {"b": [1, "x"], "c": null}, "days": -3, "exact": true}',
                )
            ],
        ),
        "two": (
            '<|tool_call>call:now{}<tool_call|><|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
            "",
            [("now", "{}"), CALL_OF_PARIS],
        ),
        "signs of less in a value": (
            "<|tool_call>call:weather{city:a<b <|c,days:3}<tool_call|>",
            "",
            [("weather", '{"city": "a<b <|c", "days": 3}')],
        ),
        "text without quotes": ("<|tool_call>call:weather{city:12:30 h}", "", [("weather", '{"city": "12:30 h"}')]),
        "cut off": ('<|tool_call>call:weather{city:<|"|>Par', "", [("weather", '{"city": "Par')]),
        "an object without end": (
            "<|tool_call>call:weather{days:3<tool_call|> ok",
            "ok",
            [("weather", '{"days": 3')],
        ),
        "an odd bracket": ("<|tool_call>call:weather{places:[1}}", "", [("weather", '{"places": [1]}')]),
        "deep": (
            "<|tool_call>call:weather{code:" + "[" * 3000,
            "",
            [("weather", '{"code": ' + "[" * 3000)],
        ),
        "an unknown function": ("<|tool_call>call:fly{}<tool_call|>", "<|tool_call>call:fly{}<tool_call|>", []),
        "no call": ("<|tool_call>weather{}", "<|tool_call>weather{}", []),
    },
    "lfm2": {
        "two": (
            "<|tool_call_start|>[weather(city='Paris'), now()]<|tool_call_end|>I look.",
            "I look.",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "quotes in texts": (
            "<|tool_call_start|>[weather(city='it's \\n'Paris'', code=\"say \"a\"\")]<|tool_call_end|>",
            "",
            [("weather", '{"city": "it\'s \\n\'Paris\'", "code": "say \\"a\\""}')],
        ),
        "JSON": (
            f'<|tool_call_start|>[{JSON_CALL}, {{"name": "now", "arguments": {{}}}}]<|tool_call_end|>',
            "",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "an object": (f"<|tool_call_start|>{JSON_CALL}<|tool_call_end|>", "", [CALL_OF_PARIS]),
        "an unknown function": (
            "<|tool_call_start|>[fly()]<|tool_call_end|>",
            "<|tool_call_start|>[fly()]<|tool_call_end|>",
            [],
        ),
        "JSON without a name": (
            '<|tool_call_start|>[{"arguments": {}}]<|tool_call_end|>',
            '<|tool_call_start|>[{"arguments": {}}]<|tool_call_end|>',
            [],
        ),
        "no end": ("<|tool_call_start|>[now()]", "", [("now", "{}")]),
    },
    "nemotron": {
        "two": (
            f'Ok.\n\n<TOOLCALL>[{JSON_CALL}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
            "Ok.",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "cut off": ('<TOOLCALL>[{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    },
    "olmo3": {
        "two": (
            'Ok.\n<function_calls>\nweather(city="Paris (\\"a\\")</function_calls>")\nnow()\n</function_calls>',
            "Ok.",
            [("weather", '{"city": "Paris (\\"a\\")</function_calls>"}'), ("now", "{}")],
        ),
        "JSON's words": (
            "<function_calls>weather(exact=true, code=null)</function_calls>",
            "",
            [("weather", '{"exact": true, "code": null}')],
        ),
        "a function that is unknown": (
            "<function_calls>now()\nfly()</function_calls>",
            "fly()</function_calls>",
            [("now", "{}")],
        ),
        "no call": ("<function_calls></function_calls>", "<function_calls></function_calls>", []),
        "no end": ("<function_calls>now()\nweather(ci", "weather(ci", [("now", "{}")]),
    },
    "granite": {
        "a list": (f"<|tool_call|>[{JSON_CALL}]", "", [CALL_OF_PARIS]),
        "tags": (f"<tool_call>\n{JSON_CALL}\n</tool_call>\n", "", [CALL_OF_PARIS]),
        "an answer": ("<response>\nIt is sunny.\n</response>\n", "It is sunny.", []),
        "an answer without tags": ("It is sunny.\n", "It is sunny.\n", []),
        "an answer and a call": (
            f"<response>I look.</response>\n\n<tool_call>{JSON_CALL}</tool_call>",
            "I look.",
            [CALL_OF_PARIS],
        ),
    },
    "mistral": {
        "a list": (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', "", [CALL_OF_PARIS]),
        "by name": (f"Ok[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "Ok", [CALL_OF_PARIS, ("now", "{}")]),
        "with an id": (f"[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{PARIS}", "", [CALL_OF_PARIS]),
        "no call": ("[TOOL_CALLS]hello world", "[TOOL_CALLS]hello world", []),
    },
    "deepseek": {
        "fenced": (
            f"{BEGIN}{CALL}function{SEPARATOR}weather\n```json\n{PARIS}\n```{CALL_END}\n{CALL}function{SEPARATOR}now\n"
            f"```json\n{{}}\n```{CALL_END}{END}",
            "",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "plain": (f"Ok.\n{BEGIN}{CALL}weather{SEPARATOR}{PARIS}{CALL_END}{END}", "Ok.", [CALL_OF_PARIS]),
        "no call": (f"{CALL}weather{CALL_END}", f"{CALL}weather{CALL_END}", []),
        "text about the marks": (f"From {BEGIN} to {END}.", f"From {BEGIN} to {END}.", []),
    },
    "kimi": {
        "two": (
            "Ok<|tool_calls_section_begin|>"
            + KIMI_CALL.format("weather:0", PARIS)
            + KIMI_CALL.format("now:1", "{}")
            + "<|tool_calls_section_end|>",
            "Ok",
            [CALL_OF_PARIS, ("now", "{}")],
        ),
        "no number": (KIMI_CALL.format("weather", PARIS), "", [CALL_OF_PARIS]),
        "an unknown function": (KIMI_CALL.format("fly:0", "{}"), KIMI_CALL.format("fly:0", "{}"), []),
        "text about the marks": (
            "From <|tool_calls_section_begin|> to <|tool_calls_section_end|>.",
            "From <|tool_calls_section_begin|> to <|tool_calls_section_end|>.",
            [],
        ),
    },
    "pythonic": {
        "two": (
            "[weather(city='Pa\\'ris', days=-3, exact=True, places=[\"a\\n\", 'b'], code={'k': None}), now()]",
            "",
            [
                (
                    "weather",
                    '{"city": "Pa\'ris", "days": -3, "exact": true, "places": ["a\\n", "b"], "code": {"k": null}}',
                ),
                ("now", "{}"),
            ],
        ),
        "JSON": (
            '{"name": "now", "parameters": {}}{"name": "weather", "parameters": {"city": "Paris"}}',
            "",
            [("now", "{}"), CALL_OF_PARIS],
        ),
        "JSON after a mark": (f"<|python_start|>{JSON_CALL}<|python_end|>", "", [CALL_OF_PARIS]),
        "JSON after the end of text": (f"I look.<|python_end|>{JSON_CALL}", "I look.", [CALL_OF_PARIS]),
        "after a mark": ("Ok <|python_start|>[now()]<|python_end|>", "Ok", [("now", "{}")]),
        "a list": ("[1, 2] is a list", "[1, 2] is a list", []),
        "an unknown function": ("[fly()]", "[fly()]", []),
        "an expression": ("[weather(days=1+1)]", "[weather(days=1+1)]", []),
        "half a character": ("[weather(city='\\ud800')]", "", [("weather", '{"city": "\ufffd"}')]),
        "a number without end": ("[weather(days=1e999)]", "[weather(days=1e999)]", []),
        "no end": ("[weather(", "[weather(", []),
    },
    "llama3": {
        "one": ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [CALL_OF_PARIS]),
        "two": (
            '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}',
            "",
            [("now", "{}"), CALL_OF_PARIS],
        ),
        "two without anything between": (
            '{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}',
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        "a call and an unknown one": (
            '{"name": "now", "parameters": {}}; {"name": "fly", "parameters": {}}',
            '; {"name": "fly", "parameters": {}}',
            [("now", "{}")],
        ),
        "an answer in JSON": ('{"city": "Paris", "name": "weather"}', '{"city": "Paris", "name": "weather"}', []),
        "text with JSON": ('It is {"name": "now"}', 'It is {"name": "now"}', []),
    },
    "phi4": {
        "functools": (f'functools[{{"name": "weather", "arguments": {PARIS}}}]', "", [CALL_OF_PARIS]),
        "tokens": ('<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [("now", "{}")]),
    },
    "harmony": {
        "a call": (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
            f" <|constrain|>json<|message|>{PARIS}<|call|>",
            "I look.",
            [CALL_OF_PARIS],
        ),
        "a recipient in front": (
            f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{PARIS}",
            "",
            [CALL_OF_PARIS],
        ),
        "an answer": ("<|channel|>final<|message|>It is 3.<|return|>", "It is 3.", []),
        "no header": ("Just text", "Just text", []),
        "a header without end": (
            "<|channel|>final<|message|>Look:<|end|><|start|> is no header.",
            "Look:<|start|> is no header.",
            [],
        ),
    },
}
CASES = [(name, title) for name, cases in WRITTEN.items() for title in cases]


@pytest.mark.parametrize(("name", "title"), CASES)
def test_a_message_is_read_whole_and_character_by_character(read: Read, name: str, title: str) -> None:
    text, content, calls = WRITTEN[name][title]
    assert read(text, tools=name) == (content, "", calls)
    assert read(text, tuple(range(1, len(text))), tools=name) == (content, "", calls)


def test_every_format_is_shown_above() -> None:
    assert WRITTEN.keys() == TOOL_FORMATS.keys()


SNIPPETS = [
    *(mark for each in REASONING_FORMATS.values() for mark in (each.opening, each.closing)),
    *(
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        "weather",
        "now()",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ";",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        "\n",
        "  ",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        BEGIN,
        CALL,
        SEPARATOR,
        CALL_END,
        "function\n",
    ),
    *(
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "analysis",
        " to=functions.now ",
        "functools",
        "<arg_key>",
        "</arg_key>",
    ),
    *(
        "<|tool_call_begin|>functions.now:0",
        "<|tool_call_argument_begin|>",
        "[weather(city='a",
        "')]",
        '"name"',
        ":",
        "\\ud800",
    ),
    *("<minimax:tool_call>", '<invoke name="weather">', '<parameter name="days">', "</invoke>", "<seed:tool_call>"),
    *(f"<{D}function_calls>", f'<{D}invoke name="weather">', f'<{D}parameter name="a" string="false">', "</invoke>"),
    *("<|tool_call>call:weather{", '<|"|>', "city:", "<tool_call|>", "<TOOLCALL>", "</TOOLCALL>", "<response>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "</function_calls>", "</response>", "weather("),
]


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(data=st.data())
def test_parts_joined_are_the_same_however_the_text_is_cut(read: Read, name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=12)))
    cuts = tuple(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reasoning = data.draw(st.sampled_from(sorted(REASONING_FORMATS)))
    prompt = data.draw(st.sampled_from(["", f"{REASONING_FORMATS[reasoning].opening}\n"]))
    fields = {"tools": name, "reasoning": reasoning, "prompt": prompt, "parallel": data.draw(st.booleans())}
    whole = read(text, **fields)
    assert read(text, cuts, **fields) == read(text, tuple(range(len(text))), **fields) == whole
    orjson.dumps(whole)
