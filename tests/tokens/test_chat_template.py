"""Chat templates are code from a file: they render like Hugging Face's and cannot leave their sandbox."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from diptych.common.errors import ConfigError, DiptychError, InvalidRequest
from diptych.tokens import template_meter
from diptych.tokens.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x<y"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, add_generation_prompt=True)


def test_templates_see_messages_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source) == "<s>user:x<yTrue"


def test_a_rendering_leaves_nothing_that_only_a_search_for_garbage_would_find() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m | tojson }}{% endfor %}", {})
    gc.collect()
    gc.disable()
    try:
        template.render(MESSAGES, add_generation_prompt=True)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_blocks_leave_no_white_space() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "x<y"}'


def test_a_template_can_break_out_of_loops() -> None:
    assert render("{% for i in range(9) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}") == "01"


def test_what_the_template_raises_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_hostile_template_gets_nowhere(source: str) -> None:
    with pytest.raises(DiptychError):
        render(source)


ENDLESS = {
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loops over lists": "{% set x = range(9999)|list %}{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "loops that pass items over": "{% set x = range(999)|list %}{% for i in x %}{% for j in x if not i %}{% endfor %}"
    "{% endfor %}",
    "lists in loops": "{% for i in range(9999) %}{% set x = range(99999)|list %}{% endfor %}",
    "calls of calls": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "in a block": "{% block b scoped %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    "{% endblock %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling of lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tripling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x + n.x %}{% endfor %}",
    "long output": "{% for i in range(9999) %}{{ messages[0].content * 99999 }}{% endfor %}",
    "long text": "{{ 'a' * 10**10 }}",
    "long list": "{{ [1] * 10**9 }}",
    "large number": "{{ 99999 ** 99999 }}",
    "wide number": "{{ '%1000000000d' % 1 }}",
    "wide layout": "{{ '%*d' | format(1000000000, 1) }}",
    "wide field": "{{ '{:1000000000}'.format(1) }}",
    "wide field, from elsewhere": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide text": "{{ 'a'.zfill(1000000000) }}",
    "centred text": "{{ 'a' | center(1000000000) }}",
    "indented text": "{{ 'a' | indent(1000000000, true) }}",
    "joined texts": "{% set x = 'a' * 100000 %}{{ ([x] * 99) | join | length }}",
    "long separator": "{% set x = 'a' * 100000 %}{{ ([1] * 99) | join(x) | length }}",
    "long separator, by its method": "{% set x = 'a' * 100000 %}{{ x.join(['b'] * 99) | length }}",
    "long separator of what comes": "{% set x = 'a' * 100000 %}{{ x.join(([1] * 99) | map('string')) | length }}",
    "long replacement": "{{ ('a' * 9999) | replace('a', 'b' * 9999) | length }}",
    "long replacement, by its method": "{{ ('a' * 9999).replace('a', 'b' * 9999) | length }}",
    "long translation": "{{ ('a' * 9999).translate({97: 'b' * 9999}) | length }}",
    "long indentation": "{{ ('\n' * 9999) | indent('b' * 9999, true, true) | length }}",
    "many indentations": "{{ ('\n' * 9999) | indent(9999, true, true) | length }}",
    "long line ends": "{{ ('a ' * 999) | wordwrap(1, true, 'b' * 9999) | length }}",
    "wide tabs": "{{ ('\t' * 9999).expandtabs(9999) | length }}",
    "many fields": "{{ ('{0}' * 9999).format('a' * 9999) | length }}",
    "many fields by name": "{{ ('%(a)s' * 9999) | format(a='a' * 9999) | length }}",
    "many fields of %": "{{ (('%(a)s' * 9999) % {'a': 'a' * 9999}) | length }}",
    "wide JSON": "{{ ([1] * 9999) | tojson(indent=9999) | length }}",
    "JSON of JSON": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson | length }}",
    "JSON of a list many times": "{{ ([messages] * 9999) | tojson | length }}",
    "lists of lists": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "keys of keys": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
    "{{ {n.x: 1} | length }}",
    "namespaces of namespaces": "{% macro m(n, i) %}{% if i %}{{ m(namespace(x=n, y=n), i - 1) }}{% else %}{{ n }}"
    "{% endif %}{% endmacro %}{{ m(1, 60) }}",
    "doubling by a block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "what is said again and again": "{% set y %}{% for i in range(4999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "sums of lists": "{{ ([[1] * 999] * 999) | sum(start=[]) | length }}",
    "copies in capitals": "{% set x = 'a' * 99999 %}{% for i in range(999) %}{% set y = x | upper %}{% endfor %}",
    "copies in capitals, by their method": "{% set x = 'a' * 99999 %}{% for i in range(999) %}{% set y = x.upper() %}"
    "{% endfor %}",
    "copies of a part": "{% set x = 'a' * 99999 %}{% for i in range(999) %}{% set y = x[1:] %}{% endfor %}",
    "copies of many": "{% set x = 'a' * 99999 %}{{ ([x] * 999) | map('upper') | list | length }}",
    "comparisons": "{% set x, y = 'a' * 99999, 'a' * 99999 %}{% for i in range(999) %}{% if x == y %}{% endif %}"
    "{% endfor %}",
    "comparisons by a test": "{% set x = 'a' * 99999 %}{{ (['b'] * 999) | select('in', x) | list | length }}",
    "looking for what is not there": "{% set x = 'a' * 99999 %}{% for i in range(999) %}{% if 'b' in x %}{% endif %}"
    "{% endfor %}",
    "looking from behind": "{{ ('a' * 99999).rfind('b' + 'a' * 9999) }}",
    "letters of a text": "{{ ('a' * 999999) | list | length }}",
    "words of a text": "{{ (' a' * 99999).split() | length }}",
    "lines that are sorted": "{{ (['A' * 9999] * 999) | sort | length }}",
    "groups beyond all": "{{ [1] | slice(1000000000) | list | length }}",
    "products of products": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "bytes": "{{ 'a'.encode() * 10**10 }}",
    "arguments": "{% macro m() %}{% endmacro %}{{ m(*[1] * 99999) }}",
    "addresses": "{{ ('http://a.b ' * 9999) | urlize | length }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_would_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "MAX_STEPS", 5_000)
    monkeypatch.setattr(template_meter, "MAX_CHARS", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"does (more than|padding beyond|powers of|products of)") as caught:
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.param == "messages"


def test_what_is_counted_is_work_and_not_what_messages_look_like() -> None:
    source = (
        "{% for m in messages %}{{ m.content.split('*')[-1] ~ m.content.rstrip() }}{{ '%02d' | format(loop.index) }}"
        "{{ [1] + [2] }}{{ 7 % 4 }}{{ 2 * 3 }}{{ m.content | indent(2) }}{% endfor %}"
        "{{ 'a' + ('b' + 'c') + 'd' }}{{ 1 + 2 + 3 }}{{ 'é' ~ 1 ~ none }}{% for m in messages if m.x %}x{% endfor %}"
    )
    template = ChatTemplate(source, {})
    expected = "{:99999}%99999d*" + "01[1, 2]36" + "{:99999}%99999d*" + "abcd6é1None"
    for _ in range(2):  # each rendering begins anew
        assert template.render([{"content": "{:99999}%99999d*"}], add_generation_prompt=True) == expected


@pytest.mark.parametrize("source", ["{{ " + "(" * 9999 + ")" * 9999 + " }}", "{% if 1 %}" * 999 + "{% endif %}" * 999])
def test_a_template_that_is_nested_too_deep_does_not_compile(source: str) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        render(source)


def test_a_template_that_does_not_compile_is_an_error_of_the_model() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_a_template_sees_tools_and_its_own_parameters() -> None:
    template = ChatTemplate("{{ tools }}{{ enable_thinking }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([], add_generation_prompt=True) == "None<s>"
    tools = [{"type": "function"}]
    parameters = {"enable_thinking": False}
    wanted = "[{'type': 'function'}]False<s>"
    assert template.render([], add_generation_prompt=True, tools=tools, parameters=parameters) == wanted
    assert (template.reads("tools"), template.reads("documents")) == (True, False)


@pytest.mark.parametrize("name", ["enable_thoughts", "bos_token", "tools", "messages"])
def test_a_parameter_that_the_template_has_not_is_the_callers_mistake(name: str) -> None:
    template = ChatTemplate("{{ tools }}{{ enable_thinking }}{{ bos_token }}{{ messages }}", {"bos_token": "<s>"})
    with pytest.raises(InvalidRequest, match=f"no parameter '{name}'; it has enable_thinking") as caught:
        template.render([], add_generation_prompt=True, parameters={name: 1})
    assert caught.value.param == "chat_template_kwargs"


# As published ones do it: Qwen's way with tools and their results, and Llama's.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}{{- '<think>\\n' }}{%- endif %}
"""
LLAMA = """\
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{{- "Today: " + date_string + "\\n" }}
{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.content is string %}{{- message.content | trim }}
    {%- endif %}
{%- endfor %}
"""
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zoë<", "n": [1, None]}}}
WITH_TOOLS: list[Any] = [
    {"role": "user", "content": " hi "},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    {"role": "tool", "tool_call_id": "d", "content": "3"},
]


