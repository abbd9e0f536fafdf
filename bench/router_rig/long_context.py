"""A model without weights that has the small model's tokenizer and a context for very long prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from diptych.checkpoints.source import open_model

CONTEXT_LEN: Final = 1 << 20
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT_LEN,
    "eos_token_id": 2,
}
CHAT_TEMPLATE: Final = (  # the small model's own
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write what a router reads of a model; return the folder."""
    tokenizer = open_model("smollm2").tokenizer()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": tokenizer.vocab_size}))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
