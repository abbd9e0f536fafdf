#!/usr/bin/env bash
# Every GPU benchmark in one go, in less than 10 minutes: on one GPU all but what needs two, which is told.
#
#   bench/gpu/run.sh [PART ...]      parts: check roofline attention latents sparse sinks experts deltas recurrent launches kernels decode defaults prefill parity peers kv pd sanitizer
#   QUICK=1 bench/gpu/run.sh         fewer cases
#   OUT=FOLDER bench/gpu/run.sh      keeps the JSON lines (results.jsonl) and pictures there, too
#
# Without parts: all but `latents`, `sparse`, `sinks`, `experts`, `deltas`, `recurrent`, `launches`, `defaults`, `kv` (bench/gpu/run_kv.sh) and `sanitizer`, which take minutes of their
# own; where there are two GPUs, what needs one runs on both at once. Each part has its own time limit, all together
# BUDGET_S; rows that were measured before one are kept. Ends with 1 when a part failed.
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
out=${OUT:-$work}
quick=${QUICK:+--quick}
budget_s=${BUDGET_S:-585}
num_gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
touch "$work/failed"

# SECONDS: the time limit of a part that may take so long, within what is left of all
limit() {
  local left=$((budget_s - SECONDS))
  [ "$left" -lt 1 ] && left=1
  echo $(($1 < left ? $1 : left))
}

# NAME WORDS: a part failed, of this process or a lane
fail() {
  echo "$1" >>"$work/failed"
  echo "$1: $2"
}

# NAME SECONDS COMMAND...: the tables of a command that takes --json; its lines are kept
table() {
  local name=$1 limit_s
  limit_s=$(limit "$2")
  shift 2
  echo "== $name ($(date +%T))"
  # shellcheck disable=SC2086
  timeout -k 10 "$limit_s" python3 "$@" --json $quick | tee -a "$out/results.jsonl" | python3 bench/table.py
  local codes=("${PIPESTATUS[@]}")
  [ "${codes[0]}" = 0 ] || fail "$name" "exit status ${codes[0]} (124: out of time)"
}

# NAME SECONDS COMMAND...
plain() {
  local name=$1 limit_s
  limit_s=$(limit "$2")
  shift 2
  echo "== $name ($(date +%T))"
  timeout -k 10 "$limit_s" "$@"
  local code=$?
  [ "$code" = 0 ] || fail "$name" "exit status $code (124: out of time)"
}

# NAME SECONDS COMMAND...: a table that needs two GPUs
on_two() {
  if [ "$num_gpus" -ge 2 ]; then table "$@"; else echo "== $1: needs two GPUs, here is $num_gpus"; fi
}

run_part() {
  case $1 in
    check) plain check 60 python3 bench/gpu/setup_check.py ;;
    roofline) table roofline 60 bench/gpu/roofline.py ;;
    attention) table attention 150 bench/gpu/attention.py ;;
    latents) table latents 120 bench/gpu/latent_attention.py ;;
    sparse) table sparse 180 bench/gpu/sparse_attention.py ;;
    sinks) table sinks 60 bench/gpu/sink_attention.py ;;
    experts) table experts 300 bench/gpu/mxfp4_experts.py ;;
    deltas) table deltas 60 bench/gpu/delta_rule.py ;;
    recurrent) table recurrent 90 bench/gpu/recurrent_prompts.py ;;
    launches) table launches 240 bench/gpu/tune_recurrent_prompts.py ;;
    kernels) table kernels 80 bench/gpu/other_kernels.py ;;
    defaults) table defaults 400 bench/gpu/defaults.py ;;
    decode) table decode 160 bench/gpu/decode_step.py ;;
    prefill) table prefill 150 bench/gpu/prefill.py ;;
    parity) table parity 200 bench/gpu/parity.py --gpus "$num_gpus" ;;
    peers) table peers 100 bench/gpu/peers.py ;;
    pd) on_two pd 480 bench/gpu/pd.py --seconds "${PD_SECONDS:-8}" ;;
    kv) plain kv 560 bench/gpu/run_kv.sh ;;
    sanitizer) plain sanitizer 200 bench/gpu/sanitizer.sh ;;
    *) fail "$1" "no such part" ;;
  esac
}

run_parts() {
  local part
  for part in "$@"; do run_part "$part"; done
}

# GPU PART...: beside others, on one GPU
lane() {
  local gpu=$1
  shift
  CUDA_VISIBLE_DEVICES=$gpu run_parts "$@" >"$work/lane$gpu" 2>&1 &
}

if [ $# -gt 0 ]; then
  run_parts "$@"
elif [ "$num_gpus" -ge 2 ]; then
  run_parts check roofline
  lane 0 decode prefill peers
  lane 1 attention kernels
  wait
  cat "$work/lane0" "$work/lane1"
  run_parts parity pd
else
  run_parts check roofline attention decode prefill parity pd kernels peers
fi
[ ! -s "$out/results.jsonl" ] || python3 bench/gpu/plots.py "$out/results.jsonl" --to "$out"
echo "== $SECONDS s; failed: $(paste -sd' ' "$work/failed" | grep . || echo none)"
[ ! -s "$work/failed" ]
