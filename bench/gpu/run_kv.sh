#!/usr/bin/env bash
# KV transfer between two GPUs of this host: the conformance suite over every path, then the benchmarks, in one go.
# Needs PyTorch with CUDA, Triton, UCX with its headers (`pip install libucx-cu13`), a C compiler and pytest.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="bench:bench/gpu:kernels:kvtransfer:proto:services${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout 240 python3 -m pytest -q -m gpu --confcutdir=tests/kvtransfer tests/kvtransfer --maxfail=8 --durations=5
timeout 400 python3 bench/gpu/kv_transfer.py "$@"
timeout 300 python3 bench/gpu/kv_layouts.py "$@"
for path in mover put; do timeout 120 python3 bench/gpu/kv_ttft.py --path $path "$@"; done
