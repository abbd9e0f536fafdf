#!/usr/bin/env bash
# The GPU tests and benchmarks of this checkout, installed or not: see bench/gpu/parts.py.
#   bench/gpu/run.sh [PART ...] [--quick] [--out FOLDER] [--budget-s SECONDS] [--list]
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD # whole paths: some processes run in other folders
export PYTHONPATH="$root/bench:$root/bench/gpu:$root/kernels:$root/kvtransfer:$root/proto:$root/services${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DIPTYCH_ROOFLINE_FILE="$work/roofline.json"
if ! python3 -c 'import importlib.metadata as m; m.version("diptych")' 2>/dev/null; then # a checkout, nothing installed
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  mkdir -p "$work/site/diptych-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: diptych\nVersion: %s\n' "$version" >"$work/site/diptych-$version.dist-info/METADATA"
  export PYTHONPATH="$work/site:$PYTHONPATH"
fi
python3 bench/gpu/parts.py "$@"
