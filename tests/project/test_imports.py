"""What each process imports: starting one must not cost what only others need. `bench/imports.py` measures it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.integration

FAMILY = "diptych.architectures.families"
CHATS = "jinja2"  # to show chats, which only routers do
CERTIFICATES = "diptych.common.trust.tls"  # where there are some
VIEW = "diptych.common.members.membership"  # of who follows members
MODELS = ("diptych.architectures.config", "diptych.checkpoints.gguf", "diptych.checkpoints.hf_folder")  # one is opened
OFF_IN_ROUTERS = (  # options that are off, and what only some ask for
    *(
        "diptych.router.batches",
        "diptych.router.console",
        "diptych.router.images.decode",
        "diptych.router.images.fetch",
    ),
    *("diptych.router.http.vectors.routes", "diptych.router.http.operate.openapi", "diptych.router.process.processes"),
    *("diptych.common.members.kubernetes_api", "diptych.kvtransfer.layout", "diptych.planner", "diptych.lang"),
)
OFF_IN_FRONTENDS = (  # other nodes, other weights
    *(
        "diptych.engine.nodes.leading",
        "diptych.engine.frontend.node",
        "diptych.engine.frontend.weights.weight_requests",
    ),
    *("psutil", "pydantic", "diptych.engine.values.step_model"),
)
OFF_IN_SCHEDULERS = (  # drafts, tiers that last, other ranks, adapters, grammars, no peers
    *("diptych.engine.drafting", "diptych.engine.tiers.file_tier", "diptych.engine.tiers.shared_tier"),
    *("diptych.engine.scheduler.rank", "diptych.engine.tensor_parallel.group", "diptych.engine.tensor_parallel.parts"),
    *("diptych.engine.lora.rank_part", "llguidance", "tokenizers", "diptych.kvtransfer.inproc", "importlib.metadata"),
)
OTHERS = (  # process -> what it does without
    ("diptych.cli.main", ("asyncio", "ctypes", "difflib", "tempfile")),
    ("diptych.cli.setup.up", ("google.protobuf", "grpc", "prometheus_client", "diptych.router.keys.caller")),
    ("diptych.cli.ask.chat", ("diptych.common.trust", "json")),
    ("diptych.cli.ask.generate", ("diptych.common.trust", "json")),
    ("diptych.cli.measure.bench", ("asyncio", "datetime", "json", CERTIFICATES)),
    ("diptych.cli.observe.status", ("fastapi", "numpy", "prometheus_client")),
    ("diptych.bootstrap.main", ("fastapi", "importlib.metadata", "numpy", "uvicorn", CERTIFICATES, VIEW)),
    ("diptych.router.main", ("llguidance", FAMILY, "diptych.engine", *MODELS, *OFF_IN_ROUTERS)),
    (
        "diptych.unified.main",
        (CHATS, FAMILY, "fastapi", "llguidance", "diptych.engine.values.request", *MODELS, *OFF_IN_FRONTENDS),
    ),
    (
        "diptych.unified.scheduler",
        (
            "asyncio",
            CHATS,
            FAMILY,
            "grpc",
            "diptych.kvtransfer.nixl",
            "diptych.kvtransfer.ucx",
            *MODELS,
            *OFF_IN_SCHEDULERS,
        ),
    ),
    (
        "diptych.embedded.engine",
        (CHATS, "grpc", *MODELS, "diptych.kvtransfer.transport", "diptych.router.text.parsing", VIEW),
    ),
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
