"""EAGLE-3 heads in the format of published checkpoints, and what the published architecture makes of one.

`random_folders` has a random Llama and a random head that says 100 of its words. `sure_folders` has a model that says a
certain word behind each, and a head that knows it: by the hidden row before a token, or by what it kept of that token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
import torch
from draft_models import MOST, AskAlways
from safetensors.torch import load_file, save_file
from sure_next_layer import ADD_NOTHING, SUCCESSOR
from torch import Tensor
from torch.nn import functional as F

from diptych.architectures.config import DraftLayers
from diptych.architectures.registry import from_hf, placement_of
from diptych.checkpoints.eagle_folder import EagleFolder
from diptych.checkpoints.source import ChangedModel, ModelSource, open_model
from diptych.engine.drafting.ahead import HeadSource
from diptych.engine.runner.model_runner import ModelRunner

WORDS: Final = 321
NUM_SAID: Final = 100  # by the random head
LAYERS: Final = (0, 1, 2)  # that it reads
EPS: Final = 1e-5
THETA: Final = 10_000.0
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
FFN: Final = 96
# of codes of words, of which no two have a product above 0.35
FREQUENCIES: Final = (80, 157, 125, 35, 82, 59, 51, 135, 132, 77, 97, 123, 55, 69, 63, 62)


class Folders(NamedTuple):
    """Where a model is, and a head that guesses for it."""

    model: Path
    head: Path


class AskHead(AskAlways):
    """As `AskAlways`, of an EAGLE head."""

    new_source = HeadSource


def open_both(folders: Folders) -> tuple[ModelSource, ModelSource]:
    """Return the model with the layers of pages that its head needs, and the head."""
    source = open_model(str(folders.model))
    head = EagleFolder(folders.head, source)
    return ChangedModel(source, replace(source.config, draft=DraftLayers(head.config, head.config.num_kv_heads))), head


def runner_with_head(folders: Folders) -> Any:
    def opened(source: ModelSource, kv: Tensor) -> ModelRunner:
        head = open_both(folders)[1]
        sizes: dict[str, Any] = {"max_requests": 64, "row_tokens": 1 + MOST}
        return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2, draft=head, **sizes)

    return opened


def _config(hidden: int, ffn: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": WORDS,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **changes,
    }


def head_config(hidden: int, ffn: int, num_said: int, **changes: Any) -> dict[str, Any]:
    """Return what its `config.json` says."""
    return _config(hidden, ffn) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "draft_vocab_size": num_said,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
        **changes,
    }


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def head_shapes(hidden: int, ffn: int, num_said: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a head, without those that say which words it has."""
    rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    attention = {"q": rows[0], "k": rows[1], "v": rows[1]}
    return {
        "fc.weight": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{name}_proj.weight": (size, 2 * hidden) for name, size in attention.items()},
        "midlayer.self_attn.o_proj.weight": (hidden, rows[0]),
        "midlayer.mlp.gate_proj.weight": (ffn, hidden),
        "midlayer.mlp.up_proj.weight": (ffn, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, ffn),
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_said, hidden),
    }


@cache
def random_model() -> Any:
    """Return a random model of transformers."""
    import transformers

    values = {name: value for name, value in _config(64, FFN).items() if name != "architectures"}
    torch.manual_seed(0)
    no_ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, **no_ends, initializer_range=0.3))
    return model.eval()


