"""Chat templates are code from a file: they render like Hugging Face's and cannot leave their sandbox."""

from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError, DiptychError, InvalidRequest
from diptych.engine.loader.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x<y"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, add_generation_prompt=True)


def test_templates_see_messages_special_tokens_and_the_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source) == "<s>user:x<yTrue"


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


def test_a_template_that_does_not_compile_is_an_error_of_the_model() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})
