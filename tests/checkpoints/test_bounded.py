"""A context that the operator bounds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from diptych.checkpoints.source import bounded, open_model
from diptych.common.errors import ConfigError
from diptych.engine.options.config import EngineOptions
from diptych.engine.sim.hardware import SimHardware
from diptych.router.config import RouterConfig
from diptych.router.main import open_served_model
from diptych.tokens.chat_template import MAX_TEMPLATE_BYTES, read_template


def test_nothing_but_the_context_changes() -> None:
    source = open_model("sim")
    short = bounded(source, 100)
    assert short.config == dataclasses.replace(source.config, context_len=100)
    assert (short.weights_id, bounded(source, 0)) == (source.weights_id, source)


def test_more_than_the_model_takes_is_refused() -> None:
    assert bounded(open_model("sim"), 16384).config.context_len == 16384
    with pytest.raises(ConfigError, match="--max-model-len 16385 is more than the 16384 tokens that sim takes: lower"):
        bounded(open_model("sim"), 16385)


@pytest.mark.parametrize("length", [1, -5])
@pytest.mark.parametrize("config", [RouterConfig, EngineOptions])
def test_a_context_without_room_for_prompt_and_output_is_refused(
    config: type[RouterConfig] | type[EngineOptions], length: int
) -> None:
    with pytest.raises(ConfigError, match="--max-model-len must be 0 or at least 2"):
        config(max_model_len=length).validate()


def test_workers_and_routers_open_the_model_with_the_context_that_they_are_told() -> None:
    assert SimHardware(EngineOptions(device="sim", max_model_len=64)).open("sim").config.context_len == 64
    model = open_served_model(RouterConfig(model="sim", max_model_len=64, served_model_name=("a", "b")))
    assert (model.context_len, model.model_id, model.names) == (64, "sim", ("a", "b"))


def test_workers_keep_behind_windows_what_they_are_told() -> None:
    for kv_windows in ("keep", "free"):
        hardware = SimHardware(EngineOptions(device="sim", kv_windows=kv_windows, max_model_len=64))
        config = hardware.open("sim").config
        assert (config.keeps_all, config.context_len) == (kv_windows == "keep", 64)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_router_shows_chats_by_the_template_that_it_is_given(tmp_path: Path, *, is_file: bool) -> None:
    template = "{{ eos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    given = str(tmp_path / "mine.jinja") if is_file else template
    tokenizer = open_served_model(RouterConfig(model="sim", chat_template=given)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_end|>[hi]"


def test_a_tools_format_is_found_in_the_template_that_is_given() -> None:
    given = "{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    own, ours = (open_served_model(RouterConfig(model="sim", chat_template=each)).formats for each in ("", given))
    assert ours != own


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"\xff\xfe\x00", "not UTF-8"), (b"x" * (MAX_TEMPLATE_BYTES + 1), "more than")],
)
def test_a_template_that_can_not_be_read_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"--chat-template .*mine.jinja: .*{words}.*give a file with a Jinja template"
    ):
        read_template(str(path))


def test_a_given_template_runs_in_the_sandbox_like_the_models_own() -> None:
    given = "{{ messages.__class__.__mro__ }}"
    tokenizer = open_served_model(RouterConfig(model="sim", chat_template=given)).tokenizer
    with pytest.raises(ConfigError, match="sandbox"):
        tokenizer.apply_chat_template([])
    with pytest.raises(ConfigError, match="does not compile"):
        open_served_model(RouterConfig(model="sim", chat_template="{% if %}"))
