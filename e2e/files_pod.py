"""Runs in a pod of the image under test: makes a small model with many bytes, and serves it as others do.

It is in the folder `/tiny` with a SHA256SUMS, `acme/tiny` of a hub, and `s3://bucket/tiny`. Prints a line of JSON for
each file: which, from where, how much was sent. The first connection of the folder's weights is cut. Who gives no token
or key of its environment gets nothing; signatures are not verified.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Final

import numpy as np
import tokenizers
from files_server import COMMIT, FilesServer

HIDDEN, VOCAB, LAYERS = 512, 32000, 2  # a tokenizer has fewer tokens than there are rows
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
CUT: Final = 20_000_000
WEIGHTS: Final = "model.safetensors"


def model() -> dict[str, bytes]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"{one}{two}{three}" for one in LETTERS for two in LETTERS for three in LETTERS]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    files[WEIGHTS] = _safetensors(_shapes())
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    return {**files, "SHA256SUMS": sums.encode()}


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        own = {
            **{f"self_attn.{name}_proj": (rows, HIDDEN) for name, rows in (("q", 512), ("k", 128), ("v", 128))},
            "self_attn.o_proj": (HIDDEN, 512),
            **{f"mlp.{name}_proj": (2 * HIDDEN, HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
            **{name: (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")},
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    rng, header, parts, offset = np.random.default_rng(0), {}, [], 0
    for name, shape in shapes.items():
        data = rng.standard_normal(shape, dtype=np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (offset, offset + len(data))}
        parts.append(data)
        offset += len(data)
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + b"".join(parts)


class Told(FilesServer):
    """Gives files to who has its token, as a web server and a hub ask for it, or its key, as a bucket does."""

    def admits(self, authorization: str) -> bool:
        return super().admits(authorization) or f"Credential={os.environ['AWS_ACCESS_KEY_ID']}/" in authorization

    def has_sent(self, path: str, begin: int, nbytes: int) -> None:
        line = json.dumps({"path": path, "from": begin, "sent": nbytes})
        print(f"{line}\n", end="", flush=True)  # at once: others print, too


def main() -> None:
    files = model()
    with Told("", 8000) as server:
        server.token = os.environ["DIPTYCH_BEARER_TOKEN"]
        for folder in ("tiny", f"acme/tiny/resolve/{COMMIT}", "bucket/tiny"):
            server.files |= {f"/{folder}/{name}": data for name, data in files.items()}
        server.cut_after[f"/tiny/{WEIGHTS}"], server.num_cuts = CUT, 1
        print(json.dumps({"ready": len(files[WEIGHTS])}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