@pytest.mark.parametrize("parameters", [{}, {"enable_thinking": False}, {"date_string": "now"}])
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "é", "parameters": {"a": True}}}]])
@pytest.mark.parametrize("source", [QWEN, LLAMA])
def test_tools_render_as_in_transformers(source: str, tools: list[Any], parameters: dict[str, Any]) -> None:
    template = ChatTemplate(source, {})
    known = {name: value for name, value in parameters.items() if template.reads(name)}
    rendered: Any = render_jinja_template(
        [WITH_TOOLS], tools=tools or None, chat_template=source, add_generation_prompt=True, **known
    )
    assert template.render(WITH_TOOLS, add_generation_prompt=True, tools=tools, parameters=known) == rendered[0][0]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% set x = 1 %}{% generation %}{% set x = 2 %}{{ loop.index }}{{ m.content }}"
        "{% endgeneration %}{{ x }}{% endfor %}",
        "{%- for m in messages -%} {%- generation -%} {{ m.role }} {%- endgeneration -%} {%- endfor %}",
        "{{ documents is defined }}{{ documents }}{{ tools is defined }}",
    ],
)
def test_what_hugging_face_adds_to_jinja_is_there(source: str) -> None:
    wanted: Any = render_jinja_template([WITH_TOOLS], chat_template=source, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(WITH_TOOLS, add_generation_prompt=True) == wanted[0][0]


def test_a_generation_without_end_does_not_compile() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% generation %}", {})


