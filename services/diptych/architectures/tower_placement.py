"""Where a tower's tensors go. Every rank has all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from diptych.architectures.placement import Piece, Placed, whole
from diptych.architectures.tower import Tower

TARGET: Final = "vision."  # how the names of all its weights begin
PREFIX: Final = "model.visual."  # and of its tensors, in Qwen's
SIGLIP: Final = "vision_tower.vision_model."
PROJECTOR: Final = "multi_modal_projector."
PROJECTION: Final = "mm_input_projection_weight"  # of columns, in place of rows
TURNED: Final = "mm_input_projection.weight"


def num_tower_parameters(placed: Iterable[Placed]) -> int:
    """Return the numbers in all tensors of a tower."""
    pieces = (piece for _, each in placed for piece in each)
    return sum(math.prod(piece.shape) for piece in pieces if piece.target.startswith(TARGET))


def qwen2_5_tower(tower: Tower) -> Iterator[Placed]:
    """Yield where the tower's tensors go, named as in Qwen2.5-VL."""
    hidden, names = tower.hidden_size, ("gate_proj", "up_proj", "down_proj")
    yield _patches(tower)
    for layer in range(tower.num_layers):
        prefix, target = f"{PREFIX}blocks.{layer}.", f"{TARGET}{layer}."
        for norm in ("norm1", "norm2"):
            yield whole(f"{prefix}{norm}.weight", f"{target}{norm}", (hidden,))
        yield from _attention(tower, prefix, target)
        for index, name in enumerate(names[:2]):
            start, rows = index * tower.ffn_size, tower.ffn_size
            yield f"{prefix}mlp.{name}.weight", (Piece(f"{target}up", start, (rows, hidden)),)
            yield f"{prefix}mlp.{name}.bias", (Piece(f"{target}up_bias", start, (rows,)),)
        yield from _linear(f"{prefix}mlp.{names[2]}", f"{target}down", hidden, tower.ffn_size)
    yield whole(f"{PREFIX}merger.ln_q.weight", f"{TARGET}merge.norm", (hidden,))
    yield from _linear(f"{PREFIX}merger.mlp.0", f"{TARGET}merge.up", tower.merged_size, tower.merged_size)
    yield from _linear(f"{PREFIX}merger.mlp.2", f"{TARGET}merge.down", tower.out_size, tower.merged_size)


def qwen3_tower(tower: Tower) -> Iterator[Placed]:
    """Yield where the tower's tensors go, named as in Qwen3-VL."""
    hidden = tower.hidden_size
    yield _patches(tower)
    yield whole(f"{PREFIX}patch_embed.proj.bias", f"{TARGET}patches_bias", (hidden,))
    yield whole(f"{PREFIX}pos_embed.weight", f"{TARGET}positions", (tower.num_positions, hidden))
    for layer in range(tower.num_layers):
        prefix, target = f"{PREFIX}blocks.{layer}.", f"{TARGET}{layer}."
        for norm in ("norm1", "norm2"):
            yield from _linear_norm(f"{prefix}{norm}", f"{target}{norm}", hidden)
        yield from _attention(tower, prefix, target)
        yield from _linear(f"{prefix}mlp.linear_fc1", f"{target}up", tower.ffn_size, hidden)
        yield from _linear(f"{prefix}mlp.linear_fc2", f"{target}down", hidden, tower.ffn_size)
    merged = tower.merged_size
    mergers = [("merger", "merge", hidden)]
    mergers += [(f"deepstack_merger_list.{tap}", f"tap.{tap}", merged) for tap in range(len(tower.taps))]
    for name, target, normed in mergers:
        yield from _linear_norm(f"{PREFIX}{name}.norm", f"{TARGET}{target}.norm", normed)
        yield from _linear(f"{PREFIX}{name}.linear_fc1", f"{TARGET}{target}.up", merged, merged)
        yield from _linear(f"{PREFIX}{name}.linear_fc2", f"{TARGET}{target}.down", tower.out_size, merged)


def gemma3_tower(tower: Tower) -> Iterator[Placed]:
    """Yield where the tower's tensors go, named as in Gemma 3; its projection is that of the checkpoint, turned."""
    hidden, embeddings = tower.hidden_size, f"{SIGLIP}embeddings."
    kernel = hidden, 3, tower.patch_size, tower.patch_size
    yield whole(f"{embeddings}patch_embedding.weight", f"{TARGET}patches", kernel)
    yield whole(f"{embeddings}patch_embedding.bias", f"{TARGET}patches_bias", (hidden,))
    yield whole(f"{embeddings}position_embedding.weight", f"{TARGET}positions", (tower.num_positions, hidden))
    for layer in range(tower.num_layers):
        prefix, target = f"{SIGLIP}encoder.layers.{layer}.", f"{TARGET}{layer}."
        for norm in (1, 2):
            yield from _linear_norm(f"{prefix}layer_norm{norm}", f"{target}norm{norm}", hidden)
        for start, name in zip(range(0, 3 * hidden, hidden), "qkv", strict=True):
            yield f"{prefix}self_attn.{name}_proj.weight", (Piece(f"{target}qkv", start, (hidden, hidden)),)
            yield f"{prefix}self_attn.{name}_proj.bias", (Piece(f"{target}qkv_bias", start, (hidden,)),)
        yield from _linear(f"{prefix}self_attn.out_proj", f"{target}o", hidden, hidden)
        yield from _linear(f"{prefix}mlp.fc1", f"{target}up", tower.ffn_size, hidden)
        yield from _linear(f"{prefix}mlp.fc2", f"{target}down", hidden, tower.ffn_size)
    yield from _linear_norm(f"{SIGLIP}post_layernorm", f"{TARGET}last", hidden)
    yield whole(f"{PROJECTOR}mm_soft_emb_norm.weight", f"{TARGET}mean.norm", (hidden,))
    yield whole(f"{PROJECTOR}{TURNED}", f"{TARGET}mean.down", (tower.out_size, hidden))


def _linear_norm(name: str, target: str, size: int) -> Iterator[Placed]:
    yield whole(f"{name}.weight", target, (size,))
    yield whole(f"{name}.bias", f"{target}_bias", (size,))


def _patches(tower: Tower) -> Placed:
    shape = (tower.hidden_size, 3, tower.num_frames, tower.patch_size, tower.patch_size)
    return whole(f"{PREFIX}patch_embed.proj.weight", f"{TARGET}patches", shape)


def _attention(tower: Tower, prefix: str, target: str) -> Iterator[Placed]:
    hidden = tower.hidden_size
    yield from _linear(f"{prefix}attn.qkv", f"{target}qkv", 3 * hidden, hidden)
    yield from _linear(f"{prefix}attn.proj", f"{target}o", hidden, hidden)


def _linear(name: str, target: str, rows: int, columns: int) -> Iterator[Placed]:
    yield whole(f"{name}.weight", target, (rows, columns))
    yield whole(f"{name}.bias", f"{target}_bias", (rows,))
