"""What each process imports: starting one must not cost what only others need. `bench/imports.py` measures it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

FAMILY = "diptych.architectures.families"
CHATS = "jinja2"  # to show chats, which only routers do
CERTIFICATES = "diptych.common.trust.tls"  # where there are some
VIEW = "diptych.common.members.membership"  # of who follows members
OTHERS = (  # process -> what it does without
    ("diptych.cli.main", ("asyncio", "ctypes", "difflib", "tempfile")),
    ("diptych.cli.setup.up", ("google.protobuf", "grpc", "prometheus_client", "diptych.router.keys.caller")),
    ("diptych.cli.ask.chat", ("diptych.common.trust", "json")),
    ("diptych.cli.ask.generate", ("diptych.common.trust", "json")),
    ("diptych.cli.measure.bench", ("asyncio", "datetime", "json", CERTIFICATES)),
    ("diptych.cli.observe.status", ("fastapi", "numpy", "prometheus_client")),
    ("diptych.bootstrap.main", ("fastapi", "importlib.metadata", "numpy", "uvicorn", CERTIFICATES, VIEW)),
    ("diptych.router.main", ("llguidance", FAMILY, "diptych.engine")),
    ("diptych.unified.main", (CHATS, FAMILY, "fastapi", "llguidance", "diptych.engine.values.request")),
    (
        "diptych.unified.scheduler",
        ("asyncio", CHATS, FAMILY, "grpc", "diptych.kvtransfer.nixl", "diptych.kvtransfer.ucx"),
    ),
    ("diptych.embedded.engine", (CHATS, "diptych.kvtransfer.transport", "diptych.router.text.parsing", VIEW)),
    ("diptych.grammars.check_process", ("asyncio", "diptych.tokens", "numpy", "re2")),
)


@pytest.mark.parametrize(("process", "others"), OTHERS)
def test_a_process_imports_nothing_that_only_others_need(process: str, others: tuple[str, ...]) -> None:
    code = f"import sys, {process}; print(*[name for name in {others!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == []


def test_a_model_of_one_family_imports_no_other() -> None:
    values: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    values |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    values |= {"vocab_size": 99, "intermediate_size": 64, "max_position_embeddings": 99, "head_dim": 32}
    code = f"""if True:
        import sys
        from diptych.architectures.registry import from_hf
        from_hf({values!r}, {{}}, "tiny")
        print(*[name for name in sys.modules if name.count(".") == 4 and name.startswith("{FAMILY}")])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == [f"{FAMILY}.dense.llama"]
