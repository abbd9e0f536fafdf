from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_config import tiny_config

from diptych.architectures import placement
from diptych.architectures.config import ModelConfig, Moe, Rope
from diptych.architectures.fair_shares import check_divides, check_experts, check_shared
from diptych.architectures.placement import Piece, Split
from diptych.architectures.recurrent import KimiDelta, Mamba2, Recurrent, ShortConv
from diptych.checkpoints.quantization.weight import as_floats
from diptych.checkpoints.shard import Cut, Shard, cut_tensors
from diptych.common.errors import ConfigError
from diptych.kernels.quantized import QuantizedArray

MODEL = tiny_config(
    vocab_size=7, hidden_size=4, num_layers=1, head_dim=2, ffn_size=8, rope=Rope(10_000.0, 2), context_len=16
)


def checkpoint(model: ModelConfig) -> dict[str, np.ndarray]:
    """Every element of a tensor is another number."""
    shapes = {
        name: (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]) for name, pieces in placement.llama(model)
    }
    return {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}


def part(model: ModelConfig, rank: int, size: int) -> dict[str, np.ndarray]:
    cuts = Shard(rank, size).placement(model, placement.llama)
    tensors = {name: as_floats(tensor) for name, tensor in cut_tensors(checkpoint(model).items(), cuts)}
    for name, each in cuts:
        assert tensors[name].shape == each[0].local.shape, name
    return tensors


@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_all_ranks_make_the_checkpoint(size: int) -> None:
    parts, whole = [part(MODEL, rank, size) for rank in range(size)], checkpoint(MODEL)
    for name, tensor in whole.items():
        pieces = [each[name] for each in parts]
        if "norm" in name:
            assert all((piece == tensor).all() for piece in pieces)
        elif "o_proj" in name or "down_proj" in name:
            assert (np.concatenate(pieces, axis=1) == tensor).all()
        else:
            assert (np.concatenate(pieces)[: len(tensor)] == tensor).all()


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_of_all_stages_make_the_checkpoint_and_only_a_tied_embedding_is_twice(tied: bool) -> None:
    model = replace(MODEL, num_layers=3, tie_embeddings=tied)
    found: list[str] = []
    for layers in (range(2), range(2, 3)):
        shard = Shard(1, 2, layers=layers)
        cuts = shard.placement(model, placement.llama)
        found += [name for name, _ in cut_tensors(checkpoint(model).items(), cuts)]
        own = {name: [piece.local.target for piece in each] for name, each in cuts if each}
        layer = layers.start
        assert own[f"model.layers.{layer}.self_attn.q_proj.weight"] == ["0.qkv"]
        assert shard.config(model).num_layers == len(layers)
        assert shard.config(model).num_heads == model.num_heads // 2
    assert sorted(found) == sorted([*checkpoint(model), *(["model.embed_tokens.weight"] if tied else [])])


MIXTURE = replace(MODEL, moe=Moe(num_experts=5, experts_per_token=2, ffn_size=8, normalize=True))


def test_whole_experts_are_dealt_out_and_each_is_on_one_rank() -> None:
    whole = checkpoint(MIXTURE)
    found: dict[str, int] = {}
    for rank, own in enumerate((range(2), range(2, 5))):
        shard = Shard(rank, 2, whole_experts=True)
        cuts = shard.placement(MIXTURE, placement.llama)
        tensors = dict(cut_tensors(whole.items(), cuts))
        config = shard.config(MIXTURE).moe
        assert config is not None
        assert (config.own, config.ffn_size) == (own, 8)
        for name in tensors:
            if ".experts." in name:
                assert (as_floats(tensors[name]) == whole[name]).all()
                found[name] = found.get(name, 0) + 1
        assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4, 4)  # all else is cut as ever
        assert tensors["model.layers.0.mlp.gate.weight"].shape == (5, 4)  # and every rank chooses alike
    assert found == {name: 1 for name in whole if ".experts." in name}


