"""Runs in a pod of the image under test: makes a small model with many bytes, and serves it with a SHA256SUMS.

Prints a line of JSON for each answer: what was asked, how much was sent. The first connection of the weights is cut.
Who does not give the token of its environment gets nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import numpy as np
import tokenizers

HIDDEN, VOCAB, LAYERS = 512, 32000, 2  # a tokenizer has fewer tokens than there are rows
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
CUT: Final = 20_000_000
WEIGHTS: Final = "/tiny/model.safetensors"


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
    files["model.safetensors"] = _safetensors(_shapes())
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    return {f"/tiny/{name}": data for name, data in {**files, "SHA256SUMS": sums.encode()}.items()}


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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    num_cuts = 1

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if self.headers.get("authorization") != f"Bearer {os.environ['DIPTYCH_BEARER_TOKEN']}":
            self.send_error(401)
            return
        data = self.files.get(self.path)
        first = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        begin = int(first[1]) if first else 0
        body = (data or b"")[begin:]
        self.send_response(404 if data is None else 206 if first else 200)
        if data is not None and first:
            self.send_header("content-range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if with_body and self.path == WEIGHTS and Handler.num_cuts:
            Handler.num_cuts -= 1
            body, self.close_connection = body[:CUT], True
        if with_body:
            self.wfile.write(body)
            line = json.dumps({"path": self.path, "from": begin, "sent": len(body)})
            print(f"{line}\n", end="", flush=True)  # at once: others print, too

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    Handler.files = model()
    with ThreadingHTTPServer(("", 8000), Handler) as server:
        print(json.dumps({"ready": len(Handler.files[WEIGHTS])}), flush=True)
        server.serve_forever()