def random_folders(base: Path, words: Path) -> Folders:
    """Write both; `words` is a folder with a tokenizer."""
    model, head = base / "model", base / "head"
    random_model().save_pretrained(model)
    (model / "tokenizer.json").write_bytes((words / "tokenizer.json").read_bytes())
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in head_shapes(64, FFN, NUM_SAID).items():
        is_norm = len(shape) == 1
        tensors[name] = torch.randn(shape, generator=generator) * (0.2 if is_norm else 0.3) + float(is_norm)
    said = torch.randperm(WORDS, generator=generator)[:NUM_SAID].sort().values
    tensors["d2t"] = said - torch.arange(NUM_SAID)
    tensors["t2d"] = torch.zeros(WORDS, dtype=torch.bool).index_fill(0, said, True)
    return Folders(model, write(head, head_config(64, FFN, NUM_SAID), tensors))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _turned(states: Tensor) -> Tensor:
    """Rotate `[num_tokens, num_heads, HEAD_DIM]` by their places."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(states))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states[..., :half], states[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def head_layer(tensors: Mapping[str, Tensor], embedded: Tensor, rows: Tensor) -> Tensor:
    """Compute the layer of arXiv 2503.01840 over a whole text; both are `[num_tokens, hidden_size]`, and the result."""
    layer = {name.removeprefix("midlayer."): each for name, each in tensors.items()}
    beside = (_normed(embedded, layer["input_layernorm.weight"]), _normed(rows, layer["hidden_norm.weight"]))
    x = torch.cat(beside, dim=-1)
    q, k, v = ((x @ layer[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for name in "qkv")
    q, k = _turned(q), _turned(k).repeat_interleave(HEADS // KV_HEADS, 1)
    v = v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
    scores = scores + torch.full((len(x), len(x)), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    stream = rows + attended @ layer["self_attn.o_proj.weight"].T
    normed = _normed(stream, layer["post_attention_layernorm.weight"])
    gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return stream + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


def guesses_by_reference(head: Path, tokens: Sequence[int], count: int) -> list[int]:
    """Return what the head of `random_folders` guesses behind `tokens`, each computed from the beginning."""
    tensors, model, ids = load_file(head / "model.safetensors"), random_model(), list(tokens)
    with torch.inference_mode():
        outputs = model(torch.tensor([ids]), output_hidden_states=True).hidden_states  # 0: the embedding
        rows = torch.cat([outputs[1 + layer][0] for layer in LAYERS], dim=-1) @ tensors["fc.weight"].T
        rows = torch.cat((torch.zeros(1, rows.shape[1]), rows[:-1]))
        for _ in range(count):
            out = head_layer(tensors, model.model.embed_tokens(torch.tensor(ids)), rows)
            said = int((_normed(out[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T).argmax())
            ids.append(said + int(tensors["d2t"][said]))
            rows = torch.cat((rows, out[-1:]))
    return ids[len(tokens) :]


def by_rows(tensors: dict[str, Tensor]) -> None:
    """Have the head look at the row before a token alone, which is the token's: it says its successor, and so on."""
    one = torch.eye(WORDS)
    succeeded = one.roll(SUCCESSOR, 0)
    size = math.sqrt(WORDS)  # of the one number of a normed row
    tensors["midlayer.mlp.gate_proj.weight"][:WORDS] = 1.0
    tensors["midlayer.mlp.up_proj.weight"][:WORDS] = succeeded - one
    tensors["midlayer.mlp.down_proj.weight"][:, :WORDS] = one / (size * F.silu(torch.tensor(size)))
    tensors["fc.weight"][:] = torch.cat((0.5 * succeeded, 0.3 * succeeded, 0.2 * succeeded), dim=1)


def by_keys(tensors: dict[str, Tensor]) -> None:
    """Have it look one token back, at what it kept of that token alone: the word behind the next one."""
    angles = THETA ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    query, key = torch.cat((torch.ones(8), torch.zeros(8))), torch.cat((angles.cos(), angles.sin()))
    strength = 30 / math.sqrt(WORDS)
    for name, one_head, num_heads in (("q", query, HEADS), ("k", key, KV_HEADS)):
        rows = one_head.repeat(num_heads)[:, None] * strength
        tensors[f"midlayer.self_attn.{name}_proj.weight"][:, :WORDS] = rows
    turns = 2 * math.pi / WORDS * torch.arange(WORDS)[:, None] * torch.tensor(FREQUENCIES)
    codes = torch.cat((turns.cos(), turns.sin()), dim=1) / math.sqrt(len(FREQUENCIES))
    # the word two further, less the one further, which the pass before has added to the row
    behind = codes.roll(-2 * SUCCESSOR, 0) - codes.roll(-SUCCESSOR, 0)
    tensors["midlayer.self_attn.v_proj.weight"][:, :WORDS] = behind.T
    heads = codes.view(WORDS, KV_HEADS, 1, HEAD_DIM).expand(-1, -1, HEADS // KV_HEADS, -1)
    tensors["midlayer.self_attn.o_proj.weight"][:] = heads.flatten(1)


def sure_folders(base: Path, knows: Any) -> Folders:
    """Write a model behind whose word `t` comes `t + SUCCESSOR`, in a circle, and a head that knows it as `knows` says.

    The head numbers its words in the other direction, so that who forgets `d2t` says others.
    """
    torch.manual_seed(5)
    one = torch.eye(WORDS)
    values = _config(WORDS, FFN)
    tensors = {}
    for name, pieces in placement_of(from_hf(values, {}, "sure")):
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        nothing = name.endswith(ADD_NOTHING)
        tensors[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * (0.0 if nothing else 0.1)
    tensors |= {"model.embed_tokens.weight": one, "lm_head.weight": one.roll(SUCCESSOR, 0)}
    model = write(base / "model", values, tensors)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    ffn = WORDS + 1
    head = {name: torch.full(shape, float(len(shape) == 1)) for name, shape in head_shapes(WORDS, ffn, WORDS).items()}
    knows(head)
    head["lm_head.weight"] = one.flip(0)
    head["d2t"] = torch.arange(WORDS).flip(0) - torch.arange(WORDS)
    return Folders(model, write(base / "head", head_config(WORDS, ffn, WORDS), head))
