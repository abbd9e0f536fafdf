"""Chat templates of every family that is served: rendered as by transformers, and what they show of calls is read back.

The templates in `templates` have the constructs and the tags of published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diptych.common.errors import InvalidRequest
from diptych.router.main import formats_of
from diptych.router.text.chat_text import render
from diptych.router.text.parsing.formats import TOOL_FORMATS
from diptych.router.text.parsing.message_formats import REASONING_FORMATS, MessageFormats
from diptych.router.text.parsing.parts import message_of
from diptych.router.text.parsing.tool_use import Function, ToolUse
from diptych.router.text.turns import with_thoughts
from diptych.router.values.request import ChatPrompt, ServedModel
from diptych.tokens.chat_template import ChatTemplate
from diptych.tokens.tokenizer import Tokenizer

TEMPLATES: Final = Path(__file__).parent / "templates"
BAR: Final = "\uff5c"
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}


class Family(NamedTuple):
    tools: str | None
    reasoning: str | None
    header: str  # of what the model says
    shows_thoughts: bool = False  # of a turn with calls, if no question follows


FAMILIES: Final = {
    "deepseek_r1": Family(None, "think", f"<{BAR}Assistant{BAR}>"),
    "deepseek_v3_1": Family("deepseek", "think", f"<{BAR}Assistant{BAR}></think>"),
    "deepseek_v3_2": Family("dsml", "think", f"<{BAR}Assistant{BAR}><think>", shows_thoughts=True),
    "ernie_4_5": Family("granite", "think", "<|im_start|>assistant\n", shows_thoughts=True),
    "gemma3": Family(None, None, "<start_of_turn>model\n"),
    "gemma4": Family("gemma4", "gemma4", "<|turn>model\n", shows_thoughts=True),
    "glm_4_0414": Family("glm4", "think", "<|assistant|>"),
    "glm_4_6": Family("glm", "think", "<|assistant|>", shows_thoughts=True),
    "glm_4_7": Family("glm", "think", "<|assistant|>", shows_thoughts=True),
    "gpt_oss": Family("harmony", None, "<|start|>assistant", shows_thoughts=True),
    "granite_3_3": Family("granite", "think", "<|end_of_role|>"),
    "kimi_k2": Family("kimi", "think", "<|im_middle|>", shows_thoughts=True),
    "lfm2_5": Family("lfm2", "think", "<|im_start|>assistant\n", shows_thoughts=True),
    "llama_3_1": Family("llama3", None, "assistant<|end_header_id|>\n\n"),
    "llama_4": Family("pythonic", None, "assistant<|header_end|>\n\n"),
    "minimax_m2": Family("minimax", "think", "]~b]ai\n", shows_thoughts=True),
    "mistral_v13": Family("mistral", "mistral", "[/INST]"),
    "mistral_v3": Family("mistral", None, "[/INST]"),
    "nemotron_nano_2": Family("nemotron", "think", "Assistant\n"),
    "olmo_3": Family("olmo3", None, "<|im_start|>assistant\n"),
    "phi_4_mini": Family("phi4", None, "<|assistant|>"),
    "qwen3": Family("hermes", "think", "<|im_start|>assistant\n", shows_thoughts=True),
    "qwen3_5": Family("qwen3_coder", "think", "<|im_start|>assistant\n", shows_thoughts=True),
    "seed_oss": Family("seed_oss", "seed_oss", "<seed:bos>assistant\n", shows_thoughts=True),
}
WITH_TOOLS: Final = [name for name, family in FAMILIES.items() if family.tools]

SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Où?"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "It's <that>.", "parameters": SCHEMA}},
]
ARGUMENTS: Final = {"city": "Zoë's <b>", "days": 3}
USER: Final = {"role": "user", "content": " What of Paris? "}
ANSWER: Final = {"role": "assistant", "content": "It is sunny."}
THOUGHT: Final = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "Hm."}


def calling(**fields: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": ARGUMENTS}
    calls = [{"id": "Ab3456789", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


RESULT: Final = {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "Ab3456789", "name": "weather"}
CHATS: Final[dict[str, list[Any]]] = {
    "plain": [USER],
    "system": [{"role": "system", "content": "Be brief.\n"}, USER],
    "answered": [USER, ANSWER, USER],
    "thought": [USER, THOUGHT, USER],
    "called": [USER, calling(reasoning_content="Hm."), RESULT],
    "answered after a call": [USER, calling(), RESULT, THOUGHT, USER],
}
ON: Final = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
OFF: Final = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low", "thinking_budget": 0}
SETTINGS: Final[dict[str, tuple[list[Any], dict[str, Any]]]] = {
    "as it is": ([], {}),
    "with tools": (TOOLS, {}),
    "thinking": ([], ON),
    "not thinking, with tools": (TOOLS, OFF),
}


@pytest.fixture(scope="module")
def models(byte_tokenizer: Tokenizer) -> Mapping[str, ServedModel]:
    sources = {name: (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") for name in FAMILIES}
    return {name: _model(name, byte_tokenizer, source) for name, source in sources.items()}


def _model(name: str, byte_tokenizer: Tokenizer, template: str) -> ServedModel:
    tokenizer = Tokenizer(byte_tokenizer._backend, eos_ids=[256], chat_template=template, special_tokens=TOKENS)
    return ServedModel(name, tokenizer, 257, 99)


def template_of(model: ServedModel) -> ChatTemplate:
    assert model.tokenizer.chat_template is not None
    return model.tokenizer.chat_template


def outcome(make: Callable[[], str]) -> str:
    """Return a text, or the words with which the template refuses it."""
    try:
        return make()
    except (jinja2.TemplateError, InvalidRequest) as error:
        return f"refused: {str(error).rpartition(': ')[2]}"


def test_every_template_belongs_to_a_family() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_chats_are_rendered_as_by_transformers(models: Mapping[str, ServedModel], name: str) -> None:
    template = template_of(models[name])
    for title, (tools, setting) in SETTINGS.items():
        parameters = {key: value for key, value in setting.items() if template.reads(key)}
        render_here = partial(template.render, add_generation_prompt=True, tools=tools, parameters=parameters)
        wanted = by_transformers(template.source, tools=tools or None, **TOKENS, **parameters)
        got = {chat: outcome(partial(render_here, with_thoughts(CHATS[chat], template.source))) for chat in CHATS}
        assert got == wanted, title


def by_transformers(source: str, **fields: Any) -> dict[str, str]:
    """Return the texts of all chats; those without refusals at once, for the template is compiled each time."""
    show: Any = partial(render_jinja_template, chat_template=source, add_generation_prompt=True, **fields)
    try:
        return dict(zip(CHATS, show(list(CHATS.values()))[0], strict=True))
    except jinja2.TemplateError:
        return {title: outcome(partial(_first, show, chat)) for title, chat in CHATS.items()}


def _first(show: Callable[..., Any], chat: list[Any]) -> str:
    return str(show([chat])[0][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_gives_the_formats_away(models: Mapping[str, ServedModel], name: str) -> None:
    family = FAMILIES[name]
    tools = TOOL_FORMATS[family.tools or "hermes"]  # who is not told of tools by the template is told in words
    reasoning = REASONING_FORMATS[family.reasoning] if family.reasoning else None
    assert formats_of(models[name], "auto", "auto") == MessageFormats(tools, reasoning)


def test_a_format_that_is_asked_for_is_kept_for_a_model_that_is_told_in_words(
    models: Mapping[str, ServedModel],
) -> None:
    model = models["deepseek_r1"]
    assert formats_of(model, "deepseek", "auto").tools == TOOL_FORMATS["deepseek"]
    assert formats_of(model, "none", "auto").tools is None


@pytest.mark.parametrize("name", FAMILIES)
def test_all_chats_of_clients_are_rendered(models: Mapping[str, ServedModel], name: str) -> None:
    tokenizer = models[name].tokenizer
    for title, chat in CHATS.items():
        for effort in (None, "none", "high"):
            text = render(tokenizer, ChatPrompt(chat, TOOLS, reasoning_effort=effort))
            assert text.count("What of Paris?") == sum(turn is USER for turn in chat), title


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_a_template_shows_of_a_call_is_read_as_that_call(models: Mapping[str, ServedModel], name: str) -> None:
    model, family = models[name], FAMILIES[name]
    shown = render(model.tokenizer, ChatPrompt([USER, calling(reasoning_content="Hm."), RESULT], TOOLS))
    asked = shown.index(family.header, shown.index("What of Paris?")) + len(family.header)
    new_parser = formats_of(model, "auto", "auto").parser(ToolUse([Function("weather", SCHEMA)]), shown[:asked])
    assert new_parser is not None
    parser = new_parser()
    message = message_of([*parser.push(shown[asked:]), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("weather", ARGUMENTS)]
    assert message.reasoning == ("Hm." if family.shows_thoughts else "")
