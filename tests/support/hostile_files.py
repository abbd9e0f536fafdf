"""Files of models that lie, each with a name that says how; and a process with little memory that opens them.

python tests/support/hostile_files.py < lines of [kind, path]: prints, as lines of JSON, what opening each raised.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

MEMORY_BYTES: Final = 3 << 30  # of address space: libraries take one
HUGE: Final = 1 << 30  # of a file with a hole
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def safetensors(header: object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def safetensors_that_lie() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "no header", bytes(8)
    yield "length of 2**64-1", safetensors({"x": tensor()}, length=2**64 - 1)
    yield "length beyond the file", safetensors({"x": tensor()}, length=4000)
    yield "length into the file", safetensors({"x": tensor()}, length=20)
    yield "not JSON", safetensors(b"{]")
    yield "no object", safetensors([])
    yield "not UTF-8", safetensors(b'{"\xff": 1}')
    yield "nested", safetensors(b"[" * 1_000_000)
    yield "nested below the limit", safetensors(b'{"x":' * 90_000)
    yield "many values", safetensors(b'{"x":[' + b"[]," * 4_000_000 + b"[]]}")
    yield "no entry", safetensors({"x": 1})
    yield "no dtype", safetensors({"x": tensor(dtype=None)})
    yield "offset below 0", safetensors({"x": tensor(offsets=(-8, 0))})
    yield "offsets in disorder", safetensors({"x": tensor(offsets=(8, 0))})
    yield "offset beyond the file", safetensors({"x": tensor(offsets=(8, 16))})
    yield "offset of 2**80", safetensors({"x": tensor(offsets=(2**80, 2**80 + 8))})
    yield "offsets that are no numbers", safetensors({"x": tensor(offsets=("0", True))})
    yield "offsets of three", safetensors({"x": tensor(offsets=(0, 4, 8))})
    yield "shape that overflows", safetensors({"x": tensor(shape=(2**62, 2**62, 4))})
    yield "shape below 0", safetensors({"x": tensor(shape=(-1, -2))})
    yield "shape of many dimensions", safetensors({"x": tensor(shape=(1,) * 500_000)})
    yield "shape that is larger than its bytes", safetensors({"x": tensor(shape=(3,))})
    yield "shape that is smaller than its bytes", safetensors({"x": tensor(shape=(0,))})
    yield "overlap", safetensors({"x": tensor(), "y": tensor(shape=(1,), offsets=(4, 8))})
    yield "bytes behind the last tensor", safetensors({"x": tensor()}, bytes(9))
    yield "same name twice", safetensors(b'{"x":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"x":{}}')


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def table(name: bytes, *shape: int, kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape) if dims is None else dims, *shape, kind, offset)


def gguf(*parts: bytes, tensors: int = 0, keys: int = 0, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)
    return head + bytes(-len(head) % 32) + data


def gguf_that_lie() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "magic alone", b"GGUF"
    yield "tensors of 2**63", gguf(tensors=2**63)
    yield "keys of 2**64-1", gguf(keys=2**64 - 1)
    yield "name of 2**64-1", gguf(struct.pack("<Q", 2**64 - 1), keys=1)
    yield "name of 2**63-1", gguf(struct.pack("<Q", 2**63 - 1), bytes(100), keys=1)
    yield "text of 2**40", gguf(key(b"k", 8, struct.pack("<Q", 2**40)), keys=1)
    yield "text that is not UTF-8", gguf(key(b"k", 8, text(b"\xff")), keys=1)
    yield "type of 99", gguf(key(b"k", 99, bytes(8)), keys=1)
    yield "array of 2**63 numbers", gguf(key(b"k", 9, array(0, 2**63)), keys=1)
    yield "array of 2**62 texts", gguf(key(b"k", 9, array(8, 2**62, bytes(64))), keys=1)
    yield "array of a type of 99", gguf(key(b"k", 9, array(99, 1, bytes(8))), keys=1)
    yield "arrays in arrays", gguf(key(b"k", 9, array(9, 1) * 100_000), keys=1)
    yield "arrays of empty arrays", gguf(key(b"k", 9, array(9, 9_000_000, array(0, 0) * 1000)), keys=1)
    yield "same key twice", gguf(key(b"k", 0, b"\1") * 2, keys=2)
    for value in (0, 3, 2**31, 2**32 - 1):
        alignment = key(b"general.alignment", 4, struct.pack("<I", value))
        yield f"alignment of {value}", gguf(alignment, table(b"x", 2), tensors=1, keys=1, data=bytes(64))
    yield "alignment in words", gguf(key(b"general.alignment", 8, text(b"32")), keys=1)
    yield "dimensions of 2**32-1", gguf(table(b"x", 2, dims=2**32 - 1), tensors=1)
    yield "no dimensions", gguf(table(b"x"), tensors=1)
    yield "no values", gguf(table(b"x", 4, 0), tensors=1)
    yield "shape that overflows", gguf(table(b"x", 2**62, 2**62, 16), tensors=1, data=bytes(64))
    yield "offset of 2**64-1", gguf(table(b"x", 2, offset=2**64 - 1), tensors=1, data=bytes(64))
    yield "offset beyond the file", gguf(table(b"x", 2, offset=64), tensors=1, data=bytes(64))
    yield "rows that are no blocks", gguf(table(b"x", 33, kind=2), tensors=1, data=bytes(64))
    yield "overlap", gguf(table(b"x", 4), table(b"y", 4, offset=8), tensors=2, data=bytes(64))
    yield "same tensor twice", gguf(table(b"x", 4) * 2, tensors=2, data=bytes(64))


def configurations_that_lie() -> Iterator[tuple[str, bytes]]:
    """`config.json`s."""
    yield "nested", b"[" * 1_000_000
    yield "no object", b"3"
    yield "no numbers", json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": "64"}).encode()
    value: Any
    for name in sorted(CONFIG.keys() - {"architectures", "rms_norm_eps"}):
        for value in (2**40, 10**9 if "position" not in name else 10**10, -1, 0, 1.5, "7", [], True, {}):
            yield f"{name} of {value}", json.dumps(CONFIG | {name: value}).encode()
    for name, values in {
        "architectures": (3, {}, [3]),
        "rms_norm_eps": ("x", [1]),
        "head_dim": (2**40, "x"),
        "num_key_value_heads": (3, -1),
        "partial_rotary_factor": (1e300, -1, "x"),
        "rope_scaling": ({"rope_type": "linear"}, {"rope_type": [3]}, {"rope_type": "yarn", "factor": 0}, "x", 3),
        "rope_theta": ("x", [3]),
        "eos_token_id": ("x", {"a": 1}, [None]),
    }.items():
        for value in values:
            yield f"{name} of {value}", json.dumps(CONFIG | {name: value}).encode()


def open_safetensors(path: Path) -> None:
    from diptych.checkpoints.safetensors import read_tensors

    list(read_tensors(path))


def open_gguf(path: Path) -> None:
    from diptych.checkpoints.gguf import GgufFile

    file = GgufFile(path)
    for name in file.tensors:
        file.read(name)


def open_folder(path: Path) -> None:
    from diptych.checkpoints.source import open_model

    model = open_model(str(path.parent), "dummy")
    assert model.config.num_layers > 0


OPENERS: Final[dict[str, Callable[[Path], None]]] = {
    "safetensors": open_safetensors,
    "gguf": open_gguf,
    "folder": open_folder,
}


def main() -> None:
    import diptych.checkpoints.source  # noqa: F401 - before memory is counted

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        kind, path = json.loads(line)
        tracemalloc.start()
        error: Exception | None = None
        try:
            OPENERS[kind](Path(path))
        except Exception as caught:
            error = caught
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(json.dumps([type(error).__name__, str(error), peak]), flush=True)


if __name__ == "__main__":
    main()