PLAIN = [
    "{{ m | map(attribute='role') | join(', ') }}",
    "{{ m | join('-', attribute='content') }}",
    "{{ 'a,b'.split(',') | join }}",
    "{{ m[0] }}",
    "{{ m[1:] }}",
    "{{ m[::-1] | length }}",
    "{{ m[-1]['content'][:2] }}",
    "{{ m | last }}",
    "{{ (m | first).role }}",
    "{{ 'a-b' | replace('-', '+') }}",
    "{{ 'a-b'.replace('-', '', 1) }}",
    "{{ 'aXb' | lower }}",
    "{{ '  a ' | trim }}",
    "{{ 'xax'.strip('x') }}",
    "{{ m | tojson(indent=2) }}",
    "{{ m | tojson(separators=(',', ':')) }}",
    "{{ 'é<' | tojson(ensure_ascii=true) }}",
    "{{ [1, 2] + [3] }}",
    "{{ [1] * 3 }}",
    "{{ (1, 'x') }}",
    "{{ {'a': [none, true, 1.5]} }}",
    "{{ 300 * 10**12 }}",
    "{{ 7 // 2 }}",
    "{{ -2**3 }}",
    "{{ [3, 1, 2] | sort }}",
    "{{ [3, 1] | max }}",
    "{{ 'ba' | sort | join }}",
    "{{ [1, 1] | unique | list }}",
    "{{ [[1], [2]] | sum(start=[]) }}",
    "{{ m | selectattr('role', 'eq', 'user') | list }}",
    "{{ m | rejectattr('role', 'in', ['user']) | map(attribute='n') | sum }}",
    "{{ 1 < 2 < 3 }}",
    "{{ 1 < 2 > 3 }}",
    "{{ 'role' in m[0] }}",
    "{{ 'a' not in 'abc' }}",
    "{{ m == m }}",
    "{{ m[0].x is defined }}",
    "{{ 3 is odd }}",
    "{% set n = namespace(a=1) %}{% for x in m %}{% set n.a = n.a + 1 %}{{ loop.changed(x.n) }}{% endfor %}{{ n.a }}",
    "{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ varargs }}>{% endmacro %}{{ f(1) }}{{ f(*[1, 2, 3]) }}",
    "{% set t %}a{{ 1 }}{% endset %}{{ t }}{% set t | upper %}a{{ 1 }}{% endset %}{{ t }}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{{ '%s %d' | format('a', 1) }}",
    "{{ '%s' % 'a' }}",
    "{{ '{} {x}'.format(1, x=2) }}",
    "{% for k, v in m[0].items() %}{{ k }}={{ v }};{% endfor %}{{ m[0].get('x', 'y') }}",
    "{{ m[0] | dictsort }}",
    "{{ m[0] | items | list }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }}",
    "{{ [1, 2, 3] | slice(2) | list }}",
    "{{ m | groupby('role') | length }}",
    "{{ 'ab' | reverse }}",
    "{{ 'a b'.title() }}",
    "{{ 'a b c' | wordwrap(3) }}",
    "{{ 'a&b' | e }}",
    "{{ nothing }}",
    "{{ nothing | d('x') }}",
    "{{ 'x'.join(m | map(attribute='role')) }}",
    "{{ 'a\tb'.expandtabs(2) }}",
    "{{ 'ab'.partition('a') }}",
    "{{ 'abab'.rfind('b') }}",
    "{{ 'a'.zfill(3) }}",
]


@pytest.mark.parametrize("source", PLAIN)
def test_what_is_counted_is_what_jinja_does(source: str) -> None:
    chat = [{"role": "user", "content": "hello", "n": 1}, {"role": "assistant", "content": "you", "n": 2}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _json
    source = "{% set m = messages %}" + source
    assert ChatTemplate(source, {}).render(chat, add_generation_prompt=True) == environment.from_string(source).render(
        messages=chat
    )


def _json(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