def test_networks_that_schedulers_share_are_cut_by_all_of_their_ranks_and_the_rest_by_those_of_one() -> None:
    """Two schedulers of two ranks: together all ranks have each column once."""
    whole, name = checkpoint(MODEL), "model.layers.0.mlp.{}_proj.weight"
    parts = []
    for rank in range(4):
        shard = Shard(rank % 2, 2, network=Shard(rank, 4))
        parts.append(dict(cut_tensors(whole.items(), shard.placement(MODEL, placement.llama))))
        config = shard.config(MODEL)
        assert (config.ffn_size, config.num_heads) == (MODEL.ffn_size // 4, MODEL.num_heads // 2)
    for matrix, axis in (("gate", 0), ("up", 0), ("down", 1)):
        joined = np.concatenate([as_floats(each[name.format(matrix)]) for each in parts], axis)
        assert (joined == whole[name.format(matrix)]).all()
    of_attention = "model.layers.0.self_attn.o_proj.weight"
    assert (as_floats(parts[3][of_attention]) == part(MODEL, 1, 2)[of_attention]).all()


@pytest.mark.parametrize(
    ("changes", "num_ranks", "words"),
    [
        ({}, 3, "3 ranks do not divide the [0-9]+ feed-forward columns of .*, which --dp-attention shares"),
        ({"borrowing_ffn_size": 6}, 4, "4 ranks do not divide the 6 feed-forward"),
        ({"moe": MIXTURE.moe}, 6, "5 experts.*fewer"),
    ],
)
def test_what_ranks_of_schedulers_can_not_share_is_refused(changes: Any, num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_shared(replace(MODEL, **changes), num_ranks)
    check_shared(MODEL, 2)


@pytest.mark.parametrize(("model", "size", "words"), [(MODEL, 2, "has no experts"), (MIXTURE, 6, "5 experts.*fewer")])
def test_experts_that_ranks_can_not_have_whole_are_refused(model: ModelConfig, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_experts(model, size)


def test_a_vocabulary_that_does_not_divide_is_padded_with_nothing() -> None:
    last = part(MODEL, 1, 2)["model.embed_tokens.weight"]
    assert last.shape == (4, 4)
    assert (last[-1] == 0).all()


def test_ranks_that_outnumber_the_kv_heads_share_them() -> None:
    keys, whole = "model.layers.0.self_attn.k_proj.weight", checkpoint(MODEL)
    heads = whole[keys].reshape(2, 2, 4)
    assert [Shard(rank, 4).config(MODEL).num_kv_heads for rank in range(4)] == [1] * 4
    for rank, head in enumerate((0, 0, 1, 1)):
        assert (part(MODEL, rank, 4)[keys] == heads[head]).all()


def test_a_fused_tensor_is_cut_in_each_of_its_pieces() -> None:
    fused = [*placement.fuse("qkv", "qkv", placement.attention(MODEL, 0))]
    cuts = Shard(1, 2).placement(MODEL, lambda model: placement.fuse("qkv", "qkv", placement.attention(model, 0)))
    rows = sum(piece.shape[0] for piece in fused[-1][1])
    whole = np.arange(rows, dtype=np.float32)[:, None].repeat(4, axis=1)
    ((_, cut),) = cut_tensors([("qkv.weight", whole)], cuts)
    assert as_floats(cut)[:, 0].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]  # the second half of q, of k and of v


def test_a_quantized_tensor_is_cut_as_it_is_stored() -> None:
    groups = QuantizedArray(
        "int8", np.arange(32, dtype=np.int8).reshape(8, 4), np.arange(16, dtype=np.float32).reshape(8, 2), group=2
    )
    values = groups.dequantize()
    for split, wanted in ((Split.ROWS, values[4:]), (Split.COLUMNS, values[:, 2:])):
        half = wanted.shape
        cut = Cut(Piece("x", 0, (8, 4), split), Piece("x", 0, half, split), 4 if split is Split.ROWS else 2)
        ((_, part),) = cut_tensors([("x", groups)], [("x", (cut,))])
        assert isinstance(part, QuantizedArray)
        assert (part.dequantize() == wanted).all()
    padded = Cut(Piece("x", 0, (8, 4), Split.ROWS), Piece("x", 0, (5, 4), Split.ROWS), 5)
    ((_, part),) = cut_tensors([("x", groups)], [("x", (padded,))])
    assert (as_floats(part) == np.concatenate([values[5:], np.zeros((2, 4))])).all()


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "3 does not divide the 4 attention heads"),
        ({"ffn_size": 9}, 2, "the 9 feed-forward columns"),
        ({"moe": Moe(4, 2, 5, True)}, 2, "the 5 columns of an expert"),
        ({"num_heads": 12, "num_kv_heads": 6, "ffn_size": 12}, 4, "neither divides the 6 KV heads"),
        ({"recurrent": Recurrent((0,), Mamba2(8, 4, 2, 4, 4, 0.0))}, 4, "the 2 groups of a state space"),
        ({"recurrent": Recurrent((0,), KimiDelta(6, 4, 4))}, 4, "the 6 heads of a delta rule"),
        ({"recurrent": Recurrent((0,), ShortConv(6, 3))}, 4, "the 3 blocks of 2 channels of a short convolution"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(changes: dict[str, object], size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_divides(replace(MODEL, **changes), size)  # type: ignore[arg-type]
