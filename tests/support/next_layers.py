"""Random checkpoints that have a layer which predicts one token more, and what transformers makes of them.

`sure_next_layer` has one that is right by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from draft_models import AskAlways
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from diptych.architectures.config import DraftLayers
from diptych.checkpoints.source import ChangedModel, ModelSource, open_model
from diptych.engine.drafting.ahead import NextLayerSource
from diptych.engine.runner.model_runner import ModelRunner
from diptych.engine.values.batch import DraftBatch, ForwardBatch, ForwardMode, StateMoves

WORDS: Final = 321
MAX_ROW: Final = 6
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LATENT: Final = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20}
_NETS: Final = {  # every second layer keeps a state
    **{"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"num_experts": 6, "shared_expert_intermediate_size": 24},
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "DeepseekV3": _SIZES | _LATENT | {"q_lora_rank": 28, "num_key_value_heads": 4},
    "Qwen3Next": _SIZES | _NETS,
    "Qwen3_5Moe": _SIZES | _NETS | {"mtp_num_hidden_layers": 1},
    "Glm4Moe": _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
}

STATELESS: Final = tuple(name for name, settings in FAMILIES.items() if "layer_types" not in settings)


def with_next(source: ModelSource) -> ModelSource:
    """Return `source` with the layers of pages that its next layer needs."""
    own = source.next_layer().config
    return ChangedModel(source, replace(source.config, draft=DraftLayers(own, own.num_kv_heads)))


def runner_with_next(source: ModelSource, kv: Tensor) -> ModelRunner:
    """`source` is `with_next`."""
    sizes: dict[str, Any] = {"max_requests": 64, "row_tokens": MAX_ROW}
    draft = source.next_layer()
    return ModelRunner(source, kv, dtype="float32", attention_backend="cpu", max_loras=2, draft=draft, **sizes)


class AskNextLayer(AskAlways):
    """As `AskAlways`, of the layer that predicts one token more."""

    new_source = NextLayerSource


def new_model(family: str) -> tuple[Any, MtpLayer]:
    """Return a random model of transformers, and its layer."""
    import transformers

    config_name = {"Qwen3_5Moe": "Qwen3_5MoeText"}.get(family, family)
    config = getattr(transformers, f"{config_name}Config")(**FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    layers = model.model.layers
    index = len(layers) - 1 if "Qwen" in family else len(layers)  # of one that attends
    layer = MtpLayer(config, type(layers[-1]), type(model.model.norm), index).eval()
    for name, values in layer.named_parameters():  # some of which it leaves as the memory was
        if "norm" in name:
            values.data.normal_(1.0, 0.2)
        else:
            values.data.normal_(0.0, 0.3 if values.dim() > 1 else 0.1)
    return model, layer


def save(folder: Path, model: Any, layer: MtpLayer, words: Path) -> Path:
    """Write both as checkpoints have them; `words` is a folder with a tokenizer."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    prefix, last = (
        f"model.layers.{model.config.num_hidden_layers}.",
        f"model.layers.{model.config.num_hidden_layers - 1}.",
    )
    model.model.layers[-1].load_state_dict(layer.mtp_block.state_dict())
    model.save_pretrained(folder / "again")
    blocks = load_file(folder / "again" / "model.safetensors")
    tensors |= {name.replace(last, prefix): each for name, each in blocks.items() if name.startswith(last)}
    assert layer.post_norm is not None
    own = {"enorm": layer.enorm, "hnorm": layer.hnorm, "eh_proj": layer.eh_proj, "shared_head.norm": layer.post_norm}
    tensors |= {f"{prefix}{name}.weight": each.state_dict()["weight"].clone() for name, each in own.items()}
    if "qwen" in model.config.model_type:
        tensors = {_as_qwen(name, prefix): each for name, each in tensors.items()}
    else:
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_bytes((words / "tokenizer.json").read_bytes())
    return folder


def _as_qwen(name: str, prefix: str) -> str:
    """Return what Qwen3-Next and its successors call a tensor, if it is the layer's."""
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
    kind = name.removeprefix(prefix).removesuffix(".weight")
    if not name.startswith(prefix):
        return name
    return f"mtp.{own[kind]}.weight" if kind in own else name.replace(prefix, "mtp.layers.0.")


def random_folder(folder: Path, family: str, words: Path) -> Path:
    return save(folder, *new_model(family), words)


