"""Fields of other servers' APIs that ask for what this one can't do, and the values of each that ask for nothing.

Clients of those servers send their full set of parameters: such a field is taken where it has one of these values, or
`None`, and refused by name where it has another. A body that has a field of that name says itself what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    # of OpenAI's and Anthropic's APIs
    "access_programs": (),
    "audio": (),
    "background": (False,),
    "container": (),
    "context_management": ([],),
    "diagnostics": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image": (),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "suffix": ("",),
    "truncation": ("disabled",),
    "user_profile_id": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "workspace_id": (),
    # of vLLM's
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "repetition_detection": (),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # of SGLang's
    "audio_data": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "data_parallel_rank": (),
    "ebnf": (),
    "extra_key": (),
    "image_data": (),
    "input_embeds": (),
    "json_schema": (),
    "log_metrics": (True,),
    "lora_path": ("",),
    "no_logs": (False,),
    "no_stop_trim": (False,),
    "regex": (),
    "require_reasoning": (False,),
    "return_attention_tokens": (False,),
    "return_bytes": (False,),
    "return_cached_tokens_details": (False,),
    "return_entropy": (False,),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "separate_reasoning": (True,),
    "session_params": (),
    "stream_interval": (),
    "stream_reasoning": (True,),
    "token_ids_logprob": ([],),
    "use_audio_in_video": (False,),
    "video_data": (),
}


def is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a field asks for nothing: 1 and true are not the same."""
    return value is None or any(type(value) is type(same) and value == same for same in neutral)