def guesses_by_transformers(family: str, tokens: Sequence[int], count: int) -> list[int]:
    """Return what the layer of `random_folder` guesses behind `tokens`, each computed from the beginning."""
    (model, layer), ids = new_model(family), list(tokens)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        rows = torch.cat((torch.zeros(1, hidden.shape[1]), hidden[:-1]))
        for _ in range(count):
            embedded, positions = model.model.embed_tokens(torch.tensor([ids])), torch.arange(len(ids))[None]
            turned = model.model.rotary_emb(embedded, positions)
            mask = torch.full((1, 1, len(ids), len(ids)), -torch.inf).triu(1)
            out = layer(embedded, rows[None], turned, mask, positions, None)[0]
            ids.append(int(model.lm_head(out[-1]).argmax()))
            rows = torch.cat((rows, out[-1:]))
    return ids[len(tokens) :]


PAGE, NUM_PAGES = 4, 32
TOKENS: Final = [(7 * i + i * i) % 300 for i in range(23)]
NewRunner = Callable[[ModelSource, Tensor], Any]  # on a pool


class Served:
    """One request, computed step by step."""

    def __init__(self, source: ModelSource, new_runner: NewRunner, device: str = "cpu") -> None:
        """`source` has draft layers."""
        layout = ModelRunner.pool_layout(source.config, num_pages=NUM_PAGES, page_size=PAGE, dtype="float32")
        self.kv = torch.full(layout.shape, torch.nan, device=device)
        self.runner = new_runner(source, self.kv)
        self.table = np.arange(1, 13, dtype=np.int32)[None]
        self.is_recurrent = source.config.recurrent is not None
        self._slot = self._row_start = 0

    def compute(self, tokens: list[int], start: int, end: int, *, row: bool = False, is_there: bool = False) -> None:
        """Compute a part of a text: of a prompt, or a row whose tokens are all sampled behind."""
        positions = np.arange(start, end)
        slots = self.table[0, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if row else ForwardMode.EXTEND,
            input_ids=np.array(tokens[start:end]),
            positions=positions,
            out_slots=np.where(is_there, 0, slots),
            page_table=self.table,
            seq_lens=np.array([end]),
            extend_lens=np.array([end - start]),
            num_sampled=np.array([end - start if row else 1]),
            states=self._states(start, end, row=row) if self.is_recurrent else None,
        )
        self.runner.logits(batch)

    def _states(self, start: int, end: int, *, row: bool) -> StateMoves:
        """What of the row before is in front of `start` came true."""
        slots, none, pages = np.array([self._slot]), np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
        late = np.array([start - self._row_start if self._row_start else 0])
        self._row_start = start if row and end - start > 1 else 0
        return StateMoves(slots, none if start else slots, none, pages, none, pages, late)

    def begin_like_it(self, num_tokens: int) -> None:
        """Go on with another request, whose first tokens are there; its state sees them."""
        self.table = np.array([[1, 2, *range(13, 23)]], np.int32)
        if self.is_recurrent:
            self._slot += 1
            self.compute(TOKENS, 0, num_tokens, is_there=True)

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """Guess behind `tokens`, the last of which is not computed yet."""
        newest, position = np.array(tokens[-1:]), np.array([len(tokens) - 1])
        assert self.runner.draft_model is not None
        found = self.runner.draft_model.draft(DraftBatch(newest, position, self.table, np.array([count]), PAGE))
        guessed: list[int] = found[0].tolist()
        return guessed


Guess = tuple[list[int], list[int]]  # what is guessed, and by transformers


def guesses(name: str, folder: Path, new_runner: NewRunner, device: str = "cpu") -> list[Guess]:
    """Return what the layer of a random checkpoint guesses, as `guesses_of`."""
    served = Served(with_next(open_model(str(folder))), new_runner, device)
    return guesses_of(served, partial(guesses_by_transformers, name))


def guesses_of(served: Served, by_others: Callable[[Sequence[int], int], list[int]]) -> list[Guess]:
    """Behind a prompt in two parts, a row of which three tokens came true, and a guess that was computed before."""
    found = list[Guess]()

    def guess(num_tokens: int, count: int) -> None:
        behind = TOKENS[:num_tokens]
        found.append((served.guess(behind, count), by_others(behind, count)))

    served.compute(TOKENS, 0, 7)
    served.compute(TOKENS, 7, 15)
    guess(16, 4)
    served.compute([*TOKENS[:18], 1, 2], 15, 20, row=True)
    guess(19, 4)
    served.compute(TOKENS, 18, 19, row=True)
    guess(20, 2)
    served.begin_like_it(8)
    served.compute(TOKENS, 8, 17)
    guess(18, 3)
    if served.is_recurrent:  # whose state would see a token twice
        return found
    served.compute(TOKENS, 16, 17, is_there=True)  # its last token is computed once more, and written nowhere
    guess(18, 2)
    return found
